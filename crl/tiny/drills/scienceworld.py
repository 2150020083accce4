"""Drills of ScienceWorld's tasks for tiny models. They play the simulator, which needs the extra.

The actor imitates scripted experiments. Most of them are played under advice; in some the agent may
ask. The actor also judges lessons. The extractor answers digests of experiments with one lesson of
a randomly drawn kind. A lesson is true of its episode; RL must teach which kinds help. The
extractor also answers questions of agents and merges the lessons of a variation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from crl.envs.scienceworld.lessons import LESSONS, digest, focused, lesson, read, visited_locations
from crl.envs.scienceworld.player import LOCATIONS
from crl.envs.scienceworld.tasks import SMALL, demonstration_tasks
from crl.modeling.demonstrations import Demonstration
from crl.tiny.drills import drill
from crl.tiny.drills.drill import Drill, Episode, demonstrated, lesson_answer, op_answer
from crl.tiny.drills.scienceworld_experiments import (
    ACTOR_EXPERIMENTS,
    ASKING_EXPERIMENTS,
    EXTRACTOR_EXPERIMENTS,
    random_lesson,
    random_thing,
)

QUESTION_TURNS = 3
"""Number of first turns in which an agent may ask."""


# ── the extractor ─────────────────────────────────────────────────────────────────────────────────


def lessons(rng: random.Random, n: int) -> Iterator[Demonstration]:
    """Yield answers to finished experiments: one op each, of a uniformly drawn kind."""
    return drill.lessons(
        digest,
        EXTRACTOR_EXPERIMENTS.episodes(rng, n),
        lambda episode: answer(rng.choice(list(LESSONS)), episode),
    )


def answer(kind: str, episode: Episode) -> str:
    """Return the lesson of this kind that the episode teaches, as an op in its canonical spelling.

    If the episode shows none, nothing is learnt. A "focus" lesson corrects a hint with another
    thing.
    """
    return lesson_answer(_lesson_text(kind, episode), episode.hint, makes_claim)


def _lesson_text(kind: str, episode: Episode) -> str | None:
    verdict, thing, room = focused(episode.segments) or ("", "", "")
    match kind:
        case "focus":
            return lesson("focus", thing, room) if verdict == "right" else None
        case "never":
            return lesson("never", thing) if verdict == "wrong" else None
        case "visit":
            return lesson("visit", place=visited_locations(episode.segments)[-1])
    return lesson(kind)


def refinements(rng: random.Random, n: int) -> Iterator[Demonstration]:
    """Yield answers to questions. No lesson is adapted: a lesson holds in every turn."""
    for episode in EXTRACTOR_EXPERIMENTS.episodes(rng, n):
        segments = drill.cut_at_question(episode, rng, QUESTION_TURNS)
        yield [
            *drill.refine_prompt(digest, episode.task, segments, random_bank_lesson(rng)),
            demonstrated(op_answer("return")),
        ]


def merges(rng: random.Random, n: int) -> Iterator[Demonstration]:
    return drill.merges(rng, n, SMALL, random_bank_lesson, makes_claim)


def random_bank_lesson(rng: random.Random) -> str:
    """Return a random lesson. Most lessons of a bank name the thing to focus on."""
    kind = "focus" if rng.random() < 0.65 else rng.choice(list(LESSONS))
    (task,) = rng.sample(demonstration_tasks(180), 1)
    return lesson(kind, random_thing(task, rng), rng.choice(LOCATIONS))


def makes_claim(text: str) -> bool:
    return read(text)[0] == "focus"


# ── the actor ─────────────────────────────────────────────────────────────────────────────────────


def verdicts(rng: random.Random, n: int) -> Iterator[Demonstration]:
    kinds = list(LESSONS)
    return drill.verdicts(
        rng,
        ((task, random_lesson(rng.choice(kinds), task, rng)) for task in demonstration_tasks(n)),
    )


ACTOR_DRILLS = (
    Drill("experiments", 8_000, ACTOR_EXPERIMENTS.make, SMALL),
    Drill("experiments with questions", 1_500, ASKING_EXPERIMENTS.make, SMALL, "ask"),
    Drill("verdicts on experiments", 1_000, verdicts, SMALL, "critic"),
)
EXTRACTOR_DRILLS = (
    Drill("experiment lessons", 8_000, lessons, SMALL),
    Drill("experiment refinements", 1_000, refinements, SMALL, "ask"),
    Drill("experiment merges", 4_000, merges, SMALL, "merge"),
)

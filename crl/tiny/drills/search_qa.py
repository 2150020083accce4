"""Drills of question answering.

The actor imitates scripted episodes. Most of them are played under advice; in some the agent may
ask. The actor also judges lessons. The extractor answers digests of episodes with one lesson of a
randomly drawn kind. A lesson that names an entity is true of its episode. The extractor also
answers questions of agents and merges the lessons of a topic.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from crl.envs.search_qa.lessons import LESSONS, digest, key_name, lesson, read, wrong_names
from crl.envs.search_qa.tasks import SMALL
from crl.modeling.demonstrations import Demonstration
from crl.tiny.drills import drill
from crl.tiny.drills.drill import Drill, Episode, demonstrated, lesson_answer, op_answer
from crl.tiny.drills.search_qa_episodes import (
    ACTOR_EPISODES,
    ASKING_EPISODES,
    CHOICE_EPISODES,
    EXTRACTOR_EPISODES,
    OTHER_KINDS,
    WORLD_SEEDS,
    demonstration_libraries,
    demonstration_task,
    random_names,
)

# ── the extractor ─────────────────────────────────────────────────────────────────────────────────


def lessons(rng: random.Random, n: int) -> Iterator[Demonstration]:
    """Yield answers to finished episodes: one op each, of a uniformly drawn kind."""
    return drill.lessons(
        digest,
        EXTRACTOR_EPISODES.episodes(rng, n),
        lambda episode: answer(rng.choice(list(LESSONS)), episode),
    )


def answer(kind: str, episode: Episode) -> str:
    """Return the lesson of this kind that the episode teaches, as an op in its canonical spelling.

    "search" names the key that the episode shows, and corrects a hint with another name. "skip"
    names the first name that was searched in vain. If the episode shows no such name, nothing is
    learnt.
    """
    names = {
        "search": [key] if (key := key_name(episode.segments)) else [],
        "skip": wrong_names(episode.segments),
    }.get(kind, [""])
    return lesson_answer(lesson(kind, names[0]) if names else None, episode.hint, makes_claim)


def refinements(rng: random.Random, n: int) -> Iterator[Demonstration]:
    """Yield answers to questions. No lesson is adapted: a lesson holds in every turn."""
    for episode in EXTRACTOR_EPISODES.episodes(rng, n):
        segments = drill.cut_at_question(episode, rng, 3)
        yield [
            *drill.refine_prompt(digest, episode.task, segments, random_lesson(rng)),
            demonstrated(op_answer("return")),
        ]


def merges(rng: random.Random, n: int) -> Iterator[Demonstration]:
    return drill.merges(rng, n, SMALL, random_lesson, makes_claim)


def random_lesson(rng: random.Random) -> str:
    """Return a random lesson. Most lessons of a bank name the key."""
    kind = "search" if rng.random() < 0.65 else rng.choice(OTHER_KINDS)
    return lesson(kind, rng.choice(random_names(rng)))


def makes_claim(text: str) -> bool:
    return read(text)[0] == "search"


# ── the actor ─────────────────────────────────────────────────────────────────────────────────────


def verdicts(rng: random.Random, n: int) -> Iterator[Demonstration]:
    kinds = list(LESSONS)
    libraries = demonstration_libraries(WORLD_SEEDS)
    return drill.verdicts(
        rng,
        (
            (
                demonstration_task(rng.choice(libraries).topics, rng),
                lesson(rng.choice(kinds), rng.choice(random_names(rng))),
            )
            for _ in range(n)
        ),
    )


COPY_DRILLS = (
    Drill("searches", 8_000, ACTOR_EPISODES.make, SMALL),
    Drill("search choices", 10_000, CHOICE_EPISODES.make, SMALL),
)
"""Drills in which advice and hits contain the same words."""
ACTOR_DRILLS = (
    *COPY_DRILLS,
    Drill("searches with questions", 1_000, ASKING_EPISODES.make, SMALL, "ask"),
    Drill("verdicts on searches", 1_000, verdicts, SMALL, "critic"),
)
EXTRACTOR_DRILLS = (
    Drill("search lessons", 12_000, lessons, SMALL),
    Drill("search refinements", 1_000, refinements, SMALL, "ask"),
    Drill("search merges", 3_000, merges, SMALL, "merge"),
)

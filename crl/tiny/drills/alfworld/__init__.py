"""Drills of the small houses.

The actor imitates scripted chores. Most of them are played under advice; in some the agent may ask.
The actor also judges lessons. The extractor answers digests of chores with one lesson of a randomly
drawn kind. A lesson is always true of its episode; RL must teach which kinds help. The extractor
also adapts lessons to an agent in the middle of a chore, and merges the lessons of a place.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crl.envs.alfworld.lessons import (
    LESSONS,
    chore_of,
    digest,
    first_sightings,
    from_here,
    lesson,
    other_sighting,
    read,
    visited_receptacles,
)
from crl.envs.alfworld.tasks import SMALL, demonstration_tasks
from crl.modeling.demonstrations import Demonstration
from crl.tiny.drills import drill
from crl.tiny.drills.alfworld.chores import (
    ACTOR_CHORES,
    ASKING_CHORES,
    EXTRACTOR_CHORES,
    OTHER_KINDS,
    Chores,
    random_lesson,
)
from crl.tiny.drills.drill import Drill, Episode, demonstrated, lesson_answer, op_answer
from crl.types import Segment, Task

QUESTION_TURNS = 6
"""Number of first turns in which an agent may ask."""


# ── the extractor: lessons of an episode ──────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ChoreLessons:
    """Extractor's answers to finished chores: one op each, of a uniformly drawn kind."""

    chores: Chores

    def make(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        episodes = self.chores.episodes(rng, demonstration_tasks(n))
        return drill.lessons(
            digest, episodes, lambda episode: answer(rng.choice(list(LESSONS)), episode)
        )


def answer(kind: str, episode: Episode) -> str:
    """Return the lesson of this kind that the episode teaches, as an op in its canonical spelling.

    If the episode shows none, nothing is learnt. A "where" lesson corrects a hint with another
    place.
    """
    chore = chore_of(episode.segments)
    return lesson_answer(
        lesson_text(kind, episode.segments),
        episode.hint,
        lambda text: read(text, chore)[0] == "where",
    )


def lesson_text(kind: str, segments: Sequence[Segment]) -> str | None:
    """Return the text of the lesson of this kind, or None if the episode does not show one."""
    wanted, seen, visited = (
        chore_of(segments).thing,
        first_sightings(segments),
        visited_receptacles(segments),
    )
    match kind:
        case "where":
            return lesson("where", wanted, seen[wanted]) if wanted in seen else None
        case "aside":
            other = other_sighting(segments)
            return lesson("aside", *other) if other else None
        case "first":
            return lesson("first", place=visited[0]) if visited else None
    return lesson(kind)


# ── the extractor: a lesson for an agent in the middle of an episode ──────────────────────────────


@dataclass(frozen=True)
class ChoreRefinements:
    """Extractor's answers to agents that ask within the first moves of a chore."""

    chores: Chores

    def make(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        for episode in self.chores.episodes(rng, demonstration_tasks(n)):
            segments = drill.cut_at_question(episode, rng, QUESTION_TURNS)
            text = random_lesson(
                "where" if rng.random() < 0.75 else rng.choice(OTHER_KINDS), episode.task, rng
            )
            yield [
                *drill.refine_prompt(digest, episode.task, segments, text),
                demonstrated(refinement(segments, text)),
            ]


def refinement(segments: Sequence[Segment], text: str) -> str:
    """Return a lesson adapted to the agent's position, as an op in its canonical spelling.

    A "where" lesson becomes the instruction to go to the place, unless the agent has already seen
    the thing or visited the place. Other lessons are not adapted.
    """
    chore = chore_of(segments)
    kind, place = read(text, chore)
    if (
        kind != "where"
        or chore.thing in first_sightings(segments)
        or place in visited_receptacles(segments)
    ):
        return op_answer("return")
    return op_answer("refine", text=from_here(place))


# ── the extractor: merges of a place's lessons ────────────────────────────────────────────────────


def merges(rng: random.Random, n: int) -> Iterator[Demonstration]:
    """Yield merges of chunks.

    The prompt does not name the chore's thing. Therefore all lessons on the location of a thing may
    contradict each other.
    """
    for task in demonstration_tasks(n):
        yield from drill.merges(
            rng,
            1,
            SMALL,
            lambda rng: random_bank_lesson(task, rng),  # noqa: B023
            lambda text: " is in " in text,
        )


def random_bank_lesson(task: Task, rng: random.Random) -> str:
    """Return a random lesson. Most lessons of a bank say where the thing is."""
    return random_lesson("where" if rng.random() < 0.65 else rng.choice(OTHER_KINDS), task, rng)


# ── the actor: verdicts on lessons ────────────────────────────────────────────────────────────────


def verdicts(rng: random.Random, n: int) -> Iterator[Demonstration]:
    kinds = list(LESSONS)
    return drill.verdicts(
        rng,
        ((task, random_lesson(rng.choice(kinds), task, rng)) for task in demonstration_tasks(n)),
    )


ACTOR_DRILLS = (
    Drill("chores", 16_000, ACTOR_CHORES.make, SMALL),
    Drill("chores with questions", 2_500, ASKING_CHORES.make, SMALL, "ask"),
    Drill("verdicts on chores", 1_500, verdicts, SMALL, "critic"),
)
EXTRACTOR_DRILLS = (
    Drill("chore lessons", 16_000, ChoreLessons(EXTRACTOR_CHORES).make, SMALL),
    Drill("chore refinements", 2_000, ChoreRefinements(EXTRACTOR_CHORES).make, SMALL, "ask"),
    Drill("chore merges", 6_000, merges, SMALL, "merge"),
)

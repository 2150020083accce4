"""Drills of the room.

The actor imitates scripted walks through rooms. Most of them are played under advice; in some the
agent may ask. The actor also judges lessons. The extractor answers digests of walks with one lesson
of a randomly drawn kind. A lesson is always true of its episode; RL must teach which kinds help.
The extractor also adapts lessons to an agent in the middle of a walk, and merges the lessons of a
place.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from crl.envs.actions import COMPASS
from crl.envs.room import NAME, demonstration_tasks
from crl.envs.room.lessons import (
    LESSONS,
    bearing,
    digest,
    from_here,
    lesson,
    read,
    stairs_direction,
    visited_cells,
)
from crl.modeling.demonstrations import Demonstration
from crl.tiny.drills import drill
from crl.tiny.drills.drill import Drill, Episode, demonstrated, lesson_answer, op_answer
from crl.tiny.drills.room_walks import (
    ACTOR_WALKS,
    ASKING_WALKS,
    EXTRACTOR_WALKS,
    OTHER_KINDS,
    SCORED_TURNS,
    RoomWalks,
)
from crl.types import Segment, Task

ASSUMED_DISTANCE = 3
"""Assumed distance between start and stairs, in steps.

Refinements use it for stairs that the agent has not seen. After one to three moves, the direction
that follows from 3 steps is the most accurate (69 %). With 2 steps it is right in 65 % of cases;
the lesson's unchanged direction is right in 60 %.
"""


# ── the extractor: lessons of an episode ──────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RoomLessons:
    """Extractor's answers to finished walks: one op each, of a uniformly drawn kind."""

    walks: RoomWalks

    def make(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        episodes = self.walks.episodes(rng, demonstration_tasks(n))
        return drill.lessons(
            digest, episodes, lambda episode: answer(rng.choice(list(LESSONS)), episode)
        )


def distil_prompt(episode: Episode, number: int = 0) -> Sequence[Segment]:
    """Return the extractor's prompt for the episode, as in a run."""
    return drill.distil_prompt(digest, episode, number)


def answer(kind: str, episode: Episode) -> str:
    """Return the lesson of this kind that the episode teaches, as an op in its canonical spelling.

    "exit" names the direction that the episode shows, and corrects a hint with another direction.
    If the episode does not show it, nothing is learnt.
    """
    if kind == "exit":
        seen = stairs_direction(episode.segments)
        return lesson_answer(lesson("exit", seen) if seen else None, episode.hint, makes_claim)
    last_move = next(
        segment.text for segment in reversed(episode.segments) if segment.origin == "policy"
    )
    return lesson_answer(lesson(kind, last_move), episode.hint, makes_claim)


# ── the extractor: a lesson for an agent in the middle of an episode ──────────────────────────────


@dataclass(frozen=True)
class RoomRefinements:
    """Extractor's answers to agents that ask within the first moves of a walk."""

    walks: RoomWalks

    def make(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        for episode in self.walks.episodes(rng, demonstration_tasks(n)):
            segments = cut_at_question(episode, rng)
            text = bank_lesson(segments, rng)
            yield [
                *refine_prompt(episode.task, segments, text),
                demonstrated(refinement(segments, text)),
            ]


def cut_at_question(episode: Episode, rng: random.Random) -> tuple[Segment, ...]:
    """Return the episode up to one of its scored moves, followed by the question."""
    return drill.cut_at_question(episode, rng, SCORED_TURNS)


def bank_lesson(segments: Sequence[Segment], rng: random.Random) -> str:
    """Return a lesson that a bank may contain for the place.

    Three of four lessons tell the direction of the stairs. If the agent has seen the stairs, the
    lesson names their direction.
    """
    kind, direction = (
        "exit" if rng.random() < 0.75 else rng.choice(OTHER_KINDS),
        rng.choice(list(COMPASS)),
    )
    return lesson(kind, stairs_direction(segments) or direction)


def refine_prompt(task: Task, segments: Sequence[Segment], text: str) -> Sequence[Segment]:
    """Return the extractor's prompt for the question, as in a run."""
    return drill.refine_prompt(digest, task, segments, text)


def refinement(segments: Sequence[Segment], text: str) -> str:
    """Return a lesson adapted to the agent's position, as an op in its canonical spelling.

    An "exit" lesson becomes the direction of the stairs from the current position. Other lessons
    are not adapted. A lesson does not contain the distance, so the stairs are assumed to be
    ASSUMED_DISTANCE steps from the start.
    """
    kind, direction = read(text)
    if kind != "exit" or direction is None:
        return op_answer("return")
    visited = list(visited_cells(segments))
    (x, y), (dx, dy) = visited[0], COMPASS[direction]
    stairs = (x + ASSUMED_DISTANCE * dx, y + ASSUMED_DISTANCE * dy)
    return op_answer("refine", text=from_here(bearing(visited[-1], stairs) or direction))


# ── the extractor: merges of a place's lessons ────────────────────────────────────────────────────


def merges(rng: random.Random, n: int) -> Iterator[Demonstration]:
    return drill.merges(rng, n, NAME, random_lesson, makes_claim)


def random_lesson(rng: random.Random) -> str:
    """Return a random lesson. Most lessons of a bank are about the stairs."""
    kind = "exit" if rng.random() < 0.65 else rng.choice(OTHER_KINDS)
    return lesson(kind, rng.choice(list(COMPASS)))


def makes_claim(text: str) -> bool:
    return read(text)[0] == "exit"


# ── the actor: verdicts on lessons ────────────────────────────────────────────────────────────────


def verdicts(rng: random.Random, n: int) -> Iterator[Demonstration]:
    kinds = list(LESSONS)
    return drill.verdicts(
        rng,
        (
            (task, lesson(rng.choice(kinds), rng.choice(list(COMPASS))))
            for task in demonstration_tasks(n)
        ),
    )


ACTOR_DRILLS = (
    Drill("room walks", 18_000, ACTOR_WALKS.make, NAME),
    Drill("room walks with questions", 7_000, ASKING_WALKS.make, NAME, "ask"),
    Drill("verdicts", 2_000, verdicts, NAME, "critic"),
)
EXTRACTOR_DRILLS = (
    Drill("room lessons", 20_000, RoomLessons(EXTRACTOR_WALKS).make, NAME),
    Drill(
        "refinements",
        6_000,
        RoomRefinements(replace(EXTRACTOR_WALKS, turns=SCORED_TURNS)).make,
        NAME,
        "ask",
    ),
    Drill("merges", 22_000, merges, NAME, "merge"),
)

"""The room's drills. The actor sees scripted walks through rooms, most of them under advice, in some of which it may ask; and it judges
lessons. The extractor sees what such walks come to, and answers with one lesson of a kind drawn at random: which kinds help is left
to RL, but what a lesson says of its episode is true. It also adapts lessons to an agent on its way, and tidies up what is known of a place.
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
    places,
    read,
    stairs_direction,
)
from crl.models.drills import drill
from crl.models.drills.drill import Drill, Episode, learnt, op, said
from crl.models.drills.room_walks import (
    ACTOR_WALKS,
    ASKING_WALKS,
    EXTRACTOR_WALKS,
    OTHER_KINDS,
    SCORED_TURNS,
    RoomWalks,
)
from crl.models.warm_start import Demonstration
from crl.types import Segment, Task

STAIRS_AWAY = 3
"""Steps. Of stairs that an agent does not see, the guess that is right most often after one to three moves: in 69 %, with 2 steps in 65 %;
the lesson's own direction still is in 60 %."""


# ── the extractor: lessons of an episode ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RoomLessons:
    """Answers of an extractor to finished walks: one op, of a kind drawn uniformly."""

    walks: RoomWalks

    def make(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        episodes = self.walks.episodes(rng, demonstration_tasks(n))
        return drill.lessons(
            digest, episodes, lambda episode: answer(rng.choice(list(LESSONS)), episode)
        )


def distil_prompt(episode: Episode, number: int = 0) -> Sequence[Segment]:
    """What an extractor is told of the episode in a run."""
    return drill.distil_prompt(digest, episode, number)


def answer(kind: str, episode: Episode) -> str:
    """The lesson of this kind that the episode teaches, as an op in its one spelling.

    The exit's direction is what the episode shows, and corrects a hint that said another; where it shows none, nothing is learnt.
    """
    if kind == "exit":
        seen = stairs_direction(episode.segments)
        return learnt(lesson("exit", seen) if seen else None, episode.hint, claims)
    last_move = next(
        segment.text for segment in reversed(episode.segments) if segment.origin == "policy"
    )
    return learnt(lesson(kind, last_move), episode.hint, claims)


# ── the extractor: a lesson for an agent on its way ─────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Refinements:
    """Answers of an extractor to agents that ask within the first moves of a walk."""

    walks: RoomWalks

    def make(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        for episode in self.walks.episodes(rng, demonstration_tasks(n)):
            segments = until_asked(episode, rng)
            text = found(segments, rng)
            yield [*refine_prompt(episode.task, segments, text), said(refinement(segments, text))]


def until_asked(episode: Episode, rng: random.Random) -> tuple[Segment, ...]:
    """The episode up to one of its scored moves, the question included."""
    return drill.until_asked(episode, rng, SCORED_TURNS)


def found(segments: Sequence[Segment], rng: random.Random) -> str:
    """A lesson that a bank may hold of the place: 3 of 4 tell the direction of the stairs, which is what was seen of them, if they were."""
    kind, direction = (
        "exit" if rng.random() < 0.75 else rng.choice(OTHER_KINDS),
        rng.choice(list(COMPASS)),
    )
    return lesson(kind, stairs_direction(segments) or direction)


def refine_prompt(task: Task, segments: Sequence[Segment], text: str) -> Sequence[Segment]:
    """What an extractor is told of the question in a run."""
    return drill.refine_prompt(digest, task, segments, text)


def refinement(segments: Sequence[Segment], text: str) -> str:
    """What a lesson says where the agent is by now, as an op in its one spelling: of the stairs their direction, else nothing.

    They are taken to be STAIRS_AWAY steps from the start: a lesson does not say how far.
    """
    kind, direction = read(text)
    if kind != "exit" or direction is None:
        return op("return")
    visited = list(places(segments))
    (x, y), (dx, dy) = visited[0], COMPASS[direction]
    stairs = (x + STAIRS_AWAY * dx, y + STAIRS_AWAY * dy)
    return op("refine", text=from_here(bearing(visited[-1], stairs) or direction))


# ── the extractor: what is known of a place, tidied up ──────────────────────────────────────────────────────────────


def merges(rng: random.Random, n: int) -> Iterator[Demonstration]:
    return drill.merges(rng, n, NAME, some_lesson, claims)


def some_lesson(rng: random.Random) -> str:
    """Most of what a bank holds of a place is about its stairs."""
    kind = "exit" if rng.random() < 0.65 else rng.choice(OTHER_KINDS)
    return lesson(kind, rng.choice(list(COMPASS)))


def claims(text: str) -> bool:
    return read(text)[0] == "exit"


# ── the actor: verdicts on lessons ──────────────────────────────────────────────────────────────────────────────────


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
    Drill("room walks", 12_000, ACTOR_WALKS.make),
    Drill("room walks with questions", 5_000, ASKING_WALKS.make),
    Drill("verdicts", 2_000, verdicts),
)
EXTRACTOR_DRILLS = (
    Drill("room lessons", 20_000, RoomLessons(EXTRACTOR_WALKS).make),
    Drill("refinements", 6_000, Refinements(replace(EXTRACTOR_WALKS, turns=SCORED_TURNS)).make),
    Drill("merges", 22_000, merges),
)

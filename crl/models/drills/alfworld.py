"""The small houses' drills. The actor sees scripted chores, most of them under advice, in some of which it may ask; and it judges lessons.
The extractor sees what such chores come to, and answers with one lesson of a kind drawn at random: which kinds help is left to RL, but
what a lesson says of its episode is true. It also adapts lessons to an agent on its way, and tidies up what is known of a place.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crl.envs.alfworld import SMALL, demonstration_tasks
from crl.envs.alfworld.lessons import (
    LESSONS,
    chore_of,
    digest,
    from_here,
    lesson,
    other_sight,
    read,
    sights,
    visits,
)
from crl.models.drills import drill
from crl.models.drills.alfworld_chores import (
    ACTOR_CHORES,
    ASKING_CHORES,
    EXTRACTOR_CHORES,
    OTHER_KINDS,
    Chores,
    some_lesson,
)
from crl.models.drills.drill import Drill, Episode, learnt, op, said
from crl.models.warm_start import Demonstration
from crl.types import Segment, Task

SOON = 6
"""Turns within which an agent asks."""


# ── the extractor: lessons of an episode ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ChoreLessons:
    """Answers of an extractor to finished chores: one op, of a kind drawn uniformly."""

    chores: Chores

    def make(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        episodes = self.chores.episodes(rng, demonstration_tasks(n))
        return drill.lessons(
            digest, episodes, lambda episode: answer(rng.choice(list(LESSONS)), episode)
        )


def answer(kind: str, episode: Episode) -> str:
    """The lesson of this kind that the episode teaches, as an op in its one spelling: where it shows none, nothing is learnt; where the
    thing was seen corrects a hint that said another place."""
    chore = chore_of(episode.segments)
    return learnt(
        taught(kind, episode.segments), episode.hint, lambda text: read(text, chore)[0] == "where"
    )


def taught(kind: str, segments: Sequence[Segment]) -> str | None:
    wanted, seen, visited = chore_of(segments).thing, sights(segments), visits(segments)
    match kind:
        case "where":
            return lesson("where", wanted, seen[wanted]) if wanted in seen else None
        case "aside":
            aside = other_sight(segments)
            return lesson("aside", *aside) if aside else None
        case "first":
            return lesson("first", place=visited[0]) if visited else None
    return lesson(kind)


# ── the extractor: a lesson for an agent on its way ─────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ChoreRefinements:
    """Answers of an extractor to agents that ask within the first moves of a chore."""

    chores: Chores

    def make(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        for episode in self.chores.episodes(rng, demonstration_tasks(n)):
            segments = drill.until_asked(episode, rng, SOON)
            text = some_lesson(
                "where" if rng.random() < 0.75 else rng.choice(OTHER_KINDS), episode.task, rng
            )
            yield [
                *drill.refine_prompt(digest, episode.task, segments, text),
                said(refinement(segments, text)),
            ]


def refinement(segments: Sequence[Segment], text: str) -> str:
    """What a lesson says where the agent is by now, as an op in its one spelling: to go where the thing is, unless it has seen it, or
    has looked there."""
    chore = chore_of(segments)
    kind, place = read(text, chore)
    if kind != "where" or chore.thing in sights(segments) or place in visits(segments):
        return op("return")
    return op("refine", text=from_here(place))


# ── the extractor: what is known of a place, tidied up ──────────────────────────────────────────────────────────────


def merges(rng: random.Random, n: int) -> Iterator[Demonstration]:
    """Which thing a chore is about is not told here: whatever says where something is may contradict the others."""
    for task in demonstration_tasks(n):
        yield from drill.merges(
            rng, 1, SMALL, lambda rng: known(task, rng), lambda text: " is in " in text
        )  # noqa: B023


def known(task: Task, rng: random.Random) -> str:
    """Most of what a bank holds of a place is about where the thing is."""
    return some_lesson("where" if rng.random() < 0.65 else rng.choice(OTHER_KINDS), task, rng)


# ── the actor: verdicts on lessons ──────────────────────────────────────────────────────────────────────────────────


def verdicts(rng: random.Random, n: int) -> Iterator[Demonstration]:
    kinds = list(LESSONS)
    return drill.verdicts(
        rng, ((task, some_lesson(rng.choice(kinds), task, rng)) for task in demonstration_tasks(n))
    )


ACTOR_DRILLS = (
    Drill("chores", 16_000, ACTOR_CHORES.make),
    Drill("chores with questions", 2_500, ASKING_CHORES.make),
    Drill("verdicts on chores", 1_500, verdicts),
)
EXTRACTOR_DRILLS = (
    Drill("chore lessons", 16_000, ChoreLessons(EXTRACTOR_CHORES).make),
    Drill("chore refinements", 2_000, ChoreRefinements(EXTRACTOR_CHORES).make),
    Drill("chore merges", 6_000, merges),
)

"""The room's drills. The actor sees scripted walks through rooms, most of them under advice, in some of which it may ask; and it judges
lessons. The extractor sees what such walks come to, and answers with one lesson of a kind drawn at random: which kinds help is left
to RL, but what a lesson says of its episode is true. It also adapts lessons to an agent on its way, and tidies up what is known of a place.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from crl.envs.actions import COMPASS
from crl.envs.room import NAME, demonstration_tasks
from crl.envs.room.lessons import LESSONS, bearing, digest, from_here, lesson, places, read, stairs_direction
from crl.manager import DistilRequest
from crl.manager.records import Entry
from crl.methods.parts.asking import COMPACT_CALL, CompactRefinePrompt
from crl.methods.parts.distilling import CompactDistilPrompt
from crl.methods.parts.judging import CompactCriticPrompt
from crl.methods.parts.merging import CompactMergePrompt
from crl.models.drills.drill import Drill, draw, hit, op, said
from crl.models.drills.room_walks import ACTOR_WALKS, ASKING_WALKS, EXTRACTOR_WALKS, OTHER_KINDS, SCORED_TURNS, Episode, RoomWalks
from crl.models.warm_start import Demonstration
from crl.protocols import Question
from crl.types import Segment, Task

DISTIL_PROMPT = CompactDistilPrompt({NAME: digest})
REFINE_PROMPT = CompactRefinePrompt({NAME: digest})
MERGE_PROMPT, CRITIC_PROMPT = CompactMergePrompt(), CompactCriticPrompt()

MASTERED = 0.85
"""Success rate, shown as 9 of 10, from which advice is of no use."""

STAIRS_AWAY = 3
"""Steps. Of stairs that an agent does not see, the guess that is right most often after one to three moves: in 69 %, with 2 steps in 65 %;
the lesson's own direction still is in 60 %."""


# ── the extractor: lessons of an episode ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RoomLessons:
    """Answers of an extractor to finished walks: one op, of a kind drawn uniformly."""

    walks: RoomWalks

    def make(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        for number, episode in enumerate(self.walks.episodes(rng, demonstration_tasks(n))):
            yield [*distil_prompt(episode, number), said(answer(rng.choice(list(LESSONS)), episode))]


def distil_prompt(episode: Episode, number: int = 0) -> Sequence[Segment]:
    """What an extractor is told of the episode in a run."""
    shown = (episode.hint,) if episode.hint else ()
    return DISTIL_PROMPT(DistilRequest("drill", 0, 0, number, episode.task, episode.segments, episode.success, False, shown))


def answer(kind: str, episode: Episode) -> str:
    """The lesson of this kind that the episode teaches, as an op in its one spelling.

    The exit's direction is what the episode shows, and corrects a hint that said another; where it shows none, nothing is learnt.
    """
    if kind == "exit":
        seen = stairs_direction(episode.segments)
        if seen is None:
            return op("return")
        text = lesson("exit", seen)
        if episode.hint and read(episode.hint.text)[0] == "exit" and episode.hint.text != text:
            return op("update", target=1, text=text)
        return op("add", text=text)
    last_move = next(segment.text for segment in reversed(episode.segments) if segment.origin == "policy")
    return op("add", text=lesson(kind, last_move))


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
    """The episode up to one of its first moves, the question included."""
    spoken = [number for number, segment in enumerate(episode.segments) if segment.origin == "policy"]
    return (*episode.segments[: rng.choice(spoken[:SCORED_TURNS])], Segment("assistant", COMPACT_CALL, "tool_call"))


def found(segments: Sequence[Segment], rng: random.Random) -> str:
    """A lesson that a bank may hold of the place: 3 of 4 tell the direction of the stairs, which is what was seen of them, if they were."""
    kind, direction = "exit" if rng.random() < 0.75 else rng.choice(OTHER_KINDS), rng.choice(list(COMPASS))
    return lesson(kind, stairs_direction(segments) or direction)


def refine_prompt(task: Task, segments: Sequence[Segment], text: str) -> Sequence[Segment]:
    """What an extractor is told of the question in a run."""
    return REFINE_PROMPT(Question("drill", task, "", tuple(segments)), hit(text, task))


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
    for _ in range(n):
        entries = chunk(rng)
        yield [*MERGE_PROMPT(entries), said(tidied(entries))]


def chunk(rng: random.Random) -> list[Entry]:
    """What a bank may hold of a place: 2 to 6 entries, most of them about its stairs; in half of the chunks most say what another says."""
    size, texts = draw(((2, 0.45), (3, 0.30), (4, 0.20), (5, 0.03), (6, 0.02)), rng), list[str]()
    repeats = rng.random() < 0.5
    for _ in range(size):
        kind = "exit" if rng.random() < 0.65 else rng.choice(OTHER_KINDS)
        new = lesson(kind, rng.choice(list(COMPASS)))
        texts.append(rng.choice(texts) if repeats and texts and rng.random() < 0.7 else new)
    return [_entry(number, text, rng) for number, text in enumerate(texts)]


def _entry(number: int, text: str, rng: random.Random) -> Entry:
    guided = rng.randint(1, 10) if rng.random() < 0.7 else 0
    won = rng.randint(1, guided) if guided and rng.random() < 0.7 else 0
    return Entry(str(number), 1, text, NAME, "", "drill", (0, 1), credited=guided, credit=2.0 * won - guided)


def tidied(entries: Sequence[Entry]) -> str:
    """What becomes of a chunk, as at most one op in its one spelling.

    What is said first of all that is said more than once is said once; the text comes before the targets, which are easier to find
    then. Where nothing is, and entries contradict each other about the stairs, the first goes that guided and never won, beside one
    that did.
    """
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for number, entry in enumerate(entries, start=1):
        numbers[entry.text].append(number)
    for text, same in numbers.items():
        if len(same) > 1:
            return op("merge", text=text, targets=same)
    # a credit of -credited: every episode that it guided was lost
    won = {number: e.credit > -e.credited for number, e in enumerate(entries, start=1) if e.credited and read(e.text)[0] == "exit"}
    lost = [number for number, some in won.items() if not some]
    return op("discard", target=lost[0]) if lost and any(won.values()) else "[]"


# ── the actor: verdicts on lessons ──────────────────────────────────────────────────────────────────────────────────


def verdicts(rng: random.Random, n: int) -> Iterator[Demonstration]:
    for task in demonstration_tasks(n):
        kind = draw((("exit", 0.5), ("walk", 0.25), ("other", 0.25)), rng)
        text = lesson(rng.choice(OTHER_KINDS) if kind == "other" else kind, rng.choice(list(COMPASS)))
        rate = rng.randint(0, 10) / 10
        yield [*CRITIC_PROMPT(task, hit(text, task), rate), said(verdict(text, rate))]


def verdict(text: str, rate: float) -> str:
    """On the direction of the stairs: welcome until the place is mastered. A walk may as well begin at once; all else says nothing."""
    kind, direction = read(text)
    if kind == "exit" and rate < MASTERED:
        return "accept"
    return f"refine {lesson('exit', direction)}" if kind == "walk" and direction else "reject"


ACTOR_DRILLS = (
    Drill("room walks", 12_000, ACTOR_WALKS.make),
    Drill("room walks with questions", 5_000, ASKING_WALKS.make),
    Drill("verdicts", 2_000, verdicts),
)
EXTRACTOR_DRILLS = (
    Drill("room lessons", 20_000, RoomLessons(EXTRACTOR_WALKS).make),
    Drill("refinements", 6_000, Refinements(replace(EXTRACTOR_WALKS, turns=SCORED_TURNS)).make),
    Drill("merges", 20_000, merges),
)

"""What the drills of all tasks are made of: episodes, and what is said of them, of lessons and of a bank's chunks.

What is particular to a task comes in as its digest and as functions of its lessons' texts.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from crl.manager import DistilRequest
from crl.manager.records import Entry
from crl.methods.parts.asking import COMPACT_CALL, COMPACT_OFFER, CompactRefinePrompt
from crl.methods.parts.distilling import CompactDistilPrompt, Digest
from crl.methods.parts.judging import CompactCriticPrompt
from crl.methods.parts.merging import CompactMergePrompt
from crl.models.warm_start import Demonstration
from crl.protocols import Hit, Question
from crl.types import ExperienceUse, Segment, Task

T = TypeVar("T")

MASTERED = 0.85
"""Success rate, shown as 9 of 10, from which advice is of no use."""

OFFER = Segment("user", COMPACT_OFFER, "tool_spec")
MERGE_PROMPT, CRITIC_PROMPT = CompactMergePrompt(), CompactCriticPrompt()

SomeLesson = Callable[[random.Random], str]
"""Draws a lesson as a bank may hold it."""
Claims = Callable[[str], bool]
"""Whether a lesson's text tells what a place's others may contradict, such as where the exit is."""


@dataclass(frozen=True)
class Drill:
    """A kind of demonstration: `make(rng, n)` yields n of them; the recipe takes `count`."""

    name: str
    count: int
    make: Callable[[random.Random, int], Iterator[Demonstration]]


def said(text: str) -> Segment:
    """What the demonstrator says."""
    return Segment("assistant", text, "policy")


def op(kind: str, **fields: int | str | Sequence[int]) -> str:
    """An extractor's answer of one op, in its one spelling."""
    return json.dumps([{"op": kind, **fields}], separators=(",", ":"))


def hit(text: str, task: Task) -> Hit:
    """A lesson as if a bank had it of the task's goal."""
    return Hit(text, ExperienceUse("drill", 1, "drill", "start"), task.goal)


def draw(shares: Sequence[tuple[T, float]], rng: random.Random) -> T:
    """One of the values, by their shares."""
    values, weights = zip(*shares, strict=True)
    return rng.choices(values, weights)[0]


@dataclass(frozen=True)
class Episode:
    """A demonstrator's, as the actor's conversation would record it. success: within the scored turns."""

    task: Task
    hint: Hit | None
    segments: tuple[Segment, ...]
    success: bool


def asking_turn(rng: random.Random, *, advised: bool) -> int | None:
    """When an agent that may ask does so, unless it sees by then what it would ask for: soon, and mostly when it was told nothing."""
    return rng.choice((0, 0, 1, 2)) if rng.random() < (0.25 if advised else 0.6) else None


# ── the extractor: lessons of an episode ────────────────────────────────────────────────────────────────────────────


def distil_prompt(digest: Digest, episode: Episode, number: int = 0) -> Sequence[Segment]:
    """What an extractor is told of the episode in a run."""
    shown = (episode.hint,) if episode.hint else ()
    request = DistilRequest(
        "drill", 0, 0, number, episode.task, episode.segments, episode.success, False, shown
    )
    return CompactDistilPrompt({episode.task.name: digest})(request)


def lessons(
    digest: Digest, episodes: Iterable[Episode], answer: Callable[[Episode], str]
) -> Iterator[Demonstration]:
    """Answers of an extractor to finished episodes."""
    return (
        [*distil_prompt(digest, episode, number), said(answer(episode))]
        for number, episode in enumerate(episodes)
    )


def learnt(text: str | None, hint: Hit | None, claims: Claims) -> str:
    """The lesson as an op in its one spelling: what claims something corrects a hint that claimed another; None teaches nothing."""
    if text is None:
        return op("return")
    if hint and hint.text != text and claims(text) and claims(hint.text):
        return op("update", target=1, text=text)
    return op("add", text=text)


# ── the extractor: a lesson for an agent on its way ─────────────────────────────────────────────────────────────────


def until_asked(episode: Episode, rng: random.Random, turns: int) -> tuple[Segment, ...]:
    """The episode up to one of its first `turns` moves, the question included."""
    spoken = [
        number for number, segment in enumerate(episode.segments) if segment.origin == "policy"
    ]
    return (
        *episode.segments[: rng.choice(spoken[:turns])],
        Segment("assistant", COMPACT_CALL, "tool_call"),
    )


def refine_prompt(
    digest: Digest, task: Task, segments: Sequence[Segment], text: str
) -> Sequence[Segment]:
    """What an extractor is told of the question in a run."""
    return CompactRefinePrompt({task.name: digest})(
        Question("drill", task, "", tuple(segments)), hit(text, task)
    )


# ── the extractor: what is known of a place, tidied up ──────────────────────────────────────────────────────────────


def merges(
    rng: random.Random, n: int, env: str, some_lesson: SomeLesson, claims: Claims
) -> Iterator[Demonstration]:
    for _ in range(n):
        entries = chunk(rng, env, some_lesson)
        yield [*MERGE_PROMPT(entries), said(tidied(entries, claims))]


def chunk(rng: random.Random, env: str, some_lesson: SomeLesson) -> list[Entry]:
    """What a bank may hold of a place: 2 to 6 entries; in half of the chunks most say what another says."""
    size, texts = draw(((2, 0.45), (3, 0.30), (4, 0.20), (5, 0.03), (6, 0.02)), rng), list[str]()
    repeats = rng.random() < 0.5
    for _ in range(size):
        new = some_lesson(rng)
        texts.append(rng.choice(texts) if repeats and texts and rng.random() < 0.7 else new)
    return [_entry(number, text, env, rng) for number, text in enumerate(texts)]


def _entry(number: int, text: str, env: str, rng: random.Random) -> Entry:
    guided = rng.randint(1, 10) if rng.random() < 0.7 else 0
    won = rng.randint(1, guided) if guided and rng.random() < 0.7 else 0
    return Entry(
        str(number), 1, text, env, "", "drill", (0, 1), credited=guided, credit=2.0 * won - guided
    )


def tidied(entries: Sequence[Entry], claims: Claims) -> str:
    """What becomes of a chunk, as at most one op in its one spelling.

    What is said first of all that is said more than once is said once; the text comes before the targets, which are easier to find
    then. Where nothing is, and entries contradict each other in what they claim, the first goes that guided and never won, beside one
    that did.
    """
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for number, entry in enumerate(entries, start=1):
        numbers[entry.text].append(number)
    for text, same in numbers.items():
        if len(same) > 1:
            return op("merge", text=text, targets=same)
    # a credit of -credited: every episode that it guided was lost
    won = {
        number: e.credit > -e.credited
        for number, e in enumerate(entries, start=1)
        if e.credited and claims(e.text)
    }
    lost = [number for number, some in won.items() if not some]
    return op("discard", target=lost[0]) if lost and any(won.values()) else "[]"


# ── the actor: verdicts on lessons ──────────────────────────────────────────────────────────────────────────────────


def verdicts(rng: random.Random, judged: Iterable[tuple[Task, str]]) -> Iterator[Demonstration]:
    """Yield verdicts on lessons, given as task and text; a third of the places is mastered."""
    for task, text in judged:
        rate = (rng.choice((9, 10)) if rng.random() < 1 / 3 else rng.randint(0, 8)) / 10
        yield [*CRITIC_PROMPT(task, hit(text, task), rate), said(verdict(text, rate, rng))]


def verdict(text: str, rate: float, rng: random.Random) -> str:
    """Return what an actor says of a lesson, at its success rate without one.

    The rate alone decides: advice is rejected where the place is mastered, and elsewhere accepted or
    refined at random. Which lessons help is left to RL, and so is what to write in their place: a
    refined lesson repeats the one that it stands for.
    """
    if rate >= MASTERED:
        return "reject"
    return rng.choice(("accept", f"refine {text}"))

"""Common parts of all drills: episodes, and prompts and answers about episodes, lessons and chunks.

A task supplies its digest and functions of its lessons' texts.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from crl.manager import DistilRequest, EpisodeId
from crl.manager.records import Entry
from crl.methods.parts.asking import COMPACT_CALL, COMPACT_OFFER, CompactRefinePrompt
from crl.methods.parts.distilling import CompactDistilPrompt, Digest
from crl.methods.parts.judging import CompactCriticPrompt
from crl.methods.parts.merging import CompactMergePrompt
from crl.modeling.demonstrations import Demonstration
from crl.protocols import Hit, Question
from crl.types import Counters, ExperienceUse, Place, Provenance, Segment, Task

T = TypeVar("T")

MASTERED_RATE = 0.85
"""Success rate from which advice is useless. Prompts show it as 9 of 10."""

OFFER = Segment("user", COMPACT_OFFER, "tool_spec")
MERGE_PROMPT, CRITIC_PROMPT = CompactMergePrompt(), CompactCriticPrompt()

LessonSampler = Callable[[random.Random], str]
"""Function that draws a lesson that a bank may contain."""
ClaimTest = Callable[[str], bool]
"""Function that returns whether a lesson's text makes a claim about its place.

Other lessons of the place may contradict a claim, for example on the position of the exit.
"""

Part = Literal["episode", "ask", "critic", "merge"]
"""Part of a run that needs what a drill teaches.

Every run plays episodes and distils them. The other parts can be switched off.
"""


@dataclass(frozen=True)
class Drill:
    """Kind of demonstration."""

    name: str
    count: int
    """Demonstrations that a recipe uses."""
    make: Callable[[random.Random, int], Iterator[Demonstration]]
    """Function that yields n demonstrations: make(rng, n)."""
    env: str
    """Name of the environment."""
    part: Part = "episode"


def demonstrated(text: str) -> Segment:
    """Return a segment of the demonstrator."""
    return Segment("assistant", text, "policy")


def op_answer(kind: str, **fields: int | str | Sequence[int]) -> str:
    """Return an extractor's answer with one op, in its canonical spelling."""
    return json.dumps([{"op": kind, **fields}], separators=(",", ":"))


def as_hit(text: str, task: Task) -> Hit:
    """Return a lesson in the form in which a bank returns it for the task's goal."""
    return Hit(text, ExperienceUse("drill", 1, "drill", "start"), task.goal)


def weighted_choice(shares: Sequence[tuple[T, float]], rng: random.Random) -> T:
    """Return one of the values, drawn according to their shares."""
    values, weights = zip(*shares, strict=True)
    return rng.choices(values, weights)[0]


@dataclass(frozen=True)
class Episode:
    """Demonstrator's episode, in the form in which the actor's conversation records it."""

    task: Task
    hint: Hit | None
    """Lesson at the start of the episode."""
    segments: tuple[Segment, ...]
    success: bool
    """True if the episode succeeded within the scored turns."""


def asking_turn(rng: random.Random, *, advised: bool) -> int | None:
    """Return the turn at which a demonstrator asks, or None.

    Questions come early, and mostly without advice. The caller omits the question if the answer is
    already visible at that turn.
    """
    return rng.choice((0, 0, 1, 2)) if rng.random() < (0.25 if advised else 0.6) else None


# ── the extractor: lessons of an episode ──────────────────────────────────────────────────────────


def distil_prompt(digest: Digest, episode: Episode, number: int = 0) -> Sequence[Segment]:
    """Return the extractor's prompt for the episode, as in a run."""
    hints = (episode.hint,) if episode.hint else ()
    address = EpisodeId("drill", 0, 0, number)
    request = DistilRequest(
        address, episode.task, episode.segments, episode.success, False, shown=hints
    )
    return CompactDistilPrompt({episode.task.name: digest})(request)


def lessons(
    digest: Digest, episodes: Iterable[Episode], answer: Callable[[Episode], str]
) -> Iterator[Demonstration]:
    """Yield an extractor's answers to finished episodes."""
    return (
        [*distil_prompt(digest, episode, number), demonstrated(answer(episode))]
        for number, episode in enumerate(episodes)
    )


def lesson_answer(text: str | None, hint: Hit | None, makes_claim: ClaimTest) -> str:
    """Return the op with which an extractor stores the lesson `text`, in its canonical spelling.

    A claim that differs from the hint's claim updates the hint. None as text teaches nothing.
    """
    if text is None:
        return op_answer("return")
    if hint and hint.text != text and makes_claim(text) and makes_claim(hint.text):
        return op_answer("update", target=1, text=text)
    return op_answer("add", text=text)


# ── the extractor: a lesson for an agent in the middle of an episode ──────────────────────────────


def cut_at_question(episode: Episode, rng: random.Random, turns: int) -> tuple[Segment, ...]:
    """Return the episode up to one of its first `turns` moves, followed by the question."""
    policy_indices = [
        number for number, segment in enumerate(episode.segments) if segment.origin == "policy"
    ]
    return (
        *episode.segments[: rng.choice(policy_indices[:turns])],
        Segment("assistant", COMPACT_CALL, "tool_call"),
    )


def refine_prompt(
    digest: Digest, task: Task, segments: Sequence[Segment], text: str
) -> Sequence[Segment]:
    """Return the extractor's prompt for the question, as in a run."""
    return CompactRefinePrompt({task.name: digest})(
        Question("drill", task, "", tuple(segments)), as_hit(text, task)
    )


# ── the extractor: merges of a place's lessons ────────────────────────────────────────────────────


def merges(
    rng: random.Random, n: int, env: str, random_lesson: LessonSampler, makes_claim: ClaimTest
) -> Iterator[Demonstration]:
    """Yield an extractor's answers to `n` random chunks of a bank."""
    for _ in range(n):
        entries = random_chunk(rng, env, random_lesson)
        yield [*MERGE_PROMPT(entries), demonstrated(merge_answer(entries, makes_claim))]


def random_chunk(rng: random.Random, env: str, random_lesson: LessonSampler) -> list[Entry]:
    """Return the entries of a place that a bank may contain.

    A chunk has 2 to 6 entries. In half of the chunks, most entries repeat another one.
    """
    size = weighted_choice(((2, 0.45), (3, 0.30), (4, 0.20), (5, 0.03), (6, 0.02)), rng)
    texts = list[str]()
    repeats = rng.random() < 0.5
    for _ in range(size):
        new = random_lesson(rng)
        texts.append(rng.choice(texts) if repeats and texts and rng.random() < 0.7 else new)
    return [_random_entry(number, text, env, rng) for number, text in enumerate(texts)]


def _random_entry(number: int, text: str, env: str, rng: random.Random) -> Entry:
    guided = rng.randint(1, 10) if rng.random() < 0.7 else 0
    won = rng.randint(1, guided) if guided and rng.random() < 0.7 else 0
    counters = Counters(credited=guided, credit=2.0 * won - guided)
    return Entry(str(number), 1, text, Place(env, ""), Provenance("drill", (0, 1)), counters)


def merge_answer(entries: Sequence[Entry], makes_claim: ClaimTest) -> str:
    """Return the merge answer for a chunk: at most one op, in its canonical spelling.

    The first text that occurs more than once is merged into one entry. The text precedes the
    targets, which makes the targets easier to find. Without repeated texts, contradicting claims
    are considered: if at least one claim has won an episode, the first claim that guided episodes
    and never won is discarded.
    """
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for number, entry in enumerate(entries, start=1):
        numbers[entry.text].append(number)
    for text, positions in numbers.items():
        if len(positions) > 1:
            return op_answer("merge", text=text, targets=positions)
    # A credit of -credited means that every episode that the entry guided was lost.
    has_won = {
        number: entry.counters.credit > -entry.counters.credited
        for number, entry in enumerate(entries, start=1)
        if entry.counters.credited and makes_claim(entry.text)
    }
    never_won = [number for number, won in has_won.items() if not won]
    return (
        op_answer("discard", target=never_won[0]) if never_won and any(has_won.values()) else "[]"
    )


# ── the actor: verdicts on lessons ────────────────────────────────────────────────────────────────


def verdicts(
    rng: random.Random, task_lessons: Iterable[tuple[Task, str]]
) -> Iterator[Demonstration]:
    """Yield verdicts on lessons, which are given as task and text.

    In about a third of the prompts the place is mastered.
    """
    for task, text in task_lessons:
        rate = (rng.choice((9, 10)) if rng.random() < 1 / 3 else rng.randint(0, 8)) / 10
        yield [
            *CRITIC_PROMPT(task, as_hit(text, task), rate),
            demonstrated(verdict(text, rate, rng)),
        ]


def verdict(text: str, rate: float, rng: random.Random) -> str:
    """Return an actor's verdict on a lesson. `rate`: success rate without experience.

    Only the rate matters. Advice is rejected if the place is mastered; otherwise it is accepted or
    refined at random. A refinement repeats the lesson. RL must teach which lessons help and how to
    improve them.
    """
    if rate >= MASTERED_RATE:
        return "reject"
    return rng.choice(("accept", f"refine {text}"))

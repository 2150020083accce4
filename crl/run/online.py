"""`new` places with a bank that is built on the way: what experience is worth where nothing was known before.

Every place is visited VISITS times by MEMBERS guided episodes. After a visit its episodes are distilled and credited in a scratch
copy of the bank, which is thrown away at the end. Success counts from the third visit on, when there is something to know.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

from crl.envs.base import Advisor
from crl.manager import Distilled, ExperienceManager
from crl.rollout.episode import EpisodeKey, EpisodeRunner, Limits
from crl.run.diagnostics import verdict
from crl.run.experience import learn
from crl.run.playing import EpisodeScheduler
from crl.types import Task, Trajectory

VISITS = 5
MEMBERS = 4
UNCOUNTED_VISITS = 2

MARK = "online"
"""The run's name in the requests of these episodes; a copied bank may have others in its queue."""

Scratch = Callable[[Callable[[Distilled], None]], AbstractAsyncContextManager[ExperienceManager]]
"""Opens a scratch bank that tells what was distilled, and throws it away."""

LessonCount = tuple[int, int]
"""(right lessons, answers)."""


@dataclass(frozen=True)
class OnlineTask:
    """places: of `new`; revisit(place, visit): the place under other dynamics; advisor: None where nobody knows the truth."""

    places: Sequence[Task]
    revisit: Callable[[Task, int], Task]
    advisor: Advisor | None


@dataclass
class OnlineResult:
    """visits: the trajectories of each; alone: the same episodes from the third visit on without experience; lessons: of the first
    visit, which nothing guided; None without an advisor."""

    visits: list[list[Trajectory]] = field(default_factory=list)
    alone: list[list[Trajectory]] = field(default_factory=list)
    lessons: LessonCount | None = None
    untrained_lessons: LessonCount | None = None

    @property
    def settled(self) -> Sequence[Sequence[Trajectory]]:
        return self.visits[UNCOUNTED_VISITS:]

    @property
    def lift(self) -> list[float]:
        """Success with the bank minus success without, by place, from the third visit on.

        Both are of the same episodes, with the same draws.
        """
        won: defaultdict[str, list[int]] = defaultdict(list)
        for guided, free in zip(self.settled, self.alone, strict=True):
            for one, other in zip(guided, free, strict=True):
                won[one.task.goal].append(one.success - other.success)
        return [fmean(differences) for differences in won.values()]


class OnlineBank:
    """scratch: copies the run's bank, with the run's extractor; untrained: an empty bank with the extractor that the run started with."""

    def __init__(
        self, runner: EpisodeRunner, tasks: Mapping[str, OnlineTask], scratch: Scratch,
        untrained: Scratch, scheduler: EpisodeScheduler,
    ) -> None:  # fmt: skip
        self._runner, self._tasks, self._scheduler = runner, tasks, scheduler
        self._scratch, self._untrained = scratch, untrained
        self._undistilled = replace(runner, limits=without_overtime(runner.limits))
        self._comparing = asyncio.Lock()  # GPU memory is planned for one untrained extractor

    async def evaluate(self, *, compare_lessons: bool) -> dict[str, OnlineResult]:
        """By task name."""
        parts = [partial(self._evaluate, *item, compare_lessons) for item in self._tasks.items()]
        return dict(zip(self._tasks, await self._scheduler.gather(parts), strict=True))

    async def _evaluate(self, name: str, task: OnlineTask, compare_lessons: bool) -> OnlineResult:
        parts: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            partial(self._visit, name, task, compare_lessons),
            partial(self._play_alone, name, task),
        ]  # fmt: skip
        result: OnlineResult
        result, alone = await self._scheduler.gather(parts)
        return replace(result, alone=alone)

    async def _visit(self, name: str, task: OnlineTask, compare_lessons: bool) -> OnlineResult:
        """Play the visits one after the other, before what waits for nothing."""
        result, tally = OnlineResult(), Tally(task.advisor)
        async with self._scratch(tally) as bank:
            for visit in range(VISITS):
                last = visit == VISITS - 1
                runner = replace(self._undistilled if last else self._runner, retriever=bank)
                keys, tasks = visited(name, task, visit)
                played = await self._scheduler.play(runner, "guided", keys, tasks, urgent=True)
                result.visits.append(played)
                if not last:
                    await take_in(bank, played)
                if visit == 0:
                    result.lessons = tally.count
        if compare_lessons and task.advisor:
            result.untrained_lessons = await self._untrained_lessons(task.advisor, result.visits[0])
        return result

    async def _play_alone(self, name: str, task: OnlineTask) -> list[list[Trajectory]]:
        play = partial(self._scheduler.play, self._undistilled, "free")
        settled = range(UNCOUNTED_VISITS, VISITS)
        parts = [partial(play, *visited(name, task, visit, arm="alone")) for visit in settled]
        return await self._scheduler.gather(parts)

    async def _untrained_lessons(
        self, advisor: Advisor, played: Sequence[Trajectory],
    ) -> LessonCount | None:  # fmt: skip
        tally = Tally(advisor)
        async with self._comparing, self._untrained(tally) as bank:
            await take_in(bank, played)
        return tally.count


def visited(
    name: str, task: OnlineTask, visit: int, *, arm: str = "",
) -> tuple[list[EpisodeKey], list[Task]]:  # fmt: skip
    """Return the episodes of visit number `visit` (from 0) of every place.

    The members of a visit play one place. Each has dynamics of its own.
    """
    first = visit * len(task.places)
    members = [(i, member) for i in range(len(task.places)) for member in range(MEMBERS)]
    keys = [EpisodeKey(f"online/{name}", visit, first + i, member, arm) for i, member in members]
    tasks = [task.revisit(task.places[i], visit * MEMBERS + member) for i, member in members]
    return keys, tasks


def without_overtime(limits: Mapping[str, Limits]) -> dict[str, Limits]:
    """Return the limits of episodes that are not distilled: the record alone has an overtime."""
    return {name: replace(one, overtime=0) for name, one in limits.items()}


class Tally:
    """Counts the right ones among the answers of an extractor; `count` is None without an advisor."""

    def __init__(self, advisor: Advisor | None) -> None:
        self._advisor = advisor
        self.count: LessonCount | None = (0, 0) if advisor else None

    def __call__(self, distilled: Distilled) -> None:
        if self._advisor and self.count and distilled.request.run == MARK:
            right, answers = self.count
            self.count = (right + verdict(self._advisor, distilled).correct, answers + 1)


async def take_in(bank: ExperienceManager, played: Sequence[Trajectory]) -> None:
    """Credits and distils a visit's episodes; one step of the bank's clock."""
    await learn(bank, MARK, played, [t for t in played if t.error is None])
    await bank.drain()
    bank.advance(bank.step + 1)

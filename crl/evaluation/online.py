"""Online evaluation: unseen places with a bank that is built during the visits.

It measures the value of experience in places that the run has never met. Every place is visited
VISITS times, each time by MEMBERS guided episodes. After each visit except the last, its episodes
are distilled and credited in a scratch copy of the bank, which is deleted at the end. Success
counts from the third visit on, when the bank has lessons about the place.
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

from crl.envs.curriculum import Advisor
from crl.evaluation.diagnostics import lesson_verdict
from crl.evaluation.scheduling import EpisodeScheduler
from crl.manager import Distilled, ExperienceManager
from crl.protocols import DistillationFilter
from crl.rollout.crediting import credit_and_submit
from crl.rollout.episode import EpisodeKey, EpisodeRunner, Limits
from crl.types import Place, Task, Trajectory

VISITS = 5
"""Visits to every place."""
MEMBERS = 4
"""Guided episodes of one visit."""
UNCOUNTED_VISITS = 2
"""First visits, whose success does not count."""

RUN_NAME = "online"
"""Run name in the distillation requests of these episodes.

The queue of a copied bank may hold requests with other run names.
"""

OpenScratchBank = Callable[
    [Callable[[Distilled], None]], AbstractAsyncContextManager[ExperienceManager]
]
"""Function that opens a scratch bank and deletes it on exit.

Its argument is called with each distilled answer.
"""

LessonCount = tuple[int, int]
"""(right lessons, answers) of an extractor."""


@dataclass(frozen=True)
class OnlineTask:
    """Task of the online evaluation."""

    places: Sequence[Task]
    """Unseen places."""
    revisit: Callable[[Task, int], Task]
    """Function that returns a place with other dynamics; the number selects the dynamics."""
    advisor: Advisor | None
    """Ground truth about lessons; None if the environment has none."""


@dataclass
class OnlineResult:
    """Result of the online evaluation of one task."""

    visits: list[list[Trajectory]] = field(default_factory=list)
    """Trajectories of each visit."""
    free_visits: list[list[Trajectory]] = field(default_factory=list)
    """Episodes of the visits that count, played without experience."""
    lessons: LessonCount | None = None
    """Right lessons of the extractor on the first visit; None without an advisor."""
    untrained_lessons: LessonCount | None = None
    """Same as `lessons`, for the extractor of the run's start; None also without a comparison."""

    @property
    def counted_visits(self) -> Sequence[Sequence[Trajectory]]:
        """Trajectories of the visits that count: the third one and later."""
        return self.visits[UNCOUNTED_VISITS:]

    @property
    def lift(self) -> list[float]:
        """Mean success with the bank minus mean success without it, one value per place.

        Only visits that count are included. Both sides play the same episodes with the same draws.
        """
        differences: defaultdict[Place, list[int]] = defaultdict(list)
        for guided_visit, free_visit in zip(self.counted_visits, self.free_visits, strict=True):
            for guided, free in zip(guided_visit, free_visit, strict=True):
                differences[guided.task.place].append(guided.success - free.success)
        return [fmean(of_place) for of_place in differences.values()]


class OnlineEvaluator:
    """Online evaluation of several tasks.

    * `open_scratch`: opens a copy of the run's bank with the run's extractor.
    * `open_untrained`: opens an empty bank with the extractor that the run started with. None: the
      lessons of the two are not compared.
    * `distiller`: selects the episodes of a visit from which the bank learns.
    """

    def __init__(
        self, runner: EpisodeRunner, tasks: Mapping[str, OnlineTask],
        open_scratch: OpenScratchBank, open_untrained: OpenScratchBank | None,
        scheduler: EpisodeScheduler, distiller: DistillationFilter,
    ) -> None:  # fmt: skip
        self._runner, self._tasks, self._scheduler = runner, tasks, scheduler
        self._open_scratch, self._open_untrained = open_scratch, open_untrained
        self._distiller = distiller
        self._runner_without_overtime = replace(runner, limits=without_overtime(runner.limits))
        self._comparison_lock = asyncio.Lock()  # the GPU plan has one untrained extractor

    @property
    def episodes(self) -> int:
        """Number of episodes of one evaluation."""
        visits = VISITS + VISITS - UNCOUNTED_VISITS  # with the bank and without it
        return sum(len(task.places) * MEMBERS * visits for task in self._tasks.values())

    async def evaluate(self, *, compare_lessons: bool) -> dict[str, OnlineResult]:
        """Evaluate all tasks and return the results by task name.

        With `compare_lessons` the untrained extractor also distils the first visit, in tasks with
        an advisor.
        """
        parts = [partial(self._evaluate, *item, compare_lessons) for item in self._tasks.items()]
        return dict(zip(self._tasks, await self._scheduler.gather(parts), strict=True))

    async def _evaluate(self, name: str, task: OnlineTask, compare_lessons: bool) -> OnlineResult:
        parts: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            partial(self._visit, name, task, compare_lessons),
            partial(self._play_free, name, task),
        ]  # fmt: skip
        result: OnlineResult
        result, free_visits = await self._scheduler.gather(parts)
        return replace(result, free_visits=free_visits)

    async def _visit(self, name: str, task: OnlineTask, compare_lessons: bool) -> OnlineResult:
        """Play the visits one after the other, with priority over other episodes.

        Each visit has to wait for the one before.
        """
        result, counter = OnlineResult(), LessonCounter(task.advisor)
        async with self._open_scratch(counter) as bank:
            await self._play_visits(name, task, bank, range(1), result)
            result.lessons = counter.count
            parts: list[Callable[[], Coroutine[Any, Any, Any]]] = [
                partial(self._play_visits, name, task, bank, range(1, VISITS), result)
            ]
            if compare_lessons and task.advisor and self._open_untrained:
                # The extractors have separate engines, so this takes no time from the visits.
                parts.append(
                    partial(
                        self._untrained_lessons, self._open_untrained, task.advisor,
                        result.visits[0],
                    )
                )  # fmt: skip
            _, *untrained = await self._scheduler.gather(parts)
        if untrained:
            (result.untrained_lessons,) = untrained
        return result

    async def _play_visits(
        self, name: str, task: OnlineTask, bank: ExperienceManager, visits: range,
        result: OnlineResult,
    ) -> None:  # fmt: skip
        """Play visits, add them to `result`, and let `bank` learn from all but the last one."""
        for visit in visits:
            last = visit == VISITS - 1
            runner = replace(
                self._runner_without_overtime if last else self._runner, retriever=bank
            )
            keys, tasks = visit_episodes(name, task, visit)
            trajectories = await self._scheduler.play(runner, "guided", keys, tasks, urgent=True)
            result.visits.append(trajectories)
            if not last:
                await credit_and_distil(bank, trajectories, self._distiller)

    async def _play_free(self, name: str, task: OnlineTask) -> list[list[Trajectory]]:
        play = partial(self._scheduler.play, self._runner_without_overtime, "free")
        visit_numbers = range(UNCOUNTED_VISITS, VISITS)
        parts = [
            partial(play, *visit_episodes(name, task, visit, arm="alone"))
            for visit in visit_numbers
        ]
        return await self._scheduler.gather(parts)

    async def _untrained_lessons(
        self, open_untrained: OpenScratchBank, advisor: Advisor,
        trajectories: Sequence[Trajectory],
    ) -> LessonCount | None:  # fmt: skip
        counter = LessonCounter(advisor)
        async with self._comparison_lock, open_untrained(counter) as bank:
            await credit_and_distil(bank, trajectories, self._distiller)
        return counter.count


def visit_episodes(
    name: str, task: OnlineTask, visit: int, *, arm: str = "",
) -> tuple[list[EpisodeKey], list[Task]]:  # fmt: skip
    """Return the episode keys and tasks of visit number `visit` (from 0) to every place.

    The members of a visit play the same place, each with different dynamics. `arm` distinguishes
    episodes with the same draws.
    """
    first_group = visit * len(task.places)
    members = [(i, member) for i in range(len(task.places)) for member in range(MEMBERS)]
    keys = [
        EpisodeKey(f"online/{name}", visit, first_group + i, member, arm) for i, member in members
    ]
    tasks = [task.revisit(task.places[i], visit * MEMBERS + member) for i, member in members]
    return keys, tasks


def without_overtime(limits: Mapping[str, Limits]) -> dict[str, Limits]:
    """Return `limits` without overtime, for episodes that are not distilled."""
    return {name: replace(limit, extra_turns=0) for name, limit in limits.items()}


class LessonCounter:
    """Counter of right lessons among an extractor's answers.

    `count` is (right lessons, answers), or None without an advisor.
    """

    def __init__(self, advisor: Advisor | None) -> None:
        self._advisor = advisor
        self.count: LessonCount | None = (0, 0) if advisor else None

    def __call__(self, distilled: Distilled) -> None:
        if self._advisor and self.count and distilled.request.episode.run == RUN_NAME:
            right, answers = self.count
            self.count = (right + lesson_verdict(self._advisor, distilled).correct, answers + 1)


async def credit_and_distil(
    bank: ExperienceManager, trajectories: Sequence[Trajectory], distiller: DistillationFilter
) -> None:
    """Credit and distil a visit's episodes, then advance the bank's clock by one step."""
    await credit_and_submit(bank, RUN_NAME, trajectories, distiller.select(trajectories))
    await bank.drain()
    bank.advance(bank.step + 1)

"""Scheduling of many episodes: sets run at the same time, with one limit on running episodes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from heapq import heappop, heappush
from math import fsum
from typing import Any, TypeVar

from crl.failures import TaskGroup
from crl.rollout.episode import EpisodeKey, EpisodeRunner
from crl.types import Condition, Guidance, RolloutPlan, Task, Trajectory

T = TypeVar("T")


def no_report(done: int, total: int) -> None:
    """Ignore the progress."""


class EpisodeScheduler:
    """Scheduler of the parts of an evaluation, with at most `limit` episodes at a time.

    With `in_order`, parts run one after the other, and episodes run in whole chunks of `limit`, as
    `LockstepSampler` requires. The requests in a forward pass then depend neither on timing nor on
    other parts of the evaluation.

    Otherwise all parts run at the same time. Their sets start in order, so most requests in a
    forward pass belong to one task and have similar lengths.

    `report`: called with the number of finished episodes and of all episodes that are expected.
    Episodes that are being played count by the share of their turns that is played, because those
    that start together end together.
    """

    def __init__(
        self,
        limit: int,
        *,
        in_order: bool = False,
        report: Callable[[int, int], object] = no_report,
    ) -> None:
        self._limit, self._in_order, self._report = limit, in_order, report
        self._expecting = self._done = self._total = self._reported = 0
        self._shares: dict[EpisodeKey, float] = {}  # of the episodes that are being played
        self._free_slots = limit
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []  # a heap
        self._arrival_numbers = itertools.count()

    @contextmanager
    def expecting(self, episodes: int) -> Iterator[None]:
        """Report the progress of `episodes` episodes that are played inside the context.

        Contexts that overlap count as one. Its progress ends with the last of them.
        """
        self._expecting += 1
        self._total += episodes
        self._finished(0)
        try:
            yield
        finally:
            self._expecting -= 1
            if not self._expecting:
                self._report(self._total, self._total)
                self._done = self._total = 0

    def _finished(self, episodes: int) -> None:
        """Report that `episodes` more episodes are finished."""
        if self._expecting:
            self._done += episodes
            self._report_progress()

    def _turned(self, key: EpisodeKey, share: float) -> None:
        """Record that this share of an episode is played."""
        self._shares[key] = share
        if self._expecting and self._progress != self._reported:
            self._report_progress()

    @property
    def _progress(self) -> int:
        """Finished episodes, and the sum of the played shares of others."""
        return min(self._done + int(fsum(self._shares.values())), self._total)

    def _report_progress(self) -> None:
        self._reported = self._progress
        self._report(self._reported, self._total)

    async def gather(self, parts: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
        """Run `parts` and return their results in order. The first error cancels the others."""
        if self._in_order:
            return [await part() for part in parts]
        async with TaskGroup() as group:
            running = [group.create_task(part()) for part in parts]
        return [task.result() for task in running]

    async def play(
        self, runner: EpisodeRunner, condition: Condition, keys: Sequence[EpisodeKey],
        tasks: Sequence[Task], *, urgent: bool = False,
    ) -> list[Trajectory]:  # fmt: skip
        """Play `tasks` under `keys`, one key per task, and return the trajectories in this order.

        `urgent` episodes start before waiting episodes that are not urgent. Use it if other work
        waits for the result.
        """
        plan = RolloutPlan(condition)
        observed = runner.with_turns(self._turned)

        async def play(i: int) -> Trajectory:
            async with self._slot(urgent=urgent):
                try:
                    trajectory = await observed.play(keys[i], tasks[i], plan)
                finally:
                    self._shares.pop(keys[i], None)
            self._finished(1)
            return trajectory

        trajectories: list[Trajectory] = []
        chunk = self._limit if self._in_order else max(len(keys), 1)
        for start in range(0, len(keys), chunk):
            indices = range(len(keys))[start : start + chunk]
            for i in indices:
                runner.join(keys[i])
            async with TaskGroup() as group:
                episodes = [group.create_task(play(i)) for i in indices]
            trajectories += [episode.result() for episode in episodes]
        return trajectories

    async def play_free(
        self, runner: EpisodeRunner, keys: Sequence[EpisodeKey], guided: Sequence[Trajectory],
    ) -> list[Trajectory]:  # fmt: skip
        """Play the episodes of `guided` again without experience, under the same keys.

        A guided episode that was shown no experience has the same prompts and draws as a free
        episode. It is reused instead of played again, unless it has an error or its prompts offer
        the tool for questions.
        """
        to_replay = [i for i, t in enumerate(guided) if not _same_as_free(t, runner)]
        self._finished(len(guided) - len(to_replay))
        tasks = [guided[i].task for i in to_replay]
        trajectories = await self.play(runner, "free", [keys[i] for i in to_replay], tasks)
        free = dict(zip(to_replay, trajectories, strict=True))
        return [free[i] if i in free else _as_free(t) for i, t in enumerate(guided)]

    @asynccontextmanager
    async def _slot(self, *, urgent: bool) -> AsyncIterator[None]:
        """Hold one of the `limit` slots inside the context.

        Urgent callers get a free slot first. Callers of equal urgency are served in order of
        arrival.
        """
        if self._free_slots:
            self._free_slots -= 1
        else:
            granted = asyncio.get_running_loop().create_future()
            heappush(self._waiting, (not urgent, next(self._arrival_numbers), granted))
            try:
                await granted
            except asyncio.CancelledError:
                if not granted.cancelled():
                    self._release_slot()
                raise
        try:
            yield
        finally:
            self._release_slot()

    def _release_slot(self) -> None:
        while self._waiting:
            _, _, granted = heappop(self._waiting)
            if not granted.done():
                granted.set_result(None)
                return
        self._free_slots += 1


def _same_as_free(guided: Trajectory, runner: EpisodeRunner) -> bool:
    """Return whether the guided episode would have been the same without experience."""
    offers_tool = runner.limits[guided.task.name].max_questions > 0
    return guided.error is None and not guided.used and not offers_tool


def _as_free(guided: Trajectory) -> Trajectory:
    return replace(guided, condition="free", guidance=Guidance())

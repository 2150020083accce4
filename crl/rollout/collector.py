"""Collector of rollouts: it plays tasks in groups and gathers finished groups into batches.

The staleness gate limits how far rollouts run ahead of training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import fsum

from crl.failures import TaskGroup
from crl.protocols import RolloutPlanner, State, TaskSource
from crl.rollout.attempts import Members, Together
from crl.rollout.episode import EpisodeKey, EpisodeRunner
from crl.rollout.gate import StalenessGate
from crl.types import Task, Trajectory
from crl.wording import counted


class Collector:
    """Producer of batches for training.

    `run` starts the groups of all steps that are not completed. `batch(step)` waits for the groups
    of a step. `complete(step)` allows later groups to start. `run` is part of the caller's task
    group: an exception in an episode's task ends `run`. A `RolloutError` never reaches this point.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        source: TaskSource,
        planner: RolloutPlanner,
        gate: StalenessGate,
        *,
        group_size: int,
        steps: int,
        members: Members | None = None,
        report: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:
        """Prepare the collection of steps up to `steps` − 1.

        * `group_size`: K, members of a group that play one identical task.
        * `members`: the way in which they are played; None: at the same time.
        * `report`: called with the number of finished groups and of all groups of the step for
          which `batch` waits. Groups that are being played count by the share of their turns that
          is played, because groups that start together end together.
        """
        self._report = report
        self._members = members or Together()
        self._runner = runner.with_turns(self._turned)
        self._source, self._planner, self._gate = source, planner, gate
        self._shares: dict[int, dict[EpisodeKey, float]] = {}  # by group that is being played
        self._awaited = -1  # step for which `batch` waits
        self._reported = 0
        self._group_size, self._steps = group_size, steps
        self._changed = asyncio.Condition()
        self._groups: dict[int, list[Trajectory]] = {}
        self._source_states: dict[int, State] = {}

    async def run(self) -> None:
        """Start every step's groups as soon as the gate allows. Return when all have finished."""
        size = self._gate.groups_per_step
        async with TaskGroup() as tasks:
            for step in range(self._gate.completed_steps, self._steps):
                async with self._changed:
                    await self._changed.wait_for(
                        lambda first=step * size: self._gate.may_start(first)
                    )
                self._source_states[step] = self._source.state()
                groups = list(enumerate(self._source.draw(size), start=step * size))
                keys = {group: self._join(step, group) for group, _ in groups}
                for group, task in groups:
                    tasks.create_task(self._play(group, task, keys[group]), name=f"group {group}")
                    # Many first prompts in one round of the event loop would delay other work.
                    await asyncio.sleep(0)

    def _join(self, step: int, group: int) -> list[EpisodeKey]:
        self._gate.start(group)
        keys = [EpisodeKey("train", step, group, member) for member in range(self._group_size)]
        self._members.join(self._runner, keys)
        return keys

    async def _play(self, group: int, task: Task, keys: Sequence[EpisodeKey]) -> None:
        plans = self._planner.plan(task, len(keys), keys[0].step)
        trajectories = await self._members.play(self._runner, keys, task, plans)
        async with self._changed:
            self._groups[group] = trajectories
            self._shares.pop(group, None)
            self._gate.finish(group)
            self._changed.notify_all()

    async def batch(self, step: int) -> list[Trajectory]:
        """Return the trajectories of `step`, errors included, in (group, member) order."""
        size = self._gate.groups_per_step
        groups = range(step * size, (step + 1) * size)
        async with self._changed:
            try:
                self._awaited = step
                while not self._gate.ready(step):
                    self._reported = self._progress(groups)
                    self._report(self._reported, size)
                    await self._changed.wait()
            finally:
                self._awaited = -1
                self._report(size, size)
        return [t for group in groups for t in self._groups.pop(group)]

    def _turned(self, key: EpisodeKey, share: float) -> None:
        """Record that this share of an episode is played."""
        self._shares.setdefault(key.group, {})[key] = share
        if key.step != self._awaited:
            return
        size = self._gate.groups_per_step
        progress = self._progress(range(key.step * size, (key.step + 1) * size))
        if progress != self._reported:
            self._reported = progress
            self._report(progress, size)

    def _progress(self, groups: range) -> int:
        """Return the number of finished groups, and the sum of the played shares of others."""
        finished = sum(group in self._groups for group in groups)
        played = fsum(share for group in groups for share in self._shares.get(group, {}).values())
        return finished + int(played / self._group_size)

    async def complete(self, step: int) -> None:
        """Record that the trainer has processed `step`, with or without an update."""
        async with self._changed:
            self._gate.complete(step)
            self._source_states.pop(step, None)
            self._changed.notify_all()

    def details(self) -> list[str]:
        """Return lines on the groups in flight, and on those that may start."""
        return [
            f"{counted(len(self._gate.running), 'group')} in flight, "
            f"{counted(len(self._groups), 'finished group')} waiting for training",
            self._gate.details(),
        ]

    @property
    def completed_steps(self) -> int:
        return self._gate.completed_steps

    def source_state(self) -> State:
        """Return the state of the task source from which a resumed run continues.

        This is the state before the first step that is not completed was drawn.
        """
        state = self._source_states.get(self._gate.completed_steps)
        return self._source.state() if state is None else state

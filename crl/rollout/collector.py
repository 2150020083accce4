"""The collector turns a task stream into batches of finished groups, as far ahead of training as the gate allows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from crl.protocols import RolloutPlanner, State, TaskSource
from crl.rollout.episode import EpisodeKey, EpisodeRunner
from crl.rollout.gate import StalenessGate
from crl.types import Task, Trajectory


class Collector:
    """`run` starts groups for steps first … last − 1; `batch(step)` waits for a step's; `complete(step)` lets the next start.

    group_size: K members of one identical task. `run` lives in the caller's task group: what kills an episode's task (never
    a `RolloutError`) ends it.
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
    ) -> None:
        self._runner, self._source, self._planner, self._gate = runner, source, planner, gate
        self._group_size, self._steps = group_size, steps
        self._changed = asyncio.Condition()
        self._groups: dict[int, list[Trajectory]] = {}
        self._source_states: dict[int, State] = {}

    async def run(self) -> None:
        """Starts every group as soon as the gate lets it; ends when all have finished."""
        size = self._gate.groups_per_step
        async with asyncio.TaskGroup() as tasks:
            for step in range(self._gate.completed_steps, self._steps):
                async with self._changed:
                    await self._changed.wait_for(
                        lambda first=step * size: self._gate.may_start(first)
                    )
                self._source_states[step] = self._source.state()
                drawn = list(enumerate(self._source.draw(size), start=step * size))
                keys = {group: self._join(step, group) for group, _ in drawn}
                for group, task in drawn:
                    tasks.create_task(self._play(group, task, keys[group]), name=f"group {group}")
                    await asyncio.sleep(
                        0
                    )  # hundreds of first prompts at once would keep everything else waiting

    def _join(self, step: int, group: int) -> list[EpisodeKey]:
        self._gate.start(group)
        keys = [EpisodeKey("train", step, group, member) for member in range(self._group_size)]
        for key in keys:
            self._runner.join(key)
        return keys

    async def _play(self, group: int, task: Task, keys: Sequence[EpisodeKey]) -> None:
        plans = self._planner.plan(task, len(keys), keys[0].step)
        async with asyncio.TaskGroup() as members:
            episodes = [
                members.create_task(self._runner.play(key, task, plan))
                for key, plan in zip(keys, plans, strict=True)
            ]
        async with self._changed:
            self._groups[group] = [episode.result() for episode in episodes]
            self._gate.finish(group)
            self._changed.notify_all()

    async def batch(self, step: int) -> list[Trajectory]:
        """The trajectories of `step`, errors included, in (group, member) order."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._gate.ready(step))
        size = self._gate.groups_per_step
        return [
            t for group in range(step * size, (step + 1) * size) for t in self._groups.pop(group)
        ]

    async def complete(self, step: int) -> None:
        """The trainer is done with `step`, whether or not it could train on it."""
        async with self._changed:
            self._gate.complete(step)
            self._source_states.pop(step, None)
            self._changed.notify_all()

    @property
    def completed_steps(self) -> int:
        return self._gate.completed_steps

    def source_state(self) -> State:
        """The task source as it was before it drew the first step that is not completed: where a resumed run goes on."""
        drawn = self._source_states.get(self._gate.completed_steps)
        return self._source.state() if drawn is None else drawn

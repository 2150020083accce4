"""Actor-critic parts of a run (CRL appendix B.1): critic, success rates and their warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crl.evaluation.scheduling import EpisodeScheduler
from crl.protocols import TaskSource
from crl.rollout.critic import Critic
from crl.rollout.episode import EpisodeKey, EpisodeRunner
from crl.rollout.rates import SuccessRates
from crl.types import Task, Trajectory


@dataclass(frozen=True)
class Warmup:
    """T_warm batches of groups without experience, played before the first step.

    Their episodes are neither trained on nor distilled.
    """

    runner: EpisodeRunner
    source: TaskSource
    """Second instance of the run's task stream. It draws the same tasks as the run will."""
    batches: int
    """T_warm of the paper."""
    groups: int
    """Groups of one batch."""
    group_size: int
    """Episodes of one group."""

    async def play(self) -> list[Trajectory]:
        """Play all batches and return their trajectories, including those with an error."""
        trajectories: list[Trajectory] = []
        for batch in range(self.batches):
            trajectories += await self._play(batch, self.source.draw(self.groups))
        return trajectories

    async def _play(self, batch: int, group_tasks: Sequence[Task]) -> list[Trajectory]:
        first_group = batch * self.groups
        keys = [
            EpisodeKey("warmup", batch, first_group + group, member)
            for group in range(self.groups)
            for member in range(self.group_size)
        ]
        tasks = [task for task in group_tasks for _ in range(self.group_size)]
        return await EpisodeScheduler(len(keys)).play(self.runner, "free", keys, tasks)


@dataclass(frozen=True)
class CriticParts:
    """Actor-critic parts that the training loop uses."""

    critic: Critic
    """Critic of training episodes. Evaluations use a separate critic."""
    success_rates: SuccessRates
    """Success rates shown to both critics. Evaluations do not change them."""
    warmup: Warmup

"""The actor-critic exchange of a run (CRL appendix B.1): the critic, the success rates that it is told, and how they begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crl.protocols import TaskSource
from crl.rollout.critic import Critic
from crl.rollout.episode import EpisodeKey, EpisodeRunner
from crl.rollout.rates import SuccessRates
from crl.run.playing import EpisodeScheduler
from crl.types import Task, Trajectory


@dataclass(frozen=True)
class Warmup:
    """T_warm batches of groups without experience, whose episodes are neither trained on nor distilled.

    source: draws as the run's own stream will, and is another one, so that the run meets the same tasks.
    """

    runner: EpisodeRunner
    source: TaskSource
    batches: int
    groups: int
    group_size: int

    async def play(self) -> list[Trajectory]:
        """Play all batches. Episodes that could not be played are among them, with their errors."""
        played: list[Trajectory] = []
        for batch in range(self.batches):
            played += await self._play(batch, self.source.draw(self.groups))
        return played

    async def _play(self, batch: int, drawn: Sequence[Task]) -> list[Trajectory]:
        first = batch * self.groups
        keys = [
            EpisodeKey("warmup", batch, first + group, m)
            for group in range(self.groups)
            for m in range(self.group_size)
        ]
        tasks = [task for task in drawn for _ in range(self.group_size)]
        return await EpisodeScheduler(len(keys)).play(self.runner, "free", keys, tasks)


@dataclass(frozen=True)
class CriticSide:
    """critic: of the training episodes; evaluations have one of their own, and the same rates, which they do not change."""

    critic: Critic
    rates: SuccessRates
    warmup: Warmup

"""Evaluation on fixed, seeded task sets. It leaves no trace in the train stream or its generators."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crl.rollout.episode import EpisodeKey, EpisodeRunner
from crl.types import RolloutPlan, Split, Task, Trajectory


@dataclass(frozen=True)
class Rate:
    """A success rate with its 95 % Wilson interval over episodes."""

    successes: int
    episodes: int

    @property
    def value(self) -> float:
        return self.successes / self.episodes if self.episodes else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's score interval at z = 1.96: (low, high)."""
        n, z = self.episodes, 1.96
        if not n:
            return math.nan, math.nan
        centre = (self.value + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(self.value * (1 - self.value) / n + z * z / (4 * n * n))
        return centre - half if self.successes else 0.0, centre + half if self.successes < n else 1.0  # at the ends exactly

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.3f} [{low:.3f}, {high:.3f}]"


EvalSet = tuple[str, Split]
"""(task name, split)."""


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation found. `errors` counts episodes that could not be played; they count as failures."""

    rates: Mapping[EvalSet, Rate]
    turns: Mapping[EvalSet, float]
    errors: int

    def figures(self) -> dict[str, float]:
        """For metrics.jsonl: eval/TASK/SPLIT/…; free = without experience."""
        figures: dict[str, float] = {}
        for (task, split), rate in self.rates.items():
            low, high = rate.interval
            name = f"eval/{task}/{split}"
            figures |= {f"{name}/success/free": rate.value, f"{name}/success/free/low": low, f"{name}/success/free/high": high}
            figures |= {f"{name}/episodes": rate.episodes, f"{name}/turns/free": self.turns[task, split]}
        return figures | {"eval/errors": self.errors}


class Evaluator:
    """Plays every eval set once, without experience. concurrency: episodes in flight."""

    def __init__(self, runner: EpisodeRunner, sets: Mapping[EvalSet, Sequence[Task]], *, concurrency: int) -> None:
        self._runner, self._sets, self._concurrency = runner, sets, concurrency

    async def evaluate(self) -> Evaluation:
        """The same tasks and the same draws every time: only the weights make a difference."""
        rates, turns, errors = {}, {}, 0
        for (name, split), tasks in self._sets.items():
            played: list[Trajectory] = []
            for first in range(0, len(tasks), self._concurrency):
                played += await self._play(f"eval/{name}/{split}", first, tasks[first : first + self._concurrency])
            rates[name, split] = Rate(sum(t.success for t in played), len(played))
            turns[name, split] = sum(t.turns for t in played) / len(played)
            errors += sum(t.error is not None for t in played)
        return Evaluation(rates, turns, errors)

    async def _play(self, purpose: str, first: int, tasks: Sequence[Task]) -> list[Trajectory]:
        keys = [EpisodeKey(purpose, 0, first + i, 0) for i in range(len(tasks))]
        for key in keys:
            self._runner.sampler.join(key.session)
        async with asyncio.TaskGroup() as group:
            plays = [group.create_task(self._runner.play(k, t, RolloutPlan("free"))) for k, t in zip(keys, tasks, strict=True)]
        return [play.result() for play in plays]

"""Members of a group: episodes at the same time, or attempts one after the other.

Attempts are those of Reflexion (Shinn et al., arXiv 2303.11366, Algorithm 1). After a failed
attempt, a model reflects on it. The next attempt at the task is guided by the last reflections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

from crl.failures import TaskGroup
from crl.protocols import Hit, Question, SearchRequest
from crl.rollout.episode import EpisodeKey, EpisodeRunner
from crl.types import RolloutPlan, Task, Trajectory


class Members(Protocol):
    """Way in which the members of a group are played."""

    def join(self, runner: EpisodeRunner, keys: Sequence[EpisodeKey]) -> None:
        """Register the episodes of a group, before any group of its step is played."""
        ...

    async def play(
        self, runner: EpisodeRunner, keys: Sequence[EpisodeKey], task: Task,
        plans: Sequence[RolloutPlan],
    ) -> list[Trajectory]:  # fmt: skip
        """Play the members and return their trajectories, in order. Some may be left out."""
        ...


class Together:
    """`Members` that play at the same time."""

    def join(self, runner: EpisodeRunner, keys: Sequence[EpisodeKey]) -> None:
        for key in keys:
            runner.join(key)

    async def play(
        self, runner: EpisodeRunner, keys: Sequence[EpisodeKey], task: Task,
        plans: Sequence[RolloutPlan],
    ) -> list[Trajectory]:  # fmt: skip
        async with TaskGroup() as members:
            episodes = [
                members.create_task(runner.play(key, task, plan))
                for key, plan in zip(keys, plans, strict=True)
            ]
        return [episode.result() for episode in episodes]


class Reflector(Protocol):
    """Model that reflects on failed attempts."""

    async def reflect(self, trajectory: Trajectory) -> Sequence[Hit]:
        """Return the reflections on an attempt; empty if the answer is not usable."""
        ...

    def shown(self, reflections: Sequence[Hit]) -> None:
        """Note that these reflections guide an attempt."""
        ...


class Attempts:
    """`Members` that are attempts at a task, until one succeeds.

    * `memory`: maximum number of reflections that guide an attempt, the last ones.
    * `in_order`: one group is played after the other, so that the requests that share a forward
      pass do not depend on timing.

    An attempt with an error is followed by the next one without a reflection.
    """

    def __init__(self, reflector: Reflector, memory: int, *, in_order: bool) -> None:
        self._reflector, self._memory = reflector, memory
        self._lock = asyncio.Lock() if in_order else None

    def join(self, runner: EpisodeRunner, keys: Sequence[EpisodeKey]) -> None:
        """Do nothing: an attempt joins when it starts."""

    async def play(
        self, runner: EpisodeRunner, keys: Sequence[EpisodeKey], task: Task,
        plans: Sequence[RolloutPlan],
    ) -> list[Trajectory]:  # fmt: skip
        trajectories: list[Trajectory] = []
        reflections: list[Hit] = []
        async with self._lock or nullcontext():
            for key, plan in zip(keys, plans, strict=True):
                last = tuple(reflections[-self._memory :])
                runner.join(key)
                self._reflector.shown(last)
                attempt = await replace(runner, retriever=Remembered(last)).play(key, task, plan)
                trajectories.append(attempt)
                if attempt.success:
                    break
                if attempt.error is None and key is not keys[-1]:
                    reflections += await self._reflector.reflect(attempt)
        return trajectories


@dataclass(frozen=True)
class Remembered:
    """`Retriever` of given experiences, in their order."""

    hits: tuple[Hit, ...]

    async def search(self, requests: Sequence[SearchRequest]) -> list[Hit | None]:
        found = list(self.hits[: len(requests)])
        return [*found, *[None] * (len(requests) - len(found))]

    async def refine(self, question: Question, hit: Hit) -> Hit:
        return hit

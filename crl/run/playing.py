"""Playing many episodes of an evaluation, some at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from crl.rollout.episode import EpisodeKey, EpisodeRunner
from crl.types import Condition, RolloutPlan, Task, Trajectory


async def play_all(
    runner: EpisodeRunner, condition: Condition, keys: Sequence[EpisodeKey], tasks: Sequence[Task], *, concurrency: int
) -> list[Trajectory]:
    """Plays the tasks under their keys, `concurrency` at a time."""
    played: list[Trajectory] = []
    for first in range(0, len(tasks), concurrency):
        some = slice(first, first + concurrency)
        for key in keys[some]:
            runner.join(key)
        async with asyncio.TaskGroup() as group:
            plan = RolloutPlan(condition)
            plays = [group.create_task(runner.play(k, t, plan)) for k, t in zip(keys[some], tasks[some], strict=True)]
        played += [play.result() for play in plays]
    return played

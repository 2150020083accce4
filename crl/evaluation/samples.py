"""Episodes of `crl eval`: every game of every set, `samples` times each.

`play_samples` plays them. `SavedEpisode` is the part of an episode that is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from crl.evaluation.evaluate import EvalSet, Evaluator, eval_keys
from crl.types import Place, Split, Task, Trajectory


class Source(StrEnum):
    """Source of the experience in an evaluation."""

    none = "none"
    bank = "bank"
    """A bank that is only read."""
    online = "online"
    """A bank that is built during the evaluation (`crl.evaluation.online`)."""


@dataclass(frozen=True)
class Game:
    """Game of a split."""

    task: str
    split: Split
    number: int
    """Position in the split, from 0."""
    goal: str


@dataclass(frozen=True)
class SavedEpisode:
    """Result of one episode."""

    game: Game
    condition: str
    """Condition, as in `crl.evaluation.evaluate.EvalKey`."""
    sample: int
    """Number among the episodes of the game, from 0."""
    success: bool
    score: float | None
    """Score × 100; None if the environment does not grade."""
    turns: int
    tokens: int
    """Sampled tokens."""
    error: str | None = None


async def play_samples(evaluator: Evaluator, source: Source, samples: int) -> list[SavedEpisode]:
    """Play all sets of `evaluator` and return the episodes.

    Every game is played `samples` times. `online` plays the online evaluation instead, in which the
    number of visits is fixed; `samples` is ignored.
    """
    if source is Source.online:
        return await _play_online(evaluator)
    parts: list[Callable[[], Coroutine[Any, Any, list[SavedEpisode]]]] = [
        partial(_play_set, evaluator, source, eval_set, tasks, samples)
        for eval_set, tasks in evaluator.sets.items()
    ]
    return [episode for part in await evaluator.scheduler.gather(parts) for episode in part]


async def _play_set(
    evaluator: Evaluator, source: Source, eval_set: EvalSet, tasks: Sequence[Task], samples: int
) -> list[SavedEpisode]:
    runner, condition = evaluator.runner, "free"
    if source is Source.bank:
        assert evaluator.guided, "an evaluation with a bank has opened one"
        runner, condition = evaluator.guided, "guided"
    keys = eval_keys(eval_set, len(tasks), samples)
    trajectories = await evaluator.scheduler.play(
        runner, condition, keys, [tasks[key.group] for key in keys]
    )
    return [
        _saved(trajectory, key.group, key.member, condition)
        for key, trajectory in zip(keys, trajectories, strict=True)
    ]


async def _play_online(evaluator: Evaluator) -> list[SavedEpisode]:
    """Play the online evaluation. Only visits that count are returned.

    The number of a game is that of its place.
    """
    assert evaluator.online, "an online evaluation has a bank"
    episodes = []
    for result in (await evaluator.online.evaluate(compare_lessons=False)).values():
        for condition, visits in (("online", result.counted_visits), ("alone", result.free_visits)):
            numbers: dict[Place, int] = {}
            counts: dict[Place, int] = {}
            for trajectory in (t for visit in visits for t in visit):
                place = trajectory.task.place
                number = numbers.setdefault(place, len(numbers))
                counts[place] = counts.get(place, -1) + 1
                episodes.append(_saved(trajectory, number, counts[place], condition))
    return episodes


def _saved(trajectory: Trajectory, number: int, sample: int, condition: str) -> SavedEpisode:
    task, score = trajectory.task, trajectory.outcome.score
    return SavedEpisode(
        Game(task.name, task.split, number, task.goal),
        condition,
        sample,
        trajectory.success,
        None if score is None else 100 * score,
        trajectory.turns,
        trajectory.activity.sampled_tokens,
        trajectory.error,
    )

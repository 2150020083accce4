"""Evaluation on fixed, seeded task sets.

An evaluation changes neither the train stream, nor its random generators, nor the bank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, Protocol

from crl.config.schema import OVERALL
from crl.evaluation.metrics import mean_score
from crl.evaluation.online import OnlineEvaluator, OnlineResult
from crl.evaluation.scheduling import EpisodeScheduler
from crl.intervals import Mean, effective_number, interval_text, wilson_interval
from crl.protocols import Retriever
from crl.rollout.episode import EpisodeKey, EpisodeRunner
from crl.types import SPLIT_DRAW_NAMES, Split, Task, Trajectory


@dataclass(frozen=True)
class SuccessRate:
    """Success rate with its 95 % Wilson interval."""

    successes: int
    episodes: int
    effective_episodes: float | None = None
    """Effective number of independent episodes; 0 if it is unknown.

    None: the episodes are independent.
    """

    @property
    def value(self) -> float:
        return self.successes / self.episodes if self.episodes else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson score interval (low, high) over the effective number of episodes.

        Both ends are NaN without episodes, or if the effective number is unknown.
        """
        number = self.episodes if self.effective_episodes is None else self.effective_episodes
        return wilson_interval(self.value, number)

    def __str__(self) -> str:
        return interval_text(self.value, *self.interval)


@dataclass(frozen=True)
class MeanSuccessRate:
    """Unweighted mean of several tasks' success rates, with its 95 % interval."""

    rates: tuple[SuccessRate, ...]

    @property
    def value(self) -> float:
        return fmean(rate.value for rate in self.rates)

    @property
    def episodes(self) -> int:
        return sum(rate.episodes for rate in self.rates)

    @property
    def interval(self) -> tuple[float, float]:
        """Interval (low, high) from the rates' own intervals, by MOVER (Zou & Donner 2008).

        The distances from the rates to their interval ends are added in quadrature.
        """
        n = len(self.rates)
        low = math.hypot(*(rate.value - rate.interval[0] for rate in self.rates)) / n
        high = math.hypot(*(rate.interval[1] - rate.value for rate in self.rates)) / n
        return self.value - low, self.value + high

    def __str__(self) -> str:
        return interval_text(self.value, *self.interval)


class Rate(Protocol):
    """Success rate with its 95 % interval."""

    @property
    def value(self) -> float: ...

    @property
    def interval(self) -> tuple[float, float]: ...


def difference_interval(before: Rate, after: Rate) -> tuple[float, float]:
    """Return the 95 % interval (low, high) of `after` − `before`, by MOVER (Newcombe 1998).

    The two rates are treated as independent.
    """
    value, (low, high), (low_after, high_after) = (
        after.value - before.value,
        before.interval,
        after.interval,
    )
    return (
        value - math.hypot(after.value - low_after, high - before.value),
        value + math.hypot(high_after - after.value, before.value - low),
    )


EvalSet = tuple[str, Split]
"""(task name, split)."""

EvalKey = tuple[str, str, str]
"""(task name, split, condition). Conditions:

* `free`: without experience
* `guided`: with the run's bank
* `online`: with a bank that is built during the evaluation, from the third visit on
* `alone`: the episodes of `online`, without experience
"""


CONDITION_LABELS: Mapping[str, str] = {
    "free": "without experience",
    "guided": "with the run's bank",
    "online": "with a bank built online",
    "alone": "online set without a bank",
}
"""Labels of the conditions (see `EvalKey`)."""

MAIN_CONDITIONS: Sequence[tuple[str, str]] = (
    ("seen", "free"),
    ("seen", "guided"),
    ("unseen", "free"),
    ("unseen", "online"),
)
"""Splits and conditions that short texts about a run name."""


@dataclass(frozen=True)
class Evaluation:
    """Results of one evaluation."""

    rates: Mapping[EvalKey, SuccessRate]
    """Success rates."""
    turns: Mapping[EvalKey, float]
    """Mean environment turns of an episode."""
    errors: int
    """Episodes of these rates that ended with an error. The rates count them as failures."""
    scores: Mapping[EvalKey, float] = field(default_factory=dict)
    """Mean score × 100 of the graded episodes. Keys without graded episodes are absent."""
    visits: Mapping[str, Sequence[SuccessRate]] = field(default_factory=dict)
    """Success rate of each visit of the online set, by task. The first visit is first."""
    lift: Mapping[str, Mean] = field(default_factory=dict)
    """Mean gain in success from the online bank, by task, over places (one value per place)."""
    lessons: Mapping[str, SuccessRate] = field(default_factory=dict)
    """Share of right lessons among the extractor's answers on the first visit, by task."""
    untrained_lessons: Mapping[str, SuccessRate] = field(default_factory=dict)
    """Same as `lessons`, for the extractor that the run started with, on the same episodes."""

    @property
    def overall(self) -> dict[EvalKey, MeanSuccessRate]:
        """Mean rates over all tasks, for each split and condition that every task has.

        Empty with fewer than two tasks.
        """
        tasks = {task for task, _, _ in self.rates}
        by_key: defaultdict[EvalKey, list[SuccessRate]] = defaultdict(list)
        for (_, split, condition), rate in self.rates.items():
            by_key[OVERALL, split, condition].append(rate)
        return {
            key: MeanSuccessRate(tuple(rates))
            for key, rates in by_key.items()
            if len(rates) == len(tasks) > 1
        }

    def metrics(self) -> dict[str, float]:
        """Return the metrics for metrics.jsonl: eval/TASK/SPLIT/success/CONDITION and others.

        With several tasks eval/overall/… is included.
        """
        metrics: dict[str, float] = {}
        for (task, split, condition), rate in {**self.rates, **self.overall}.items():
            low, high = rate.interval
            name = f"eval/{task}/{split}/success/{condition}"
            metrics |= {name: rate.value, f"{name}/low": low, f"{name}/high": high}
            metrics |= {f"eval/{task}/{split}/episodes/{condition}": rate.episodes}
        metrics |= {
            f"eval/{task}/{split}/turns/{condition}": turns
            for (task, split, condition), turns in self.turns.items()
        }
        for (task, split, condition), score in self.scores.items():
            metrics[f"eval/{task}/{split}/score/{condition}"] = score
        for task, visits in self.visits.items():
            metrics |= {
                f"eval/{task}/unseen/success/online/visit{i}": rate.value
                for i, rate in enumerate(visits, start=1)
            }
        for task, lift in self.lift.items():
            metrics |= {
                f"eval/{task}/unseen/lift": lift.value,
                f"eval/{task}/unseen/lift/half_width": lift.half_width,
            }
        metrics |= {
            f"eval/{task}/lessons/correct": rate.value for task, rate in self.lessons.items()
        }
        metrics |= {
            f"eval/{task}/lessons/correct/untrained": rate.value
            for task, rate in self.untrained_lessons.items()
        }
        return metrics | {"eval/errors": self.errors}


class Evaluator:
    """Evaluator of a run. It plays every eval set once.

    The seen and the unseen set are played without experience. With `bank`, the seen set is also
    played with it. With `online`, unseen places are also played with a bank built online. A run
    without experience has neither; a run with a frozen bank has no `online`.
    """

    def __init__(
        self, runner: EpisodeRunner, sets: Mapping[EvalSet, Sequence[Task]],
        scheduler: EpisodeScheduler, *, bank: Retriever | None = None,
        online: OnlineEvaluator | None = None,
    ) -> None:  # fmt: skip
        self.runner, self.scheduler, self.sets = runner, scheduler, sets
        self.guided = replace(runner, retriever=bank) if bank else None
        """Runner with the run's bank; None without a bank."""
        self.online = online

    async def evaluate(self, *, online: bool = True, compare_lessons: bool = False) -> Evaluation:
        """Play all eval sets and return the results.

        Tasks and random draws are the same every time, so results differ only by weights and bank.
        `online`: also play unseen places with a bank built online, and the same places without it.
        `compare_lessons`: also distil the first online visit with the extractor that the run
        started with.
        """
        online_evaluator = self.online if online else None
        parts: list[Callable[[], Coroutine[Any, Any, Any]]] = [self._play_sets]
        parts += (
            [partial(online_evaluator.evaluate, compare_lessons=compare_lessons)]
            if online_evaluator
            else []
        )
        episodes = sum(len(tasks) * (1 + self._plays_guided(s)) for s, tasks in self.sets.items())
        if online_evaluator:
            episodes += online_evaluator.episodes
        with self.scheduler.expecting(episodes):
            results = await self.scheduler.gather(parts)
        played: dict[EvalKey, list[Trajectory]] = results[0]
        online_results: dict[str, OnlineResult] = results[1] if online_evaluator else {}
        online_played: dict[EvalKey, list[Trajectory]] = {}
        for name, result in online_results.items():
            online_played[name, "unseen", "online"] = [
                t for visit in result.counted_visits for t in visit
            ]
            online_played[name, "unseen", "alone"] = [
                t for visit in result.free_visits for t in visit
            ]
        rates = {key: success_rate(ts) for key, ts in played.items()} | {
            key: clustered_success_rate(ts) for key, ts in online_played.items()
        }
        played |= online_played
        return Evaluation(
            rates=rates,
            turns={key: sum(t.turns for t in ts) / len(ts) for key, ts in played.items()},
            errors=sum(t.error is not None for ts in played.values() for t in ts),
            scores={
                key: score for key, ts in played.items() if (score := mean_score(ts)) is not None
            },
            visits={
                name: [success_rate(visit) for visit in result.visits]
                for name, result in online_results.items()
            },
            lift={name: Mean.of(result.lift) for name, result in online_results.items()},
            lessons={
                name: SuccessRate(*result.lessons)
                for name, result in online_results.items()
                if result.lessons
            },
            untrained_lessons={
                name: SuccessRate(*result.untrained_lessons)
                for name, result in online_results.items()
                if result.untrained_lessons
            },
        )

    def _plays_guided(self, eval_set: EvalSet) -> bool:
        """Return whether a set is also played with the run's bank."""
        return self.guided is not None and eval_set[1] == "seen"

    async def _play_sets(self) -> dict[EvalKey, list[Trajectory]]:
        parts = [partial(self._play, *item) for item in self.sets.items()]
        played = await self.scheduler.gather(parts)
        return {key: trajectories for part in played for key, trajectories in part.items()}

    async def _play(
        self, eval_set: EvalSet, tasks: Sequence[Task]
    ) -> dict[EvalKey, list[Trajectory]]:
        """Play one eval set. Every condition has the same draws, so differences are paired."""
        name, split = eval_set
        keys = eval_keys(eval_set, len(tasks))
        if self.guided is None or not self._plays_guided(eval_set):
            free = await self.scheduler.play(self.runner, "free", keys, tasks)
            return {(name, split, "free"): free}
        guided = await self.scheduler.play(self.guided, "guided", keys, tasks)
        free = await self.scheduler.play_free(self.runner, keys, guided)
        return {(name, split, "free"): free, (name, split, "guided"): guided}


def eval_keys(eval_set: EvalSet, games: int, samples: int = 1) -> list[EpisodeKey]:
    """Return the keys of `samples` episodes of each game of a set, game by game.

    The draws of the first sample are the same for any number of samples.
    """
    name, split = eval_set
    purpose = f"eval/{name}/{SPLIT_DRAW_NAMES[split]}"
    return [EpisodeKey(purpose, 0, game, n) for game in range(games) for n in range(samples)]


def success_rate(trajectories: Sequence[Trajectory]) -> SuccessRate:
    return SuccessRate(sum(t.success for t in trajectories), len(trajectories))


def clustered_success_rate(trajectories: Sequence[Trajectory]) -> SuccessRate:
    """Return the success rate of episodes in places that are visited several times.

    Episodes of one place are not independent: they share its lessons and its difficulty. The
    interval is that of the `effective_number` of episodes, with places as clusters.
    """
    places = [t.task.place for t in trajectories]
    number = effective_number([t.success for t in trajectories], places)
    return replace(success_rate(trajectories), effective_episodes=number)

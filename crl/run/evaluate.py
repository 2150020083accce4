"""Evaluation on fixed, seeded task sets. It leaves no trace in the train stream, its generators, or the bank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

from crl.config.schema import OVERALL
from crl.intervals import NORMAL_975, Mean, cluster_variance, t_975
from crl.protocols import Retriever
from crl.rollout.episode import EpisodeKey, EpisodeRunner
from crl.run.figures import mean_score
from crl.run.online import OnlineBank, OnlineResult
from crl.run.playing import EpisodeScheduler
from crl.types import Split, Task, Trajectory


@dataclass(frozen=True)
class Rate:
    """A success rate with its 95 % Wilson interval. effective: how many independent episodes say as much, where these are not; None =
    they are."""

    successes: int
    episodes: int
    effective: float | None = None

    @property
    def value(self) -> float:
        return self.successes / self.episodes if self.episodes else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's score interval at z = 1.96, over the effective number of episodes: (low, high)."""
        n, z = self.effective or self.episodes, NORMAL_975
        if not n:
            return math.nan, math.nan
        centre = (self.value + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(self.value * (1 - self.value) / n + z * z / (4 * n * n))
        return centre - half if self.successes else 0.0, centre + half if self.successes < self.episodes else 1.0  # at the ends exactly

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.3f} [{low:.3f}, {high:.3f}]"


@dataclass(frozen=True)
class MeanRate:
    """The mean of several tasks' success rates, each of the same weight, with its 95 % interval."""

    rates: tuple[Rate, ...]

    @property
    def value(self) -> float:
        return fmean(rate.value for rate in self.rates)

    @property
    def episodes(self) -> int:
        return sum(rate.episodes for rate in self.rates)

    @property
    def interval(self) -> tuple[float, float]:
        """From the rates' own intervals, by MOVER (Zou & Donner 2008): the distances of their ends are added in squares."""
        n = len(self.rates)
        low = math.hypot(*(rate.value - rate.interval[0] for rate in self.rates)) / n
        high = math.hypot(*(rate.interval[1] - rate.value for rate in self.rates)) / n
        return self.value - low, self.value + high

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.3f} [{low:.3f}, {high:.3f}]"


def difference(before: Rate | MeanRate, after: Rate | MeanRate) -> tuple[float, float]:
    """The 95 % interval of after − before, by the same (Newcombe 1998), as if the two were independent."""
    value, (low, high), (low_after, high_after) = after.value - before.value, before.interval, after.interval
    return (
        value - math.hypot(after.value - low_after, high - before.value),
        value + math.hypot(high_after - after.value, before.value - low),
    )


EvalSet = tuple[str, Split]
"""(task name, split)."""

Setting = tuple[str, str, str]
"""(task name, split, with what: `free` of experience, `guided` by the run's bank, or by one that is built `online`; `alone` are the
episodes of `online` without it)."""


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation found. `errors` counts episodes that could not be played; they count as failures.

    scores: mean score × 100 of what is graded; visits: of an online set, the success of every visit; lift: what the bank adds there,
    each place being one value. lessons, untrained_lessons: by task, the share of right lessons that the extractor, and the one that
    the run started with, write of the same episodes.
    """

    rates: Mapping[Setting, Rate]
    turns: Mapping[Setting, float]
    errors: int
    scores: Mapping[Setting, float] = field(default_factory=dict)
    visits: Mapping[str, Sequence[Rate]] = field(default_factory=dict)
    lift: Mapping[str, Mean] = field(default_factory=dict)
    lessons: Mapping[str, Rate] = field(default_factory=dict)
    untrained_lessons: Mapping[str, Rate] = field(default_factory=dict)

    @property
    def overall(self) -> dict[Setting, MeanRate]:
        """Over several tasks, in the settings that all of them are evaluated in."""
        tasks = {task for task, _, _ in self.rates}
        settings: defaultdict[Setting, list[Rate]] = defaultdict(list)
        for (_, split, setting), rate in self.rates.items():
            settings[OVERALL, split, setting].append(rate)
        return {setting: MeanRate(tuple(rates)) for setting, rates in settings.items() if len(rates) == len(tasks) > 1}

    def figures(self) -> dict[str, float]:
        """For metrics.jsonl: eval/TASK/SPLIT/success/SETTING and others; of several tasks also eval/overall/…"""
        figures: dict[str, float] = {}
        for (task, split, setting), rate in {**self.rates, **self.overall}.items():
            low, high = rate.interval
            name = f"eval/{task}/{split}/success/{setting}"
            figures |= {name: rate.value, f"{name}/low": low, f"{name}/high": high}
            figures |= {f"eval/{task}/{split}/episodes/{setting}": rate.episodes}
        figures |= {f"eval/{task}/{split}/turns/{setting}": turns for (task, split, setting), turns in self.turns.items()}
        for (task, split, setting), score in self.scores.items():
            figures[f"eval/{task}/{split}/score/{setting}"] = score
        for task, visits in self.visits.items():
            figures |= {f"eval/{task}/new/success/online/visit{i}": rate.value for i, rate in enumerate(visits, start=1)}
        for task, lift in self.lift.items():
            figures |= {f"eval/{task}/new/lift": lift.value, f"eval/{task}/new/lift/half_width": lift.half}
        figures |= {f"eval/{task}/lessons/correct": rate.value for task, rate in self.lessons.items()}
        figures |= {f"eval/{task}/lessons/correct/untrained": rate.value for task, rate in self.untrained_lessons.items()}
        return figures | {"eval/errors": self.errors}


class Evaluator:
    """Plays every eval set once: `known` and `new` without experience, and in a run with a bank `known` with it and `new` with one
    that is built online.

    bank, online: None in a run without experience.
    """

    def __init__(
        self, runner: EpisodeRunner, sets: Mapping[EvalSet, Sequence[Task]],
        scheduler: EpisodeScheduler, *, bank: Retriever | None = None,
        online: OnlineBank | None = None,
    ) -> None:  # fmt: skip
        self.runner, self.scheduler, self._sets = runner, scheduler, sets
        self._guided = replace(runner, retriever=bank) if bank else None
        self._online = online

    async def evaluate(self, *, online: bool = True, compare_lessons: bool = False) -> Evaluation:
        """Play the same tasks with the same draws every time: only weights and bank make a difference.

        online: also play `new` with a bank that is built online, and those places without it.
        compare_lessons: also let the extractor that the run started with distil what this one distils.
        """
        builder = self._online if online else None
        parts: list[Callable[[], Coroutine[Any, Any, Any]]] = [self._play_sets]
        parts += [partial(builder.evaluate, compare_lessons=compare_lessons)] if builder else []
        results = await self.scheduler.gather(parts)
        played: dict[Setting, list[Trajectory]] = results[0]
        found: dict[str, OnlineResult] = results[1] if builder else {}
        visited: dict[Setting, list[Trajectory]] = {}
        for name, result in found.items():
            visited[name, "new", "online"] = [t for visit in result.settled for t in visit]
            visited[name, "new", "alone"] = [t for visit in result.alone for t in visit]
        rates = {setting: rate(ts) for setting, ts in played.items()} | {setting: rate_of_visits(ts) for setting, ts in visited.items()}
        played |= visited
        return Evaluation(
            rates=rates,
            turns={setting: sum(t.turns for t in ts) / len(ts) for setting, ts in played.items()},
            errors=sum(t.error is not None for ts in played.values() for t in ts),
            scores={setting: score for setting, ts in played.items() if (score := mean_score(ts)) is not None},
            visits={name: [rate(visit) for visit in result.visits] for name, result in found.items()},
            lift={name: Mean.of(result.lift) for name, result in found.items()},
            lessons={name: Rate(*result.lessons) for name, result in found.items() if result.lessons},
            untrained_lessons={name: Rate(*result.untrained_lessons) for name, result in found.items() if result.untrained_lessons},
        )

    async def _play_sets(self) -> dict[Setting, list[Trajectory]]:
        parts = [partial(self._play, *item) for item in self._sets.items()]
        played = await self.scheduler.gather(parts)
        return {setting: trajectories for one in played for setting, trajectories in one.items()}

    async def _play(self, of: EvalSet, tasks: Sequence[Task]) -> dict[Setting, list[Trajectory]]:
        """Play a set. Every condition has the same draws, so that differences are paired."""
        name, split = of
        keys = [EpisodeKey(f"eval/{name}/{split}", 0, i, 0) for i in range(len(tasks))]
        if self._guided is None or split != "known":
            free = await self.scheduler.play(self.runner, "free", keys, tasks)
            return {(name, split, "free"): free}
        guided = await self.scheduler.play(self._guided, "guided", keys, tasks)
        free = await self.scheduler.play_free(self.runner, keys, guided)
        return {(name, split, "free"): free, (name, split, "guided"): guided}


def rate(played: Sequence[Trajectory]) -> Rate:
    return Rate(sum(t.success for t in played), len(played))


def rate_of_visits(played: Sequence[Trajectory]) -> Rate:
    """Of episodes in places that are visited again and again: those of one place share its lessons and its difficulty.

    Their effective number is p(1−p) over `cluster_variance`, with places as clusters (theirs over the
    design effect of Kish 1965); at least the number of places, which it also is where all are won or
    all are lost, and at most that of episodes. Of k places it is multiplied by (1.96 / t)², with t
    of k−1 degrees of freedom (Korn & Graubard 1998, Survey Methodology 24(2)), so that Wilson's
    interval is as wide as Student's t asks.
    """
    places = [t.task.goal for t in played]
    whole, k = rate(played), len(set(places))
    p, n = whole.value, whole.episodes
    if k < 2 or not 0 < p < 1:
        return replace(whole, effective=float(k))
    between = cluster_variance([t.success for t in played], places)
    effective = p * (1 - p) / between if between else math.inf
    return replace(whole, effective=min(max(effective, k), n) * (NORMAL_975 / t_975(k - 1)) ** 2)

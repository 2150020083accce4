"""Statistics of the episodes of `crl eval`: per task and split, and over all tasks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from crl.config.schema import OVERALL
from crl.evaluation.evaluate import EvalKey
from crl.evaluation.samples import SavedEpisode
from crl.intervals import (
    Mean,
    effective_number,
    interval_text,
    number_text,
    wilson_interval,
)


@dataclass(frozen=True)
class Estimate:
    """Value with its 95 % interval. The ends are NaN if they are unknown."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return interval_text(self.value, self.low, self.high)

    @property
    def interval(self) -> tuple[float, float]:
        return self.low, self.high

    def text(self, digits: int) -> str:
        """Return the value and half of the interval, such as `12.3 ± 0.4`."""
        half = number_text((self.high - self.low) / 2, f".{digits}f")
        return f"{self.value:.{digits}f} ± {half}"


@dataclass(frozen=True)
class ReportRow:
    """Results of one task, split and condition. The interval of every value is clustered by goal.

    An overall row holds the unweighted means over the tasks.
    """

    key: EvalKey
    games: int
    episodes: int
    errors: int
    """Episodes that ended with an error. They count as failures."""
    success: Estimate
    """Success rate: pass@1."""
    means: Mapping[str, Estimate]
    """Means of `score` (if graded), `turns` and `tokens` per episode."""
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)
    """pass@k by k > 1; empty for the online evaluation, whose visits are not samples."""


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from the samples of one game.

    It is 1 − C(n − c, k) / C(n, k) for n samples with c successes (Chen et al. 2021, "Evaluating
    Large Language Models Trained on Code", eq. 1).
    """
    return 1 - math.comb(samples - successes, k) / math.comb(samples, k)


def reported_ks(samples: int) -> list[int]:
    """Return the k of pass@k that are reported: the powers of two up to `samples`, and `samples`.

    The first one is 1.
    """
    powers = [2**i for i in range(samples.bit_length())]
    return sorted({*powers, samples})


def report_rows(episodes: Iterable[SavedEpisode]) -> list[ReportRow]:
    """Return the rows of all tasks, splits and conditions, then the overall rows."""
    groups: defaultdict[EvalKey, list[SavedEpisode]] = defaultdict(list)
    for episode in episodes:
        groups[episode.game.task, episode.game.split, episode.condition].append(episode)
    rows = [_row(key, group) for key, group in groups.items()]
    return rows + _overall_rows(rows)


def _row(key: EvalKey, episodes: Sequence[SavedEpisode]) -> ReportRow:
    goals = [episode.game.goal for episode in episodes]
    by_game: defaultdict[int, list[SavedEpisode]] = defaultdict(list)
    for episode in episodes:
        by_game[episode.game.number].append(episode)
    graded = [episode for episode in episodes if episode.score is not None]
    means = {
        "turns": _mean([episode.turns for episode in episodes], goals),
        "tokens": _mean([episode.tokens for episode in episodes], goals),
    }
    if graded:
        scores = [episode.score or 0.0 for episode in graded]
        means = {"score": _mean(scores, [episode.game.goal for episode in graded])} | means
    samples = min(map(len, by_game.values()))
    ks = reported_ks(samples)[1:] if key[2] in ("free", "guided") else []
    return ReportRow(
        key,
        len(by_game),
        len(episodes),
        sum(episode.error is not None for episode in episodes),
        _rate([float(episode.success) for episode in episodes], goals),
        means,
        {k: _pass_at(list(by_game.values()), k) for k in ks},
    )


def _pass_at(games: Sequence[Sequence[SavedEpisode]], k: int) -> Estimate:
    values = [
        pass_at_k(len(episodes), sum(episode.success for episode in episodes), k)
        for episodes in games
    ]
    return _rate(values, [episodes[0].game.goal for episodes in games])


def _overall_rows(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """Return the means over all tasks, for every split and condition that all tasks have."""
    tasks = {row.key[0] for row in rows}
    groups: defaultdict[tuple[str, str], list[ReportRow]] = defaultdict(list)
    for row in rows:
        groups[row.key[1:]].append(row)
    return [
        ReportRow(
            (OVERALL, split, condition),
            sum(row.games for row in group),
            sum(row.episodes for row in group),
            sum(row.errors for row in group),
            mean_estimate([row.success for row in group]),
            {
                name: mean_estimate([row.means[name] for row in group])
                for name in ("turns", "tokens")
            },
            {
                k: mean_estimate([row.pass_at[k] for row in group])
                for k in group[0].pass_at
                if all(k in row.pass_at for row in group)
            },
        )
        for (split, condition), group in groups.items()
        if len(group) == len(tasks) > 1
    ]


def mean_estimate(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of independent estimates, with its interval by MOVER (Zou & Donner 2008)."""
    n, value = len(estimates), fmean(estimate.value for estimate in estimates)
    low = math.hypot(*(estimate.value - estimate.low for estimate in estimates)) / n
    high = math.hypot(*(estimate.high - estimate.value for estimate in estimates)) / n
    return Estimate(value, value - low, value + high)


def _rate(values: Sequence[float], goals: Sequence[Hashable]) -> Estimate:
    """Return the mean of values in [0, 1] with its Wilson interval, clustered by goal."""
    value = fmean(values)
    return Estimate(value, *wilson_interval(value, effective_number(values, goals)))


def _mean(values: Sequence[float], goals: Sequence[Hashable]) -> Estimate:
    mean = Mean.of(values, goals)
    return Estimate(mean.value, mean.value - mean.half_width, mean.value + mean.half_width)

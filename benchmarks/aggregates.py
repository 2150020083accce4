"""Statistics over runs and tasks: interquartile mean, probability of improvement, bootstrap.

Scores are arrays [runs, tasks]: one row per seed. The definitions are those of Agarwal et al. 2021,
"Deep Reinforcement Learning at the Edge of the Statistical Precipice" (arXiv 2108.13264). Tests
compare the values with those of the package rliable 1.2.0, which needs pandas before version 3 and
draws from numpy's global generator.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
"""Scores [runs, tasks]."""

DECIMALS = 12
"""Decimals of a score that are compared."""
REPLICATES = 2_000
"""Number of bootstrap samples of an interval."""


def interquartile_mean(scores: Scores) -> float:
    """Return the mean of the middle half of all scores."""
    ordered = np.sort(scores, axis=None)
    cut = ordered.size // 4
    return float(ordered[cut : ordered.size - cut].mean())


def probability_of_improvement(first: Scores, second: Scores) -> float:
    """Return the probability that a run of `first` has a higher score than one of `second`.

    This is the mean over the tasks of P(X > Y) + P(X = Y) / 2. The arrays may have unequal numbers
    of runs. Scores that differ by rounding errors only are equal.
    """
    x, y = first.round(DECIMALS)[:, None], second.round(DECIMALS)[None]
    wins = (x > y).sum((0, 1)) + (x == y).sum((0, 1)) / 2
    return float(np.mean(wins / (len(first) * len(second))))


def bootstrap_interval(
    statistic: Callable[..., float], *scores: Scores, seed: int = 0, replicates: int = REPLICATES
) -> tuple[float, float]:
    """Return the 95 % percentile interval of a statistic by the stratified bootstrap.

    Runs are drawn with replacement, separately for each task and for each array.
    """
    rng = np.random.default_rng(seed)
    values = [
        statistic(
            *(np.take_along_axis(s, rng.integers(len(s), size=s.shape), axis=0) for s in scores)
        )
        for _ in range(replicates)
    ]
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)

"""Means with 95 % intervals, of observations that need not be independent of one another.

Observations come in clusters, such as the groups of one place. Those of one cluster may depend on
each other in any way; clusters are independent. Every interval of a mean in crl is computed here,
except that of an experience's lift, which has a prior (`crl.types.Lift`).

The variance is the cluster-robust one of Cameron & Miller (2015, "A Practitioner's Guide to
Cluster-Robust Inference", Journal of Human Resources 50(2)) for a regression on a constant alone,
with Student's t over the clusters as they advise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

NORMAL_975 = 1.96
"""The 97.5 % quantile of the normal distribution, as it is usually rounded."""


@dataclass(frozen=True)
class Mean:
    """A mean with its 95 % interval by Student's t over clusters."""

    value: float
    """NaN without observations."""
    half: float
    """Half the width of the interval; NaN with fewer than two clusters."""
    n: int
    """Observations."""
    clusters: int
    """Clusters of observations; `n` where each is independent."""

    @classmethod
    def of(cls, values: Sequence[float], clusters: Iterable[Hashable] | None = None) -> Mean:
        """Return the mean of `values`, of which each belongs to one of `clusters`.

        clusters: a name for each value; None where all values are independent.
        """
        if not values:
            return cls(math.nan, math.nan, 0, 0)
        names = list(range(len(values)) if clusters is None else clusters)
        k = len(set(names))
        half = half_width(cluster_variance(values, names), k)
        return cls(fmean(values), half, len(values), k)

    def __str__(self) -> str:
        return plus_minus(self.value, self.half) if self.n else "unknown"


def cluster_variance(values: Sequence[float], clusters: Sequence[Hashable]) -> float:
    """Return the cluster-robust variance of the mean of `values`; NaN with one cluster.

        V = k / (k − 1) · Σ_c (S_c − n_c · m)² / N²

    Of k clusters, c has n_c of the N values, and S_c is their sum; m is the mean of all N. Where
    every cluster has one value, V is the usual s² / N. Where all have equally many, V is s² / k of
    the clusters' means.
    """
    members: defaultdict[Hashable, list[float]] = defaultdict(list)
    for value, name in zip(values, clusters, strict=True):
        members[name].append(value)
    k, mean = len(members), fmean(values)
    if k < 2:
        return math.nan
    squares = sum((len(own) * (fmean(own) - mean)) ** 2 for own in members.values())
    return k / (k - 1) * squares / len(values) ** 2


def half_width(variance: float, clusters: int) -> float:
    """Return half the 95 % interval of a mean with a variance that is estimated from clusters.

    NaN with fewer than two clusters.
    """
    return t_975(clusters - 1) * math.sqrt(variance) if clusters > 1 else math.nan


@cache
def t_975(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t with so many degrees of freedom."""
    from scipy.special import stdtrit  # imported late: most commands compute no interval

    return float(stdtrit(freedom, 0.975))


def plus_minus(value: float, half: float, digits: int = 3) -> str:
    """Return "+0.250 ± 0.120", with a dash for a half width that is unknown."""
    return f"{value:+.{digits}f} ± " + ("–" if math.isnan(half) else f"{half:.{digits}f}")

"""Means with 95 % intervals, for observations that may depend on each other.

Observations are grouped in clusters, such as the groups of one place. Observations of one cluster
may depend on each other in any way; clusters are independent. This module computes every interval
of a mean in crl, except the interval of an experience's lift, which has a prior
(`crl.types.Lift`).

The variance is the cluster-robust one of Cameron & Miller (2015, "A Practitioner's Guide to
Cluster-Robust Inference", Journal of Human Resources 50(2)), for a regression on a constant only.
The interval uses Student's t over the clusters, as they recommend.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

NORMAL_975 = 1.96
"""Rounded 97.5 % quantile of the normal distribution."""


@dataclass(frozen=True)
class Mean:
    """Mean with its 95 % interval from Student's t over clusters."""

    value: float
    """Mean of the observations; NaN if there are none."""
    half_width: float
    """Half the width of the interval; NaN with fewer than two clusters."""
    n: int
    """Number of observations."""
    clusters: int
    """Number of clusters; equal to `n` if all observations are independent."""

    @classmethod
    def of(cls, values: Sequence[float], clusters: Iterable[Hashable] | None = None) -> Mean:
        """Return the mean of `values` with its interval.

        `clusters` names the cluster of each value; None means that all values are independent.
        """
        if not values:
            return cls(math.nan, math.nan, 0, 0)
        labels = list(range(len(values)) if clusters is None else clusters)
        k = len(set(labels))
        width = half_width(cluster_variance(values, labels), k)
        return cls(fmean(values), width, len(values), k)

    def __str__(self) -> str:
        return plus_minus(self.value, self.half_width) if self.n else "unknown"


def cluster_variance(values: Sequence[float], clusters: Sequence[Hashable]) -> float:
    """Return the cluster-robust variance of the mean of `values`; NaN with one cluster.

        V = k / (k − 1) · Σ_c (S_c − n_c · m)² / N²

    There are N values with mean m, in k clusters. Cluster c has n_c values with sum S_c. If every
    cluster has one value, V is the usual s² / N. If all clusters have the same size, V is s² / k,
    where s² is the sample variance of the clusters' means.
    """
    members: defaultdict[Hashable, list[float]] = defaultdict(list)
    for value, cluster in zip(values, clusters, strict=True):
        members[cluster].append(value)
    k, mean = len(members), fmean(values)
    if k < 2:
        return math.nan
    squares = sum((len(own) * (fmean(own) - mean)) ** 2 for own in members.values())
    return k / (k - 1) * squares / len(values) ** 2


SMALLEST_NUMBER = 1e-6
"""Effective number of observations below which a rate says nothing."""


def wilson_interval(rate: float, n: float) -> tuple[float, float]:
    """Return the 95 % Wilson score interval (low, high) of a rate of `n` observations, at z = 1.96.

    An end is exactly 0 or 1 if the rate is. Both ends are NaN if `n` is 0, which means unknown.
    """
    if not n:
        return math.nan, math.nan
    if n < SMALLEST_NUMBER:
        return 0.0, 1.0
    z = NORMAL_975
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return low if rate > 0 else 0.0, high if rate < 1 else 1.0


def effective_number(values: Sequence[float], clusters: Sequence[Hashable]) -> float:
    """Return the number of independent observations that determine a rate equally well.

    `values` are in [0, 1]; observations of one cluster may depend on each other. With the mean p,
    the effective number is p(1−p) / `cluster_variance`: the number of observations divided by the
    design effect (Kish 1965). The result is limited to [effective clusters, observations] and then
    multiplied by (1.96 / t)², with t of effective clusters − 1 degrees of freedom. This makes
    Wilson's interval as wide as Student's t requires (Korn & Graubard 1998, Survey Methodology
    24(2)). If all values are 0 or all are 1, the result is the number of effective clusters. With
    one cluster nothing is known about others, and the result is 0.
    """
    p, k = fmean(values), effective_clusters(clusters)
    if k == 1:
        return 0.0
    if not 0 < p < 1:
        return k
    variance = cluster_variance(values, clusters)
    n = min(max(p * (1 - p) / variance if variance else math.inf, k), len(values))
    return n * (NORMAL_975 / t_975(k - 1)) ** 2


def effective_clusters(clusters: Sequence[Hashable]) -> float:
    """Return the number of clusters of equal size that determine a mean equally well.

    It is N² / Σ_c n_c² for N observations, n_c of them in cluster c, if the observations of a
    cluster are all equal (Kish 1965). It is the number of clusters if they have the same size, and
    near 1 if one cluster has most of the observations.
    """
    return len(clusters) ** 2 / sum(n * n for n in Counter(clusters).values())


def half_width(variance: float, clusters: int) -> float:
    """Return half the width of a mean's 95 % interval; NaN with fewer than two clusters.

    `variance` is the variance of the mean, estimated from `clusters` clusters.
    """
    return t_975(clusters - 1) * math.sqrt(variance) if clusters > 1 else math.nan


@cache
def t_975(degrees: float) -> float:
    """Return the 97.5 % quantile of Student's t with `degrees` degrees of freedom."""
    from scipy.special import stdtrit  # local import: most commands compute no interval

    return float(stdtrit(degrees, 0.975))


def plus_minus(value: float, half_width: float, digits: int = 3) -> str:
    """Return text like "+0.250 ± 0.120". A NaN half width is written as a dash."""
    return f"{number_text(value, f'+.{digits}f')} ± {number_text(half_width, f'.{digits}f')}"


def interval_text(value: float, low: float, high: float, spec: str = ".3f") -> str:
    """Return text like "0.250 [0.120, 0.380]". A NaN end is written as a dash."""
    return f"{number_text(value, spec)} [{number_text(low, spec)}, {number_text(high, spec)}]"


def number_text(value: float, spec: str) -> str:
    """Return a formatted number without the sign of a negative zero, or a dash for NaN."""
    if math.isnan(value):
        return "–"
    text = f"{value:{spec}}"
    return text if text.strip("-0.") else text.removeprefix("-")

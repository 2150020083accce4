"""Intervals of means over clusters, compared with numbers worked by hand."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crl.intervals import (
    Mean,
    cluster_variance,
    effective_clusters,
    effective_number,
    interval_text,
    number_text,
    plus_minus,
    t_975,
    wilson_interval,
)

rates = st.lists(st.integers(-8, 8).map(lambda n: n / 8), min_size=2, max_size=20)


def test_quantiles_equal_those_of_the_t_table() -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 7: 2.365, 30: 2.042, 186: 1.973}
    assert {df: round(t_975(df), 3) for df in table} == table


def test_independent_values_by_hand() -> None:
    """Check the mean of {1, 0, 0, 1}.

    s² = 4 · 1/4 / 3 = 1/3, V = 1/12, half = 3.182446 · √(1/12) = 0.918693.
    """
    mean = Mean.of([1, 0, 0, 1])
    assert (mean.value, mean.n, mean.clusters) == (0.5, 4, 4)
    assert mean.half_width == pytest.approx(0.918693, abs=1e-6)
    assert str(mean) == "+0.500 ± 0.919"


def test_clusters_of_unequal_sizes_by_hand() -> None:
    """Check the mean m = 3/6 of three clusters.

    Sums less n_c · m: a 2 − 1.5, b 0 − 0.5, c 1 − 1. Their squares sum to 1/2.

    V = 3/2 · 1/2 / 36 = 1/48; half = t(2) · √(1/48) = 4.302653 · 0.144338 = 0.621034.
    """
    values, clusters = [1, 0, 1, 0, 0, 1], ["a", "b", "a", "a", "c", "c"]
    assert cluster_variance(values, clusters) == pytest.approx(1 / 48)
    mean = Mean.of(values, clusters)
    assert (mean.value, mean.n, mean.clusters) == (0.5, 6, 3)
    assert mean.half_width == pytest.approx(0.621034, abs=1e-6)


def test_repeated_values_within_a_cluster_do_not_narrow_the_interval() -> None:
    once = Mean.of([1.0, 0.0, 0.25])
    often = Mean.of([1.0] * 50 + [0.0] * 50 + [0.25] * 50, ["a"] * 50 + ["b"] * 50 + ["c"] * 50)
    assert (often.value, often.half_width) == pytest.approx((once.value, once.half_width))
    assert (often.n, often.clusters) == (150, 3)


@given(rates)
def test_equal_clusters_have_the_interval_of_their_means(values: list[float]) -> None:
    pairs = [value + shift for value in values for shift in (-0.5, 0.5)]
    clusters = [i for i in range(len(values)) for _ in range(2)]
    assert Mean.of(pairs, clusters).half_width == pytest.approx(Mean.of(values).half_width)


def test_one_cluster_or_no_value_has_no_interval() -> None:
    for mean in (Mean.of([0.5]), Mean.of([0.25, 0.75], ["here", "here"])):
        assert (mean.value, mean.clusters, str(mean)) == (0.5, 1, "+0.500 ± –")
        assert math.isnan(mean.half_width)
    nothing = Mean.of([])
    assert (nothing.n, nothing.clusters, str(nothing)) == (0, 0, "unknown")
    assert math.isnan(nothing.value)


def test_a_value_needs_a_cluster() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Mean.of([1.0, 0.0], ["a"])


def test_intervals_as_text() -> None:
    assert plus_minus(-0.25, 0.125, 2) == "-0.25 ± 0.12"
    assert plus_minus(0.5, math.nan) == "+0.500 ± –"
    assert interval_text(0.5, 0.25, math.nan) == "0.500 [0.250, –]"
    assert interval_text(0.5, 0.25, 0.75, "+.2f") == "+0.50 [+0.25, +0.75]"


def test_a_negative_zero_has_no_sign() -> None:
    assert number_text(-0.00001, "+.4f") == "0.0000"
    assert number_text(-0.00006, "+.4f") == "-0.0001"
    assert number_text(0.00001, "+.4f") == "+0.0000"


def test_effective_clusters_by_hand() -> None:
    assert effective_clusters(["a", "b", "c"] * 4) == 3.0
    assert effective_clusters(["a"] * 3 + ["b"]) == 16 / 10
    assert effective_clusters(["a"] * 5) == 1.0


@pytest.mark.parametrize("sizes", [(60, 2), (134, 1), (1000, 5), (10**6, 1)])
def test_one_dominant_cluster_gives_the_widest_interval(sizes: tuple[int, int]) -> None:
    values = [float(i % 3 > 0) for size in sizes for i in range(size)]
    clusters = [name for name, size in zip("ab", sizes, strict=True) for _ in range(size)]
    low, high = wilson_interval(sum(values) / len(values), effective_number(values, clusters))
    assert 0.0 <= low < 1e-3
    assert 1 - 1e-3 < high <= 1.0


def test_the_effective_number_of_unequal_clusters_by_hand() -> None:
    """Check clusters of 3 and 1 values whose means are 1 and 0.

    The mean is 3/4, the sums less n_c · m are 3/4 and −3/4. V = 2 · 2 · 9/16 / 16 = 9/64, and
    3/16 / (9/64) = 4/3 is less than the 16/10 effective clusters. t of 0.6 degrees of freedom.
    """
    number = effective_number([1, 1, 1, 0], ["a", "a", "a", "b"])
    assert number == pytest.approx(1.6 * (1.96 / t_975(1.6 - 1)) ** 2)
    assert effective_number([1, 1, 1, 1], ["a", "a", "a", "b"]) == 1.6
    assert effective_number([1, 0, 1, 1], ["a"] * 4) == 0.0
    assert all(map(math.isnan, wilson_interval(0.75, 0.0)))


SIZES = {
    "equal": [8] * 16,
    "unequal": list(range(1, 11)),
    "two large clusters": [20, 20] + [2] * 10,
    "one large cluster": [60] + [2] * 10,
}
"""Sizes of clusters."""


@pytest.mark.parametrize("correlation", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_rate_intervals_cover_the_rate_of_all_clusters(
    sizes: list[int], correlation: float
) -> None:
    """Simulate clusters whose rates have a beta distribution with mean 0.5."""
    draw, covered, runs = random.Random(7), 0, 400
    for _ in range(runs):
        values, clusters = [], []
        for cluster, size in enumerate(sizes):
            rate = cluster_rate(draw, correlation)
            values += [float(draw.random() < rate) for _ in range(size)]
            clusters += [cluster] * size
        low, high = wilson_interval(fmean(values), effective_number(values, clusters))
        covered += low <= 0.5 <= high
    assert covered / runs >= 0.9


def cluster_rate(draw: random.Random, correlation: float) -> float:
    """Return the rate of a cluster whose observations have this correlation."""
    if correlation == 0:
        return 0.5
    if correlation == 1:
        return float(draw.random() < 0.5)
    weight = (1 / correlation - 1) / 2
    return draw.betavariate(weight, weight)


def test_scipy_is_imported_only_to_compute_an_interval() -> None:
    report = (
        "import sys, crl.intervals, crl.cli.main, crl.manager.inspection.reading; "
        "print('scipy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "False\n"

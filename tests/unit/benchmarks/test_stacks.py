"""Noise estimate of benchmarks/stacks.py, checked with numbers worked by hand."""

from __future__ import annotations

import pytest

from support.paths import benchmark

stacks = benchmark("stacks")


def runs(*values: float) -> list[dict]:
    return [
        {"figures": {"seen, free": value}, "seconds_per_step": 1.5, "mismatch_kl": 1e-8}
        for value in values
    ]


def test_half_an_interval_of_a_difference():
    # The variances are 1 and 0, with two degrees of freedom.
    assert stacks.half_width([1, 2, 3], [2, 2, 2]) == pytest.approx(4.302653 * (1 / 3) ** 0.5)
    assert stacks.half_width([1, 2, 3], [1, 3]) == pytest.approx(12.706205 * (1 / 3 + 2 / 2) ** 0.5)


def test_a_difference_beyond_noise_is_marked():
    same, different = (
        stacks.table({"one": runs(0.3, 0.4, 0.5), "other": runs(*other)})
        for other in ((0.6, 0.7, 0.5), (0.8, 0.9, 1.0))
    )
    assert "outside" not in same
    (line,) = [line for line in different.splitlines() if "outside" in line]
    assert line.split() == [
        "seen,",
        "free",
        "0.400",
        "±",
        "0.248",
        "0.900",
        "±",
        "0.248",
        "+0.500",
        "±",
        "0.351",
        "outside",
    ]

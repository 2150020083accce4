"""Judgements on a run: effects are stated only if their interval excludes 0."""

from __future__ import annotations

import math

from crl.evaluation.judgement import judgements
from crl.evaluation.report import Estimate

LOW, HIGH = Estimate(0.3, 0.25, 0.35), Estimate(0.6, 0.56, 0.64)


def test_effects_of_one_task():
    """MOVER: 0.3 − √(0.04² + 0.05²) = 0.236 and 0.3 + √(0.04² + 0.05²) = 0.364."""
    before = {("room", "seen", "free"): LOW, ("room", "unseen", "free"): LOW}
    after = {
        ("room", "seen", "free"): HIGH,
        ("room", "unseen", "free"): LOW,
        ("room", "seen", "guided"): LOW,
    }
    assert judgements(before, after, [(0.2, 0.1)], trained=True) == [
        "Without experience, training raised success in seen places "
        "(+0.300 [+0.236, +0.364]); no effect of training on success is shown in unseen places "
        "(+0.000 [-0.071, +0.071]).",
        "The bank lowered success in seen places (-0.300 [-0.364, -0.236]); "
        "a bank built online raised success in unseen places (+0.200 [+0.100, +0.300]).",
    ]


def test_overall_rates_of_several_tasks():
    before = {("room", "seen", "free"): HIGH, ("overall", "seen", "free"): LOW}
    after = {("room", "seen", "free"): LOW, ("overall", "seen", "free"): HIGH}
    (sentence,) = judgements(before, after, [], trained=True)
    assert sentence.startswith("Without experience, training raised success in seen places")


def test_equal_effects_are_in_one_clause():
    rates = {("room", split, "free"): LOW for split in ("seen", "unseen")}
    (sentence,) = judgements(rates, rates, [], trained=True)
    assert sentence == (
        "Without experience, no effect of training on success is shown in seen places "
        "(+0.000 [-0.071, +0.071]) or in unseen places (+0.000 [-0.071, +0.071])."
    )


def test_mean_gain_of_several_tasks():
    """(0.2 + 0.4) / 2 ± √(0.1² + 0.1²) / 2."""
    assert judgements({}, {}, [(0.2, 0.1), (0.4, 0.1)], trained=True) == [
        "A bank built online raised success in unseen places (+0.300 [+0.229, +0.371])."
    ]


def test_the_interval_of_a_gain_has_possible_values():
    """The half width of two places, by Student's t, can be large."""
    assert judgements({}, {}, [(0.083, 5.295)], trained=True) == [
        "No effect of a bank built online on success is shown in unseen places "
        "(+0.083 [-1.000, +1.000])."
    ]


def test_nothing_is_said_without_rates():
    several = {("room", "seen", "free"): LOW, ("maze", "seen", "free"): LOW}
    assert judgements(several, several, [], trained=True) == []


def test_nothing_is_said_where_an_interval_is_unknown():
    unknown = Estimate(0.5, math.nan, math.nan)
    rates = {("room", "seen", "free"): LOW, ("room", "seen", "guided"): unknown}
    assert judgements(rates, {("room", "seen", "free"): unknown}, [], trained=True) == []
    assert judgements(rates, rates, [(0.5, 0.0), (0.5, 0.0)], trained=False) == []
    assert judgements({}, {}, [(0.5, 0.1), (0.5, math.nan)], trained=True) == []


def test_nothing_is_said_about_training_without_it():
    rates = {("room", "seen", "free"): LOW}
    assert judgements(rates, {("room", "seen", "free"): HIGH}, [], trained=False) == []

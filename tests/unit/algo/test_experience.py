"""Eq. 6, 7, 8 and B.2 compared with numbers worked by hand, and the exports of `crl.algo`."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import crl.algo
from crl.algo import (
    critic_reward,
    diversity_score,
    experience_reward,
    perplexity_bonus,
    training_weight,
)
from crl.types import PerplexityNormaliser


@pytest.mark.parametrize(
    ("rank", "count", "recent", "count_penalty", "expected"),
    [
        (0, 0, False, 0.4, 0.0),  # nothing is subtracted
        (-2, 0, True, 0.4, -3.0),  # −2 − 0 − 1
        (-1, 3, False, 0.4, -1.5545177),  # −1 − 0.4 · ln 4 = −1 − 0.4 · 1.3862944
        (0, 9, True, 0.5, -2.1512925),  # 0 − 0.5 · ln 10 − 1 = −0.5 · 2.3025851 − 1
        (-4, 1000, False, 0.0, -4.0),  # λ = 0: the count does not matter
    ],
)
def test_diversity_score(rank, count, recent, count_penalty, expected):
    assert diversity_score(rank, count, recent, count_penalty=count_penalty) == pytest.approx(
        expected
    )


def test_a_high_count_costs_one_rank_place_but_not_two():
    # 20 uses: −0.4 · ln 21 = −1.2178, between rank 1 (−1) and rank 2 (−2)
    assert (
        diversity_score(-2, 0, False, count_penalty=0.4)
        < diversity_score(0, 20, False, count_penalty=0.4)
        < diversity_score(-1, 0, False, count_penalty=0.4)
    )


@pytest.mark.parametrize(
    ("step", "last", "count", "cooldown", "alpha", "expected"),
    [
        (10, 8, 3, 5, 0.5, 0.0),  # 10 − 8 = 2 < 5: cooling down
        (10, 5, 3, 5, 0.5, 0.5),  # 5 < 5 is false: 4^−0.5
        (10, 6, 3, 5, 0.5, 0.0),  # 4 < 5
        (10, 10, 0, 0, 0.5, 1.0),  # no cooldown window, never counted: 1^−α
        (0, None, 0, 100, 1.0, 1.0),  # never trained: no cooldown
        (7, None, 1, 100, 2.0, 0.25),  # 2^−2
        (7, 0, 9, 5, 0.0, 1.0),  # α = 0: the count does not matter
    ],
)
def test_training_weight(step, last, count, cooldown, alpha, expected):
    assert training_weight(step, last, count, cooldown=cooldown, alpha=alpha) == pytest.approx(
        expected
    )


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(0, 4))
def test_training_weight_falls_with_the_count(count, alpha):
    first, second = (
        training_weight(0, None, c, cooldown=1, alpha=alpha) for c in (count, count + 1)
    )
    assert 0 < second <= first <= 1


@pytest.mark.parametrize(
    ("score", "reward", "expected"),
    [(1.0, 1, 2.0), (1.0, -1, 0.0), (0.5, 1, 1.5), (0.5, -1, -0.5), (0.0, 0, 0.0)],
)
def test_critic_reward(score, reward, expected):
    assert critic_reward(score, reward) == expected


@pytest.mark.parametrize(
    ("verdict", "won", "lost"),
    [(None, 1.0, -1.0), ("accept", 2.0, 0.0), ("refine", 1.5, -0.5), ("reject", 0.0, 0.0)],
)
def test_experience_reward(verdict, won, lost):
    assert (experience_reward(verdict, True), experience_reward(verdict, False)) == (won, lost)


def bonus(
    entropy: float, guided: float, normaliser: PerplexityNormaliser, weight: float = 0.4
) -> float:
    return perplexity_bonus(
        entropy, guided, normaliser, weight=weight, clip_low=0.3, clip_high=1.0, temperature=0.25
    )


@pytest.mark.parametrize(
    ("normaliser", "entropy", "guided", "expected"),
    [
        ("relative", 2.0, 1.5, 0.1),  # 0.4 · 0.5 / 2
        ("relative", 20.0, 15.0, 0.1),  # the scale does not matter
        ("relative", 2.0, 2.5, -0.1),
        ("relative", 2.0, 4.0, -0.3),  # 0.4 · −1, clipped
        ("relative", 0.0, 0.0, 0.0),  # nothing to reduce
        ("relative", 0.0, 1.0, -0.3),
        ("tanh", 2.0, 1.5, 0.18484686),  # tanh 0.5 = 0.46211716
        ("tanh", 1.5, 2.0, -0.18484686),
        ("tanh", 99.0, 1.0, 0.4),  # at most w
        ("sigmoid", 2.0, 1.5, 0.30463766),  # σ(0.5 / 0.25) = 0.88079708, 2 · 0.88079708 − 1
        ("sigmoid", 1.5, 2.0, -0.30463766),
        ("sigmoid", 1.0, 999.0, -0.4),  # at least −w
        ("asymmetric", 2.0, 1.5, 0.2),  # 0.4 · 0.5
        ("asymmetric", 4.0, 1.0, 1.0),  # 1.2, clipped at 1
        ("asymmetric", 2.0, 2.5, -0.2),
        ("asymmetric", 2.0, 3.0, -0.3),  # −0.4, clipped at −0.3
        ("log", 2.0, 1.5, 0.16218604),  # ln 1.5 = 0.40546511
        ("log", 2.0, 4.0, -0.43944492),  # −ln 3 = −1.09861229
        ("log", 2.0, 2.0, 0.0),
    ],
)
def test_perplexity_bonus(normaliser, entropy, guided, expected):
    assert bonus(entropy, guided, normaliser) == pytest.approx(expected)


@settings(deadline=None)
@given(
    st.sampled_from(get_args(PerplexityNormaliser)), st.floats(0, 20), st.floats(0, 20),
    st.floats(0, 20),
)  # fmt: skip
def test_perplexity_bonus_rises_as_the_entropy_falls(normaliser, entropy, one, other):
    low, high = sorted((one, other))
    assert bonus(entropy, high, normaliser) <= bonus(entropy, low, normaliser)
    assert bonus(entropy, entropy, normaliser) == 0
    assert math.isfinite(bonus(entropy, high, normaliser))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: diversity_score(0, -1, False, count_penalty=0.4),
            "count must not be negative, not -1",
        ),
        (
            lambda: diversity_score(0, 1, False, count_penalty=-0.1),
            "count_penalty must not be negative",
        ),
        (
            lambda: diversity_score(0, 1, False, count_penalty=math.nan),
            "count_penalty must not be negative",
        ),
        (lambda: training_weight(1, 0, -1, cooldown=1, alpha=1.0), "count must not be negative"),
        (lambda: training_weight(1, 0, 1, cooldown=-1, alpha=1.0), "cooldown must not be negative"),
        (lambda: training_weight(1, 0, 1, cooldown=1, alpha=-1.0), "alpha must not be negative"),
        (lambda: critic_reward(2.0, 1), "score must be 1"),
        (lambda: bonus(-1.0, 1.0, "tanh"), "entropy must not be negative"),
        (lambda: bonus(1.0, -1.0, "tanh"), "guided_entropy must not be negative"),
        (lambda: bonus(1.0, 1.0, "square"), "normaliser must be one of"),  # pyright: ignore
    ],
)
def test_invalid_input_raises_an_error_with_its_name(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_every_exported_name_is_the_function_of_that_name():
    for name in crl.algo.__all__:
        assert getattr(crl.algo, name).__name__ == name
        assert name in dir(crl.algo)
    with pytest.raises(AttributeError, match="no attribute 'reinforce'"):
        crl.algo.reinforce  # noqa: B018  # pyright: ignore

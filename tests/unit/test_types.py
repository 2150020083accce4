"""Validation in the constructors of `crl.types`, and the arithmetic of token traces and lifts."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from functools import reduce
from operator import add
from statistics import fmean, variance
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import erf

from crl.types import (
    COMMANDS,
    SPLIT_DRAW_NAMES,
    Completion,
    EpisodeAddress,
    Experience,
    ExperienceUse,
    Guidance,
    Lift,
    Outcome,
    Provenance,
    RolloutPlan,
    Sampling,
    Segment,
    Split,
    StepStats,
    Task,
    TokenTrace,
    TrainSample,
    Trajectory,
    kept_counts,
    lift_order,
    split_kept,
    states,
)
from support.kept_sets import kept_set

TASK = Task("room", seed=1, split="train", goal="leave")
USE = ExperienceUse("e1", version=1, generation="g1", how="start")
EXPERIENCE = Experience("e1", 1, "look first", "room", "leave", Provenance("g1", (3, 9)))
ADDRESS = EpisodeAddress(step=0, group=0, member=0)
TRACE = TokenTrace(ids=(5, 6, 7), mask=(0, 1, 1), logprobs=(0.0, -0.5, -1.5), versions=(-1, 2, 2))


@pytest.mark.parametrize(
    ("record", "change", "message"),
    [
        (TASK, {"split": "test"}, "split must be one of"),
        (TASK, {"name": ""}, "name must not be empty"),
        (Segment("user", "hello", "env"), {"role": "human"}, "role must be one of"),
        (Segment("user", "hello", "env"), {"origin": "model"}, "origin must be one of"),
        (Lift(2, 0.5, 0.1), {"groups": 0}, "a lift needs at least one group"),
        (Lift(2, 0.5, 0.1), {"mean": 1.5}, "a lift needs at least one group"),
        (Lift(2, 0.5, 0.1), {"mean": float("nan")}, "a lift needs at least one group"),
        (Lift(2, 0.5, 0.1), {"m2": -0.1}, "a lift needs at least one group"),
        (Sampling(8, (2,)), {"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        (
            Sampling(8, (2,)),
            {"temperature": -0.1},
            "temperature must be finite and not negative, not -0.1",
        ),
        (Sampling(8, (2,)), {"temperature": float("nan")}, "not nan"),
        (Sampling(8, (2,)), {"temperature": float("inf")}, "not inf"),
        (Completion((5,), (-1.0,), (0,), "stop"), {"finish": "eos"}, "finish must be one of"),
        (Completion((5,), (-1.0,), (0,), "stop"), {"logprobs": ()}, r"'logprobs': 0"),
        (Completion((5,), (-1.0,), (0,), "stop"), {"versions": (0, 0)}, r"'versions': 2"),
        (TRACE, {"mask": (0, 1)}, r"columns differ in length: .*'mask': 2"),
        (TRACE, {"logprobs": (0.0, -0.5)}, r"'logprobs': 2"),
        (TRACE, {"versions": ()}, r"'versions': 0"),
        (TRACE, {"ids": (5, 6, 7, 8)}, r"'ids': 4"),
        (TRACE, {"mask": (0, 1, 2)}, "only 0 and 1"),
        (TRACE, {"mask": (0, -1, 1)}, "only 0 and 1"),
        (EXPERIENCE, {"status": "gone"}, "status must be one of"),
        (EXPERIENCE, {"version": 0}, "invalid version or span: 0"),
        (
            EXPERIENCE,
            {"provenance": Provenance("g1", (9, 3))},
            r"invalid version or span: 1, \(9, 3\)",
        ),
        (USE, {"how": "guess"}, "how must be one of"),
        (RolloutPlan("free"), {"condition": "both"}, "condition must be one of"),
        (TRACE, {"kept": (b"",)}, r"'kept': 1"),
        (Sampling(1, ()), {"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        (Sampling(1, ()), {"top_k": -1}, "top_k must not be negative"),
        (TrainSample(TRACE, 1.0, 0.5), {"advantage": (1.0, 2.0)}, "one value per token"),
        (Outcome(), {"rewards": {"outcome": float("nan")}}, "reward must be finite"),
        (Outcome(), {"rewards": {"outcome": float("-inf")}}, "reward must be finite"),
        (Guidance(), {"used": (USE,)}, r"columns differ in length: .*'shown': 0"),
        (Trajectory(TASK, ADDRESS, "guided"), {"condition": "half"}, "condition must be one of"),
        (
            Trajectory(TASK, ADDRESS, "free"),
            {"guidance": Guidance((USE,), ("look first",))},
            "must contain neither an experience",
        ),
        (
            Trajectory(TASK, ADDRESS, "free"),
            {"segments": (Segment("user", "x", "experience"),)},
            "must contain neither an experience",
        ),
    ],
)
def test_an_invalid_record_raises_an_error(
    record: Any, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(record, **change)


def test_the_draw_names_of_splits_do_not_change() -> None:
    assert SPLIT_DRAW_NAMES == {"train": "train", "seen": "known", "unseen": "new"}
    assert SPLIT_DRAW_NAMES.keys() == set(get_args(Split)), "every split has a name"


def test_a_guided_trajectory_may_contain_an_experience() -> None:
    seen = Trajectory(
        TASK,
        ADDRESS,
        "guided",
        segments=(Segment("user", "x", "experience"),),
        guidance=Guidance((USE,), ("x",)),
    )
    assert seen.used == (USE,)


def test_records_are_frozen_and_copy_mappings() -> None:
    params, rewards, metrics = {"lgen": 3}, {"outcome": 1.0}, {"loss": 0.5}
    task = replace(TASK, params=params)
    trajectory = Trajectory(task, ADDRESS, "free", outcome=Outcome(rewards))
    stats = StepStats(1, 0, metrics)
    for mine in (params, rewards, metrics):
        mine.clear()
    assert task.params == {"lgen": 3}
    assert trajectory.rewards == {"outcome": 1.0}
    assert stats.metrics == {"loss": 0.5}
    with pytest.raises(FrozenInstanceError):
        task.seed = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_a_trajectorys_reward_is_the_sum_of_its_channels() -> None:
    shaped = Trajectory(TASK, ADDRESS, "free", outcome=Outcome({"outcome": 9.0})).with_rewards(
        {"outcome": 1.0, "format": -0.25}
    )
    assert shaped.reward == 0.75
    assert shaped.rewards == {"outcome": 1.0, "format": -0.25}
    with pytest.raises(ValueError, match="reward must be finite"):
        shaped.with_rewards({"outcome": float("inf")})


def test_traces_are_append_only() -> None:
    start = TokenTrace().with_context((5, 6))
    once = start.with_sampled(Completion((7, 8), (-0.5, -1.5), (3, 4), "length"))
    twice = once.with_context((9,)).with_sampled(Completion((2,), (-0.25,), (4,), "stop"))
    assert start == TokenTrace((5, 6), (0, 0), (0.0, 0.0), (-1, -1))
    assert once == TokenTrace((5, 6, 7, 8), (0, 0, 1, 1), (0.0, 0.0, -0.5, -1.5), (-1, -1, 3, 4))
    assert twice == TokenTrace(
        ids=(5, 6, 7, 8, 9, 2),
        mask=(0, 0, 1, 1, 0, 1),
        logprobs=(0.0, 0.0, -0.5, -1.5, 0.0, -0.25),
        versions=(-1, -1, 3, 4, -1, 4),
    )
    assert once.with_context(()) == once


def test_kept_sets_stay_with_their_tokens() -> None:
    first, second = kept_set(7, 3), kept_set(8)
    answer = Completion((7, 8), (-0.5, 0.0), (3, 3), "length", (first, second))
    trace = TokenTrace().with_context((5,)).with_sampled(answer).with_context((9,))
    assert trace.kept == (b"", first, second, b"")
    assert trace.until_last_sampled().kept == (b"", first, second)
    assert kept_counts(trace.kept) == [0, 2, 1, 0]
    assert split_kept(b"".join(trace.kept), [0, 2, 1, 0]) == trace.kept
    whole = trace.with_sampled(Completion((2,), (-0.25,), (4,), "stop"))
    assert whole.kept == (*trace.kept, b"")


def test_which_sampling_is_truncated() -> None:
    assert not Sampling(1, ()).truncated
    assert Sampling(1, (), top_p=0.9).truncated
    assert Sampling(1, (), top_k=1).truncated
    assert not Sampling(1, (), 0.0, 0.9, 1).truncated


def test_a_per_token_advantage_of_the_right_length_is_accepted() -> None:
    assert TrainSample(TRACE, (0.0, 1.0, -1.0), 0.5).advantage == (0.0, 1.0, -1.0)


# ── lift ──────────────────────────────────────────────────────────────────────────────────────────


def test_lift_by_hand() -> None:
    """Use the values {1/2, −1/4, 1/2} with the mean 1/4 and m2 = 1/16 + 1/4 + 1/16 = 3/8.

    half = t_975(3) · √(1 + 3/8) / 3 = 3.182446 · 1.172604 / 3 = 1.243916.
    The lower end of the interval is −0.993916.
    """
    lift = Lift(1, 0.5) + Lift(1, -0.25) + Lift(1, 0.5)
    assert (lift.groups, lift.mean, lift.m2) == (3, 0.25, 0.375)
    assert lift.half_width == pytest.approx(1.243916, abs=1e-6)
    assert lift.low == pytest.approx(-0.993916, abs=1e-6)


def test_the_lift_of_one_group_has_a_wide_interval() -> None:
    """Compare with half = t_975(1) · √1 / 1 = 12.706205."""
    assert Lift(1, 0.75).half_width == pytest.approx(12.706205, abs=1e-6)
    assert Lift(1, 0.75).low == -1.0, "−1 is the lowest possible lift"


@pytest.mark.parametrize(
    "lift", [Lift(1, 0.75), Lift(2, 1.0), Lift(3, 0.25, 0.375), Lift(8, 0.0, 8.0)]
)
def test_the_posterior_of_the_mean_has_95_percent_of_its_mass_in_the_interval(lift: Lift) -> None:
    """Integrate over the variance v of a difference.

    The integrand is the prior v^(−3/2) · e^(−1 / 2v) times the likelihood. The likelihood
    integrated over the mean is v^(−n/2) · e^(−m2 / 2v) · √v. The grid is logarithmic, so
    dv = v · d log v. Given v, the mean is normal with variance v / n.
    """
    v = np.geomspace(1e-4, 1e14, 100_001)
    mass = (
        v**-1.5
        * np.exp(-1 / (2 * v))
        * v ** (-lift.groups / 2)
        * np.exp(-lift.m2 / (2 * v))
        * np.sqrt(v)
        * v
    )
    inside = erf(lift.half_width * np.sqrt(lift.groups / (2 * v)))
    assert (mass * inside).sum() / mass.sum() == pytest.approx(0.95, abs=1e-5)


differences = st.lists(st.integers(-8, 8).map(lambda n: n / 8), min_size=2, max_size=30)


@given(differences, st.integers(1, 29))
def test_the_sum_of_lifts_does_not_depend_on_the_order(values: list[float], cut: int) -> None:
    one, *more = [
        reduce(add, [Lift(1, value) for value in part])
        for part in (values[:cut], values[cut:])
        if part
    ]
    lift = reduce(add, more, one)
    assert (lift.groups, lift.mean) == (len(values), pytest.approx(fmean(values), abs=1e-9))
    assert lift.m2 == pytest.approx(variance(values) * (len(values) - 1), abs=1e-9)
    assert (-lift).mean == pytest.approx(-fmean(values))


def test_the_sign_of_a_lift_is_nonzero_if_its_interval_excludes_zero() -> None:
    one, many = Lift(1, 0.25), Lift(40, 0.25)
    assert (one.sign, (-one).sign, many.sign, (-many).sign, Lift(40, 0.0).sign) == (0, 0, 1, -1, 0)


def test_the_order_of_lifts() -> None:
    """Compute the half widths t_975(n) · √(1 + m2) / n. No lower end is below −1.

    Lift(9, 0.25, 0.005): half = 2.262157 · √1.005 / 9 = 0.252, lower end −0.002.
    Lift(9, 0.25, 1.1): half = 2.262157 · √2.1 / 9 = 0.364, lower end −0.114.
    Lift(5, 0.0): half = 2.570582 / 5 = 0.514, lower end −0.514.
    Lift(1, 1.0): half = 12.706, lower end −1.
    Lift(2, 0.75, 0.1): half = 4.302653 · √1.1 / 2 = 2.256, lower end −1.
    """
    best = [
        Lift(9, 0.25, 0.005),
        Lift(9, 0.25, 1.1),
        Lift(5, 0.0),
        Lift(1, 1.0),
        Lift(2, 0.75, 0.1),
        None,
    ]
    assert sorted(reversed(best), key=lift_order) == best


def test_few_equal_groups_rank_below_many_similar_ones() -> None:
    """Compare the values {1, 1} with half = 4.302653 / 2 = 2.151326 and the lower end −1.

    20 values 1/2 and 20 values 7/10 have the mean 0.6, m2 = 40 · 0.1² = 0.4 and
    half = 2.021075 · √1.4 / 40 = 0.059784.
    """
    lucky = Lift(1, 1.0) + Lift(1, 1.0)
    proven = reduce(add, [Lift(1, value) for value in (0.5, 0.7) * 20])
    assert (lucky.half_width, lucky.low) == (pytest.approx(2.151326, abs=1e-6), -1.0)
    assert (proven.half_width, proven.low) == (
        pytest.approx(0.059784, abs=1e-6),
        pytest.approx(0.540216, abs=1e-6),
    )
    assert sorted([None, lucky, proven], key=lift_order) == [proven, lucky, None]


# ── states ────────────────────────────────────────────────────────────────────────────────────────


def test_states_lie_between_the_actions_and_end_before_the_commands():
    conversation = [
        Segment("system", "Play.", "task"),
        Segment("user", "A room.\nCommands: none?" + COMMANDS + "go, wait", "env"),
        Segment("assistant", "ask", "tool_call"),
        Segment("user", "Go.", "tool_result"),
        Segment("assistant", "go", "policy"),
        Segment("user", "A hall.", "env"),
        Segment("user", "It is dark." + COMMANDS + "wait", "env"),
        Segment("assistant", "wait", "policy"),
    ]
    assert states(conversation) == ["A room.\nCommands: none?", "A hall.\nIt is dark.", ""]
    assert states([]) == [""]


# ── traces of many tokens ─────────────────────────────────────────────────────────────────────────


def test_a_trace_survives_pickling_exactly():
    trace = TokenTrace((1, 2**40), (0, 1), (0.0, -1 / 3), (-1, 7))
    truncated = replace(trace, kept=(b"", kept_set(5, 2**31 - 1)))
    assert pickle.loads(pickle.dumps(truncated)) == truncated != trace
    assert pickle.loads(pickle.dumps(trace)) == trace
    assert pickle.loads(pickle.dumps(TokenTrace())) == TokenTrace()


@pytest.mark.parametrize(
    ("mask", "kept"), [((), 0), ((0, 0), 0), ((1,), 1), ((0, 1, 0), 2), ((1, 0, 1, 0, 0), 3)]
)
def test_a_trace_until_its_last_sampled_token(mask: tuple[int, ...], kept: int):
    n = len(mask)
    trace = TokenTrace(tuple(range(n)), mask, (-0.5,) * n, (3,) * n)
    assert trace.until_last_sampled().ids == trace.ids[:kept]
    assert trace.until_last_sampled().mask == mask[:kept]

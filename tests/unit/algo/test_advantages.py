"""Advantages, returns and sequence weights, compared with numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crl.algo import (
    discounted_returns,
    group_advantages,
    sequence_weights,
    split_group_advantages,
    step_advantages,
)

ROOT_HALF = math.sqrt(0.5)

# ── group advantages ──────────────────────────────────────────────────────────────────────────────


def test_group_advantage_is_the_deviation_over_the_sample_std():
    # mean 0.5; deviations ±0.5; sample variance 4 · 0.25 / 3 = 1/3; std 0.5774
    # 0.5 / 0.5774 = √3 / 2
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.zeros(4), eps=0.0)
    assert advantages.tolist() == pytest.approx([0.8660254, -0.8660254, -0.8660254, 0.8660254])


def test_eps_is_added_to_the_std():
    # mean 2, deviations ±1, sample std √2; 1 / (1.4142136 + 0.5) = 0.5224078
    assert group_advantages(
        torch.tensor([1.0, 3.0]), torch.tensor([5, 5]), eps=0.5
    ).tolist() == pytest.approx([-0.5224078, 0.5224078])


def test_interleaved_groups_are_normalised_separately():
    # group 7: 3, 5 → mean 4, std √2 → ∓1/√2; group 2: −20, 20 → mean 0, std 20√2 → ∓1/√2
    advantages = group_advantages(
        torch.tensor([3.0, -20.0, 5.0, 20.0]), torch.tensor([7, 2, 7, 2]), eps=0.0
    )
    assert advantages.tolist() == pytest.approx([-ROOT_HALF, -ROOT_HALF, ROOT_HALF, ROOT_HALF])


def test_scale_none_leaves_the_deviation():
    # group 0: 6, 0 → mean 3; group 1: 1, 0, 2 → mean 1
    advantages = group_advantages(
        torch.tensor([6.0, 1.0, 0.0, 0.0, 2.0]), torch.tensor([0, 1, 0, 1, 1]), scale="none"
    )
    assert advantages.tolist() == [3.0, 0.0, -3.0, -1.0, 1.0]


@pytest.mark.parametrize("scale", ["std", "none"])
def test_a_group_of_one_gets_zero(scale):
    assert group_advantages(
        torch.tensor([1.0, 4.0, -2.0]), torch.tensor([0, 1, 2]), scale=scale
    ).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -0.7, 1e6 + 0.1])
def test_a_constant_group_gets_exactly_zero_although_its_mean_is_rounded(scale, value):
    rewards = torch.tensor([value] * 7 + [1.0, 0.0], dtype=torch.float64)
    advantages = group_advantages(rewards, [0] * 7 + [1, 1], scale=scale, eps=0.0)
    assert advantages[:7].tolist() == [0.0] * 7
    assert advantages[7] > 0 > advantages[8]


def test_large_rewards_lose_no_precision():
    # The sum 30000001 is not a float32. After rounding, the mean would be 10000000 and the
    # deviations 0, 0, 1.
    advantages = group_advantages(torch.tensor([1e7, 1e7, 1e7 + 1]), [0, 0, 0], scale="none")
    assert advantages.tolist() == pytest.approx([-1 / 3, -1 / 3, 2 / 3])


def test_lists_integers_and_doubles_are_accepted_and_the_float_type_is_preserved():
    assert group_advantages([2, 4], ["a", "a"], scale="none").tolist() == [-1.0, 1.0]
    assert group_advantages([2, 4], ["a", "a"]).dtype == torch.float32
    assert (
        group_advantages(torch.tensor([2.0, 4.0], dtype=torch.float64), [0, 0]).dtype
        == torch.float64
    )
    assert group_advantages([], []).shape == (0,)


# ── split groups, batches, steps ──────────────────────────────────────────────────────────────────


def test_group_halves_are_normalised_separately():
    # group 0 guided: 1, 0 → mean 0.5, std 1/√2 → ±1/√2
    # group 0 free: 40, 20 → mean 30, std 10√2 → ±1/√2
    # group 1 guided: one member → 0
    # group 1 free: 1, 3 → mean 2 → ∓1/√2
    rewards = torch.tensor([1.0, 0.0, 40.0, 20.0, 9.0, 1.0, 3.0])
    guided = torch.tensor([True, True, False, False, True, False, False])
    advantages = split_group_advantages(
        rewards, torch.tensor([0, 0, 0, 0, 1, 1, 1]), guided, eps=0.0
    )
    assert advantages.tolist() == pytest.approx(
        [ROOT_HALF, -ROOT_HALF, ROOT_HALF, -ROOT_HALF, 0.0, -ROOT_HALF, ROOT_HALF]
    )


def test_split_group_advantages_accept_scale_and_eps():
    # guided 1, 3: deviations ∓1; free 0, 4: deviations ∓2
    rewards, groups, guided = [1.0, 0.0, 3.0, 4.0], [0] * 4, [True, False, True, False]
    assert split_group_advantages(rewards, groups, guided, scale="none").tolist() == [
        -1.0,
        -2.0,
        1.0,
        2.0,
    ]
    # std √2 and 2√2; 1 / (√2 + 1) = 0.4142136 and 2 / (2√2 + 1) = 0.5224078
    scaled = split_group_advantages(rewards, groups, guided, eps=1.0)
    assert scaled.tolist() == pytest.approx([-0.4142136, -0.5224078, 0.4142136, 0.5224078])


def test_steps_compare_within_group_and_anchor_only():
    # (0, hall): 1, 3 → mean 2.   (0, attic): alone → 0.   (1, hall): 10, 40, 10 → mean 20
    returns = torch.tensor([1.0, 3.0, 7.0, 10.0, 40.0, 10.0])
    anchors = ["hall", "hall", "attic", "hall", "hall", "hall"]
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    assert step_advantages(returns, groups, anchors, scale="none").tolist() == [
        -1.0,
        1.0,
        0.0,
        -10.0,
        20.0,
        -10.0,
    ]
    # std of (1, 3) = √2
    # std of (10, 40, 10) = √((100 + 400 + 100) / 2) = √300 = 17.320508; 10/17.32 = 1/√3
    scaled = step_advantages(returns, groups, anchors, scale="std", eps=0.0)
    assert scaled.tolist() == pytest.approx(
        [-ROOT_HALF, ROOT_HALF, 0.0, -0.5773503, 1.1547005, -0.5773503]
    )


def test_anchors_may_be_any_hashable():
    assert step_advantages(
        [1.0, 3.0, 5.0], [0, 0, 0], [(1, "a"), (1, "a"), None], scale="none"
    ).tolist() == [-1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("rewards", "gamma", "expected"),
    [
        # R2 = 2; R1 = 0 + 0.5 · 2 = 1; R0 = 1 + 0.5 · 1 = 1.5
        ([1.0, 0.0, 2.0], 0.5, [1.5, 1.0, 2.0]),
        ([1.0, 0.0, 2.0], 1.0, [3.0, 2.0, 2.0]),
        ([1.0, 0.0, 2.0], 0.0, [1.0, 0.0, 2.0]),
        ([-1.0], 0.9, [-1.0]),
        ([], 0.9, []),
    ],
)
def test_discounted_returns(rewards, gamma, expected):
    assert discounted_returns(torch.tensor(rewards), gamma).tolist() == expected


# ── sequence weights ──────────────────────────────────────────────────────────────────────────────


def test_two_full_conditions_share_a_group_equally():
    assert sequence_weights([0] * 4, [True, True, False, False]).tolist() == pytest.approx(
        [0.25] * 4
    )


def test_conditions_have_equal_weight_for_any_number_of_members():
    # the three guided members share ½: 1/6 each; the free member has ½
    assert sequence_weights([0] * 4, [True, True, True, False]).tolist() == pytest.approx(
        [1 / 6, 1 / 6, 1 / 6, 1 / 2]
    )


def test_a_group_with_one_condition_has_the_same_weight_as_others():
    # group 0: ½ over two conditions of one member, ¼ each
    # group 1: ½ over three free members, 1/6 each
    weights = sequence_weights(
        torch.tensor([0, 1, 0, 1, 1]), torch.tensor([True, False, False, False, False])
    )
    assert weights.tolist() == pytest.approx([1 / 4, 1 / 6, 1 / 4, 1 / 6, 1 / 6])


def test_samples_of_a_trajectory_share_its_weight_by_tokens():
    # Trajectories A (samples of 10 and 30 tokens) and B (5 tokens) of one free group have ½ each.
    # A's samples have 10/40 and 30/40 of ½.
    weights = sequence_weights([0, 0, 0], [False] * 3, ["A", "A", "B"], [10, 30, 5])
    assert weights.tolist() == pytest.approx([1 / 8, 3 / 8, 1 / 2])


def test_samples_without_lengths_share_the_weight_equally():
    weights = sequence_weights([0, 0, 0], [False] * 3, ["A", "A", "B"])
    assert weights.tolist() == pytest.approx([1 / 4, 1 / 4, 1 / 2])


def test_samples_without_tokens_have_no_weight_unless_all_samples_have_none():
    # A: 0 and 6 tokens → the second sample has all of ½. B: 0 and 0 tokens → ¼ each, so that the
    # weights still sum to 1.
    weights = sequence_weights([0] * 4, [False] * 4, ["A", "A", "B", "B"], [0, 6, 0, 0])
    assert weights.tolist() == pytest.approx([0.0, 1 / 2, 1 / 4, 1 / 4])


def test_the_weight_of_a_trajectory_does_not_depend_on_its_length():
    assert sequence_weights([0, 0], [True, True], None, [1, 1000]).tolist() == pytest.approx(
        [0.5, 0.5]
    )


def test_trajectory_labels_may_repeat_in_other_groups_and_conditions():
    # member 0 of four different subgroups: ½ · ½ each
    assert sequence_weights(
        [0, 0, 1, 1], [True, False, True, False], [0, 0, 0, 0]
    ).tolist() == pytest.approx([0.25] * 4)


def test_empty_input_has_empty_weights():
    assert sequence_weights([], []).shape == (0,)


# ── errors ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: group_advantages(torch.zeros(2, 1), [0, 0]), "rewards must be one-dimensional"),
        (
            lambda: group_advantages([1.0, 2.0], [0]),
            "groups must have one entry per sample: 2, not 1",
        ),
        (lambda: group_advantages([1.0, 2.0], torch.zeros(2, 1)), "groups must be one-dimensional"),
        (
            lambda: group_advantages([1.0, 2.0], [0, 0], scale="max"),  # pyright: ignore
            "scale must be 'std' or 'none', not 'max'",
        ),
        (lambda: group_advantages([1.0, 2.0], [0, 0], eps=-1e-6), "eps must not be negative"),
        (lambda: group_advantages([1.0, math.nan], [0, 0]), "rewards must be finite"),
        (lambda: group_advantages([math.inf], [0]), "rewards must be finite"),
        (lambda: split_group_advantages([1.0, 2.0], [0, 0], [True]), "guided must have one entry"),
        (lambda: step_advantages([1.0], [0], ["a", "b"]), "anchors must have one entry"),
        (lambda: discounted_returns([1.0], 1.5), "gamma must be in"),
        (lambda: sequence_weights([0, 0], [True]), "guided must have one entry"),
        (lambda: sequence_weights([0, 0], [True, True], [1]), "trajectories must have one entry"),
        (lambda: sequence_weights([0, 0], [True, True], None, [1]), "lengths must be"),
        (
            lambda: sequence_weights([0, 0], [True, True], None, [1, -1]),
            "lengths must not be negative",
        ),
    ],
)
def test_invalid_input_raises_an_error_with_its_name(call, text):
    with pytest.raises(ValueError, match=text):
        call()


# ── properties ────────────────────────────────────────────────────────────────────────────────────

REWARDS = st.one_of(
    st.sampled_from([-1.0, 0.0, 0.1, 1.0]), st.floats(-100, 100).map(lambda x: round(x, 3))
)
ROWS = st.lists(st.tuples(REWARDS, st.integers(0, 3), st.booleans()), min_size=1, max_size=24)
SAMPLES = st.lists(
    st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 2), st.integers(0, 50)),
    min_size=1,
    max_size=24,
)


def doubles(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@settings(deadline=None)
@given(ROWS, st.sampled_from(["std", "none"]))
def test_advantages_sum_to_zero_in_every_subgroup(rows, scale):
    rewards, groups, guided = zip(*rows, strict=True)
    advantages = split_group_advantages(doubles(rewards), groups, guided, scale=scale)
    for subgroup in set(zip(groups, guided, strict=True)):
        members = [i for i in range(len(rows)) if (groups[i], guided[i]) == subgroup]
        assert advantages[members].sum().item() == pytest.approx(0.0, abs=1e-9)


@settings(deadline=None)
@given(ROWS, st.randoms(use_true_random=False))
def test_advantages_follow_a_permutation(rows, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    rewards, groups, guided = zip(*rows, strict=True)
    shuffled = split_group_advantages(
        doubles(rewards)[order], [groups[i] for i in order], [guided[i] for i in order]
    )
    torch.testing.assert_close(
        shuffled, split_group_advantages(doubles(rewards), groups, guided)[order]
    )


@settings(deadline=None)
@given(ROWS, st.floats(0.5, 10), st.floats(-10, 10))
def test_normalised_advantages_ignore_the_scale_and_offset_of_rewards(rows, factor, offset):
    rewards, groups, _ = zip(*rows, strict=True)
    moved = group_advantages(doubles(rewards).mul(factor).add(offset), groups, eps=1e-3)
    # Only eps depends on the scale. The expected result has the same rewards and eps / factor.
    torch.testing.assert_close(
        moved, group_advantages(doubles(rewards), groups, eps=1e-3 / factor), atol=1e-6, rtol=1e-6
    )


@settings(deadline=None)
@given(SAMPLES)
def test_weights_sum_to_one_with_equal_shares_per_group_and_condition(rows):
    groups, guided, trajectories, lengths = zip(*rows, strict=True)
    weights = sequence_weights(groups, guided, trajectories, lengths)
    assert weights.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert (weights >= 0).all()
    for group in set(groups):
        conditions = {guided[i] for i in range(len(rows)) if groups[i] == group}
        for condition in conditions:
            members = [i for i in range(len(rows)) if (groups[i], guided[i]) == (group, condition)]
            assert weights[members].sum().item() == pytest.approx(
                1 / len(set(groups)) / len(conditions), abs=1e-5
            )


@settings(deadline=None)
@given(SAMPLES, st.randoms(use_true_random=False))
def test_weights_follow_a_permutation(rows, random):
    shuffled = list(enumerate(rows))
    random.shuffle(shuffled)
    order = [i for i, _ in shuffled]
    weights = sequence_weights(*zip(*rows, strict=True))
    torch.testing.assert_close(
        sequence_weights(*zip(*(row for _, row in shuffled), strict=True)), weights[order]
    )

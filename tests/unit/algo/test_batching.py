"""Micro-batches, minibatches, and sample weights computed before samples are dropped."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crl.algo import build_minibatches, micro_batches, optimizer_minibatches
from crl.algo.batching import Advantage
from crl.types import Condition, Minibatch, Origin, Segment, Task, TokenTrace, Trajectory
from support.trajectories import build_trajectory

# ── micro-batches ─────────────────────────────────────────────────────────────────────────────────


def test_samples_of_similar_length_share_a_micro_batch():
    # By length: 9 | 4, 3, 2 | 1.
    assert micro_batches([3, 9, 4, 1, 2], 9) == [[1], [2, 0, 4], [3]]


def test_a_sample_longer_than_the_budget_has_its_own_micro_batch():
    assert micro_batches([20, 2, 30, 2], 9) == [[2], [0], [1, 3]]


def test_equal_lengths_stay_in_order():
    assert micro_batches([5, 5, 5, 5, 5], 10) == [[0, 1], [2, 3], [4]]


def test_empty_input_gives_no_micro_batch():
    assert micro_batches([], 10) == []


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 200))
def test_every_index_appears_once_and_the_budget_is_kept(lengths, budget):
    batches = micro_batches(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    totals = [sum(lengths[i] for i in batch) for batch in batches]
    for batch, total in zip(batches, totals, strict=True):
        assert len(batch) == 1 or total <= budget
    assert micro_batches(lengths, budget) == batches
    # No two neighbours could have been merged.
    assert all(
        total + lengths[after[0]] > budget
        for total, after in zip(totals, batches[1:], strict=False)
    )


# ── optimizer minibatches ─────────────────────────────────────────────────────────────────────────


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 6), st.integers(0, 5))
def test_groups_are_not_divided_and_are_distributed_evenly(groups, count, seed):
    minibatches = optimizer_minibatches(groups, count, random.Random(seed))
    assert sorted(index for minibatch in minibatches for index in minibatch) == list(
        range(len(groups))
    )
    assert len(minibatches) == min(count, len(set(groups)))
    contents = [{groups[index] for index in minibatch} for minibatch in minibatches]
    assert sum(len(minibatch) for minibatch in contents) == len(set(groups))
    assert not contents or max(map(len, contents)) - min(map(len, contents)) <= 1
    assert all(minibatch for minibatch in contents)


def test_the_order_depends_only_on_the_generator():
    groups = [group for group in range(20) for _ in range(2)]
    first, again, other = (
        optimizer_minibatches(groups, 4, random.Random(seed)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert first[0] != list(range(10))


# ── minibatches ───────────────────────────────────────────────────────────────────────────────────


def trajectory(
    group: int, condition: Condition = "free", *answers: tuple[Origin, TokenTrace]
) -> Trajectory:
    return build_trajectory(
        Task("room", 0, "train", "find the stairs"),
        step=0,
        group=group,
        member=0,
        condition=condition,
        segments=tuple(Segment("assistant", "x", origin) for origin, _ in answers),
        traces=tuple(answer for _, answer in answers),
    )


def trace(trained: int, context: int = 1) -> TokenTrace:
    n = context + trained
    return TokenTrace(
        tuple(range(n)),
        (0,) * context + (1,) * trained,
        (0.0,) * n,
        (-1,) * context + (0,) * trained,
    )


def build(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[Advantage] | torch.Tensor,
    views: Sequence[Sequence[TokenTrace]],
    count: int = 1,
) -> tuple[Minibatch, ...]:
    values = advantages.tolist() if isinstance(advantages, torch.Tensor) else advantages
    return build_minibatches(trajectories, values, views, count=count, rng=random.Random(0))


def metrics(minibatch: Minibatch) -> list[tuple[float | tuple[float, ...], float]]:
    """Return (advantage, weight) of every sample."""
    return [(sample.advantage, sample.weight) for sample in minibatch.samples]


def test_weights_and_the_token_total_are_computed_before_dropping():
    # Each of the two groups has ½.
    # Group 0: the two guided members share ¼ and have 1/8 each. The free member has ¼.
    # Group 1: the free member has ½. Its samples of 6 and 2 tokens have 3/8 and 1/8.
    # The second guided member has no signal and is dropped. The weights of the other samples and
    # the total of 3 + 4 + 5 + 6 + 2 = 20 tokens do not change.
    (minibatch,) = build(
        [trajectory(0, "guided"), trajectory(0, "guided"), trajectory(0), trajectory(1)],
        [1.5, 0.0, -0.5, 2.0],
        [[trace(3)], [trace(4)], [trace(5)], [trace(6), trace(2)]],
    )
    assert metrics(minibatch) == [(1.5, 1 / 8), (-0.5, 1 / 4), (2.0, 3 / 8), (2.0, 1 / 8)]
    assert [sum(sample.trace.mask) for sample in minibatch.samples] == [3, 5, 6, 2]
    assert minibatch.total_tokens == 20


def test_a_sample_without_trained_tokens_is_dropped():
    (minibatch,) = build(
        [trajectory(0), trajectory(0)], [1.0, -1.0], [[trace(0), trace(4)], [trace(0)]]
    )
    assert metrics(minibatch) == [(1.0, 1 / 2)]
    assert minibatch.total_tokens == 4


def test_a_trajectory_without_samples_is_ignored():
    # The free member has no view, so the guided member has the whole ½ of its group.
    (minibatch,) = build(
        [trajectory(0, "guided"), trajectory(0), trajectory(1)],
        [1.0, 1.0, 1.0],
        [[trace(2)], [], [trace(3)]],
    )
    assert metrics(minibatch) == [(1.0, 1 / 2), (1.0, 1 / 2)]
    assert minibatch.total_tokens == 5


def test_distillation_samples_share_the_weight_of_their_trajectory():
    # The two groups have 1/2 each. The guided member of the first group has 1/4, in two samples of
    # 1 and 3 tokens. Its two further samples have 1/8 each, and their 5 + 2 tokens are trained too.
    (minibatch,) = build_minibatches(
        [trajectory(0, "guided"), trajectory(0), trajectory(1)],
        [0.0, 1.0, 1.0],
        [[trace(1), trace(3)], [trace(2)], [trace(3)]],
        count=1, rng=random.Random(0), distilled={0: (0.5, [trace(5), trace(2)])},
    )  # fmt: skip
    assert metrics(minibatch) == [(1.0, 1 / 4), (1.0, 1 / 2), (0.5, 1 / 8), (0.5, 1 / 8)]
    assert minibatch.total_tokens == 1 + 3 + 2 + 3 + 5 + 2


def test_advantages_per_token_are_divided_among_the_samples():
    # The first trajectory has two samples, of 2 and 1 sampled tokens after 1 token of context. Its
    # last sample has no signal and is dropped.
    answers = [trace(2), trace(1)]
    first, last = answers
    (minibatch,) = build(
        [trajectory(0, "guided", ("policy", first), ("policy", last)), trajectory(0)],
        [(0.5, -1.0, 0.0), 2.0],
        [answers, [trace(3)]],
    )
    assert [advantage for advantage, _ in metrics(minibatch)] == [(0.0, 0.5, -1.0), 2.0]
    assert minibatch.total_tokens == 2 + 1 + 3


def test_a_view_without_questions_keeps_the_advantages_of_its_actions():
    question, first, last = trace(2), trace(1), trace(3)
    played = trajectory(0, "guided", ("policy", first), ("tool_call", question), ("policy", last))
    values = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    (without,) = build([played], [values], [[first, last]])
    assert [advantage for advantage, _ in metrics(without)] == [(0.0, 0.1), (0.0, 0.4, 0.5, 0.6)]
    (only,) = build([played], [values], [[question]])
    assert [advantage for advantage, _ in metrics(only)] == [(0.0, 0.2, 0.3)]
    assert build([played], [values], [[]]) == ()
    assert build([played], [values], [[trace(0)]]) == ()
    with pytest.raises(ValueError, match="keep all actions of a trajectory or none, and all quest"):
        build([played], [values], [[last]])
    with pytest.raises(ValueError, match="has 6 sampled tokens, but 2 advantages of tokens"):
        build([played], [(1.0, 1.0)], [[first, question, last]])


def test_weights_are_computed_per_minibatch():
    # Three groups of two in two minibatches: one has two groups (¼ per sample), the other has one
    # group (½ per sample).
    trajectories = [trajectory(group) for group in (0, 1, 2, 0, 1, 2)]
    views = [[trace(group + 1)] for group in (0, 1, 2, 0, 1, 2)]
    minibatches = build(
        trajectories, torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]), views, count=2
    )
    assert sorted(metrics(m) for m in minibatches) == [
        [(1.0, 1 / 4)] * 2 + [(-1.0, 1 / 4)] * 2,
        [(1.0, 1 / 2), (-1.0, 1 / 2)],
    ]
    assert sum(m.total_tokens for m in minibatches) == 2 * (1 + 2 + 3)
    for minibatch in minibatches:
        assert sum(sample.weight for sample in minibatch.samples) == pytest.approx(1.0)


def test_a_minibatch_without_signal_is_omitted():
    trajectories = [trajectory(0), trajectory(0), trajectory(1), trajectory(1)]
    minibatches = build(trajectories, [0.0, 0.0, 1.0, -1.0], [[trace(2)]] * 4, count=2)
    assert [metrics(m) for m in minibatches] == [[(1.0, 1 / 2), (-1.0, 1 / 2)]]
    assert build(trajectories, [0.0] * 4, [[trace(2)]] * 4) == ()
    assert build(trajectories, [1.0] * 4, [[]] * 4) == ()
    assert build([], [], []) == ()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: micro_batches([1, 2], 0), "budget must be at least 1"),
        (lambda: micro_batches([1, 0], 5), "every length must be at least 1"),
        (lambda: optimizer_minibatches([1], 0, random.Random(0)), "count must be at least 1"),
        (lambda: build([trajectory(0)], [1.0, 2.0], [[]]), "differ in length: 1, 2, 1"),
        (lambda: build([trajectory(0)], [1.0], []), "differ in length: 1, 1, 0"),
        (lambda: build([trajectory(0)], [float("nan")], [[]]), "advantages must be finite"),
    ],
)
def test_invalid_input_raises_an_error_with_its_name(call, text):
    with pytest.raises(ValueError, match=text):
        call()

"""How samples become optimizer minibatches and micro-batches. No gradient depends on it: see `crl.algo.losses`."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from crl.types import Minibatch, TokenTrace, TrainSample, Trajectory

if TYPE_CHECKING:
    from torch import Tensor


SelfDistilled = tuple[float, Sequence[TokenTrace]]
"""The advantage of a trajectory's further samples, and their traces."""


def micro_batches(lengths: Sequence[int], budget: int, *, padded: bool = False) -> list[list[int]]:
    """Indices of `lengths`, each exactly once, so that every micro-batch has at most `budget` tokens; padded: rows × longest row.

    lengths: tokens of each sample, ≥ 1; budget ≥ 1, else `ValueError`. A sample longer than the budget gets a micro-batch of its
    own. Longest first, ties by index: neighbours in length share a micro-batch, so padding is small where there is any, and a step
    that does not fit in memory fails at its start.
    """
    if budget < 1:
        raise ValueError(f"budget must be at least 1 token, not {budget}")
    if any(length < 1 for length in lengths):
        raise ValueError("every length must be at least 1 token")
    batches: list[list[int]] = []
    tokens = 0  # of the last micro-batch
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[batches[-1][0]] if padded and batches else lengths[index]
        if batches and tokens + length <= budget:
            batches[-1].append(index)
            tokens += length
        else:
            batches.append([index])
            tokens = lengths[index]
    return batches


def rank_shares(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of `lengths` for each of `ranks`, each index exactly once, so that the ranks have about equally many tokens.

    Longest first, ties by index, each to the rank that has the fewest tokens so far (the first of those): no rank has more than the
    mean by over one sample, and as `micro_batches` goes from the longest too, the micro-batches that ranks work on at the same time
    are alike. Raises `ValueError` on ranks < 1.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, not {ranks}")
    shares: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = tokens.index(min(tokens))
        shares[rank].append(index)
        tokens[rank] += lengths[index]
    return shares


def optimizer_minibatches(groups: Sequence[int], count: int, rng: random.Random) -> list[list[int]]:
    """Indices of `groups` (the group of each item) in at most `count` minibatches, every group whole.

    The groups are shuffled with `rng` and dealt in turn, so minibatches differ by one group at most and none is empty: with fewer
    groups than `count` there are fewer minibatches. Within a minibatch indices ascend. Raises `ValueError` on count < 1.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1 minibatch, not {count}")
    order = list(dict.fromkeys(groups))  # not a set: its order would not be reproducible
    rng.shuffle(order)
    hands = {group: position % count for position, group in enumerate(order)}
    dealt: list[list[int]] = [[] for _ in range(min(count, len(order)))]
    for index, group in enumerate(groups):
        dealt[hands[group]].append(index)
    return dealt


def build_minibatches(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float] | Tensor,
    views: Sequence[Sequence[TokenTrace]],
    *,
    count: int,
    rng: random.Random,
    distilled: Mapping[int, SelfDistilled] = MappingProxyType({}),
) -> tuple[Minibatch, ...]:
    """The optimizer minibatches of one batch of trajectories.

    advantages: one per trajectory, finite; views: the train samples of each trajectory, possibly none (then it takes no part in the
    weights). Whole groups are dealt with `optimizer_minibatches`; `sequence_weights` (CRL eq. 5) and the total of trained
    tokens are computed over all samples of a minibatch, and only then are samples without signal dropped: those whose advantage is
    exactly 0 or whose mask is all 0. A minibatch with no sample left is omitted.
    distilled: further samples, by their trajectory's index; together they have its weight.
    Raises `ValueError` on wrong lengths.
    """
    if not len(trajectories) == len(advantages) == len(views):
        raise ValueError(
            f"trajectories, advantages and views differ in length: {len(trajectories)}, {len(advantages)}, {len(views)}"
        )
    signals = [float(advantage) for advantage in advantages]
    if not all(math.isfinite(signal) for signal in signals):
        raise ValueError("advantages must be finite")
    dealt = optimizer_minibatches([trajectory.group for trajectory in trajectories], count, rng)
    minibatches = (
        _minibatch(members, trajectories, signals, views, distilled) for members in dealt
    )
    return tuple(minibatch for minibatch in minibatches if minibatch.samples)


def _minibatch(
    members: Sequence[int], trajectories: Sequence[Trajectory], signals: Sequence[float],
    views: Sequence[Sequence[TokenTrace]], distilled: Mapping[int, SelfDistilled],
) -> Minibatch:  # fmt: skip
    """The minibatch of the trajectories at `members`."""
    from crl.algo.advantages import (
        sequence_weights,
    )  # here, so that the packing above needs no torch

    rows = [(index, trace) for index in members for trace in views[index]]
    owners = [index for index, _ in rows]
    lengths = [sum(trace.mask) for _, trace in rows]
    groups = [trajectories[index].group for index in owners]
    guided = [trajectories[index].condition == "guided" for index in owners]
    weights = sequence_weights(groups, guided, owners, lengths).tolist()
    samples = [
        TrainSample(trace, signals[index], weight)
        for (index, trace), length, weight in zip(rows, lengths, weights, strict=True)
        if signals[index] != 0 and length > 0
    ]
    whole: defaultdict[int, float] = defaultdict(float)
    for index, weight in zip(owners, weights, strict=True):
        whole[index] += weight
    for index in members:
        advantage, traces = distilled.get(index, (0.0, ()))
        samples += [
            TrainSample(trace, advantage, whole[index] / len(traces))
            for trace in traces
            if whole[index]
        ]
        lengths += [sum(trace.mask) for trace in traces]
    return Minibatch(tuple(samples), sum(lengths))

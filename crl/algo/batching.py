"""Packing of samples into optimizer minibatches and micro-batches.

The gradient of a minibatch does not depend on its division into micro-batches; see
`crl.algo.losses`.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from crl.types import SAMPLED_ORIGINS, Minibatch, TokenTrace, TrainSample, Trajectory

Advantage = float | tuple[float, ...]
"""Advantage of a whole trajectory or sample, or of each of its tokens."""

DistillationSamples = tuple[float, Sequence[TokenTrace]]
"""Advantage of a trajectory's self-distillation samples, and the traces of these samples."""


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return indices of `lengths` in micro-batches of at most `budget` tokens each.

    Every index appears exactly once. `lengths` are the tokens of each sample. A sample longer than
    the budget gets a micro-batch with no other sample. Samples are ordered by length, longest
    first, ties by index. Therefore samples of similar length share a micro-batch, which keeps
    padding small, and a step that does not fit in memory fails at its start.

    Raise `ValueError` if the budget or any length is below 1.
    """
    if budget < 1:
        raise ValueError(f"budget must be at least 1 token, not {budget}")
    if any(length < 1 for length in lengths):
        raise ValueError("every length must be at least 1 token")
    batches: list[list[int]] = []
    tokens = 0  # tokens of the last micro-batch
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and tokens + lengths[index] <= budget:
            batches[-1].append(index)
            tokens += lengths[index]
        else:
            batches.append([index])
            tokens = lengths[index]
    return batches


def rank_shares(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return indices of `lengths` for each rank, so that ranks have about equally many tokens.

    Every index appears exactly once. Samples are taken longest first, ties by index. Each is
    assigned to the rank with the fewest tokens so far (the first of these on a tie). No rank
    exceeds the mean by more than one sample. `micro_batches` also starts with the longest sample,
    so micro-batches that run on different ranks at the same time have similar sizes.

    Raise `ValueError` if ranks < 1.
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
    """Return indices of `groups` in at most `count` minibatches. No group is divided.

    `groups` holds the group of each item. The groups are shuffled with `rng` and distributed in
    turn, so the numbers of groups in two minibatches differ by at most one. No minibatch is empty:
    with fewer groups than `count` there are fewer minibatches. Indices ascend within a minibatch.

    Raise `ValueError` if count < 1.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1 minibatch, not {count}")
    order = list(dict.fromkeys(groups))  # the order of a set would not be reproducible
    rng.shuffle(order)
    minibatch_of = {group: position % count for position, group in enumerate(order)}
    minibatches: list[list[int]] = [[] for _ in range(min(count, len(order)))]
    for index, group in enumerate(groups):
        minibatches[minibatch_of[group]].append(index)
    return minibatches


def build_minibatches(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[Advantage],
    views: Sequence[Sequence[TokenTrace]],
    *,
    count: int,
    rng: random.Random,
    distilled: Mapping[int, DistillationSamples] = MappingProxyType({}),
) -> tuple[Minibatch, ...]:
    """Return the optimizer minibatches of one batch of trajectories.

    `advantages`: for each trajectory one finite number, or one per sampled token in the order of
    its traces. `views`: the training samples of each trajectory. A trajectory without samples is
    ignored when weights are computed. `distilled`: self-distillation samples by trajectory index;
    together they have their trajectory's weight.

    Groups are distributed by `optimizer_minibatches` and never divided. `sequence_weights` (CRL
    eq. 5) and the total of trained tokens are computed over all samples of a minibatch. After that,
    samples without signal are dropped: samples whose advantage is exactly 0 or whose mask is all 0.
    A minibatch without remaining samples is omitted.

    Raise `ValueError` if the lengths differ, an advantage is not finite, the number of a
    trajectory's advantages is not that of its sampled tokens, or its view keeps a part of the
    actions or of the questions.
    """
    if not len(trajectories) == len(advantages) == len(views):
        raise ValueError(
            "trajectories, advantages and views differ in length: "
            f"{len(trajectories)}, {len(advantages)}, {len(views)}"
        )
    advantages = [a if isinstance(a, tuple) else float(a) for a in advantages]
    if not all(math.isfinite(value) for advantage in advantages for value in _values(advantage)):
        raise ValueError("advantages must be finite")
    parts = optimizer_minibatches([trajectory.group for trajectory in trajectories], count, rng)
    minibatches = (
        _minibatch(members, trajectories, advantages, views, distilled) for members in parts
    )
    return tuple(minibatch for minibatch in minibatches if minibatch.samples)


def has_signal(advantage: Advantage) -> bool:
    """Return whether any value of the advantage differs from 0."""
    return any(_values(advantage))


def _values(advantage: Advantage) -> tuple[float, ...]:
    return advantage if isinstance(advantage, tuple) else (advantage,)


def _with_advantages(
    view: Sequence[TokenTrace], trajectory: Trajectory, advantage: Advantage
) -> Iterator[tuple[TokenTrace, Advantage]]:
    """Yield the traces of a view, each with its advantage. Context tokens have advantage 0."""
    if not isinstance(advantage, tuple) or not view:
        yield from ((trace, advantage) for trace in view)
        return
    remaining = iter(_kept_values(view, trajectory, advantage))
    for trace in view:
        yield trace, tuple(next(remaining) if trained else 0.0 for trained in trace.mask)


def _kept_values(
    view: Sequence[TokenTrace], trajectory: Trajectory, values: tuple[float, ...]
) -> list[float]:
    """Return those of the values of a trajectory's sampled tokens whose answers the view keeps.

    Raise `ValueError` if the view keeps a part of the actions or of the questions.
    """
    kept, answers, start = _answers(view), [], 0
    origins = [s.origin for s in trajectory.segments if s.origin in SAMPLED_ORIGINS]
    # Overtime answers at the end have segments, but no trained tokens.
    for origin, ids in zip(origins, _answers(trajectory.traces), strict=False):
        answers.append((origin, ids, values[start : start + len(ids)]))
        start += len(ids)
    if start != len(values):
        raise ValueError(
            f"a trajectory has {start} sampled tokens, but {len(values)} advantages of tokens"
        )
    for chosen in (SAMPLED_ORIGINS, {"policy"}, {"tool_call"}, frozenset()):
        if [ids for origin, ids, _ in answers if origin in chosen] == kept:
            return [v for origin, _, own in answers if origin in chosen for v in own]
    raise ValueError(
        "with advantages per turn or token, a view must keep all actions of a trajectory or none, "
        "and all questions or none"
    )


def _answers(traces: Sequence[TokenTrace]) -> list[tuple[int, ...]]:
    """Return the token ids of every sampled answer, in order."""
    return [
        trace.ids[positions.start : positions.stop]
        for trace in traces
        for positions in trace.completions()
    ]


def _minibatch(
    members: Sequence[int], trajectories: Sequence[Trajectory], advantages: Sequence[Advantage],
    views: Sequence[Sequence[TokenTrace]], distilled: Mapping[int, DistillationSamples],
) -> Minibatch:  # fmt: skip
    """Return the minibatch of the trajectories at indices `members`."""
    # Imported here so that the functions above need no torch.
    from crl.algo.advantages import sequence_weights

    rows = [
        (index, trace, advantage)
        for index in members
        for trace, advantage in _with_advantages(
            views[index], trajectories[index], advantages[index]
        )
    ]
    owners = [index for index, _, _ in rows]
    lengths = [sum(trace.mask) for _, trace, _ in rows]
    groups = [trajectories[index].group for index in owners]
    guided = [trajectories[index].condition == "guided" for index in owners]
    weights = sequence_weights(groups, guided, owners, lengths).tolist()
    samples = [
        TrainSample(trace, advantage, weight)
        for (_, trace, advantage), length, weight in zip(rows, lengths, weights, strict=True)
        if has_signal(advantage) and length > 0
    ]
    trajectory_weights: defaultdict[int, float] = defaultdict(float)
    for index, weight in zip(owners, weights, strict=True):
        trajectory_weights[index] += weight
    for index in members:
        advantage, traces = distilled.get(index, (0.0, ()))
        samples += [
            TrainSample(trace, advantage, trajectory_weights[index] / len(traces))
            for trace in traces
            if trajectory_weights[index]
        ]
        lengths += [sum(trace.mask) for trace in traces]
    return Minibatch(tuple(samples), sum(lengths))

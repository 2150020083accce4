"""Advantages, returns and the weights of sequences in a loss.

Statistics are computed in float64 and returned in the rewards' float type. A cell is a group, a
group half (guided or free), or an anchor state within a group. Samples of a cell whose values are
all equal get exactly 0, so that samples without signal can be recognised and dropped.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

Scale = Literal["std", "none"]
Values = Tensor | Sequence[float]
"""Numbers, one per sample."""
Labels = Tensor | Sequence[Hashable]
"""Labels, one per sample."""

# ── advantages ────────────────────────────────────────────────────────────────────────────────────


def group_advantages(
    rewards: Values, groups: Labels, *, scale: Scale = "std", eps: float = 1e-6
) -> Tensor:
    """Return Â_i = (r_i − mean_g) / (std_g + eps), with g the group of i: CRL eq. 4 (GRPO).

    `rewards`: [n], finite. `groups`: [n], one label per reward. std is the sample standard
    deviation (ddof 1). `scale="none"` omits the division. A group of one member and a group of
    equal rewards get 0. The result has shape [n].

    Raise `ValueError` on wrong shapes, an unknown scale or a negative eps.
    """
    values = _vector("rewards", rewards)
    return _normalise(values, _cells(values, groups=groups), scale=scale, eps=eps)


def split_group_advantages(
    rewards: Values,
    groups: Labels,
    guided: Tensor | Sequence[bool],
    *,
    scale: Scale = "std",
    eps: float = 1e-6,
) -> Tensor:
    """Return Â_i = (r_i − mean_c) / (std_c + eps), with c the group half of i: CRL eq. 5.

    A group half c holds the guided or the free members of one group. `rewards`, `groups`,
    `guided`: [n]. All other rules are those of `group_advantages`, applied to group halves: a half
    with one member gets 0.
    """
    values = _vector("rewards", rewards)
    return _normalise(values, _cells(values, groups=groups, guided=guided), scale=scale, eps=eps)


def step_advantages(
    returns: Values,
    groups: Labels,
    anchors: Sequence[Hashable],
    *,
    scale: Scale = "std",
    eps: float = 1e-6,
) -> Tensor:
    """Return Â_j = (R_j − mean_c) / (std_c + eps), with c = (group, anchor) of step j.

    This is the step term of GiGPO (arXiv 2505.10978). Steps of one group that were taken in the
    same state are compared with each other. A state that occurs once in its group gets 0.

    `returns`: [m], the discounted return of every step of every trajectory. `groups`: [m].
    `anchors`: [m] hashable, the state in which each step was taken. `scale`, `eps` and the errors
    raised are those of `group_advantages`.
    """
    values = _vector("returns", returns)
    return _normalise(values, _cells(values, groups=groups, anchors=anchors), scale=scale, eps=eps)


def discounted_returns(step_rewards: Values, gamma: float) -> Tensor:
    """Return R_t = Σ_{k ≥ t} γ^{k − t} r_k for the steps of one episode.

    `step_rewards` and the result: [T]. Raise `ValueError` if gamma is outside [0, 1].
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be in [0, 1], not {gamma}")
    rewards = _vector("step_rewards", step_rewards)
    returns, return_ahead = [], 0.0
    for reward in reversed(rewards.tolist()):
        return_ahead = reward + gamma * return_ahead
        returns.append(return_ahead)
    return torch.tensor(returns[::-1], dtype=rewards.dtype, device=rewards.device)


# ── weights ───────────────────────────────────────────────────────────────────────────────────────


def sequence_weights(
    groups: Labels,
    guided: Tensor | Sequence[bool],
    trajectories: Labels | None = None,
    lengths: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Return the weight of every sample in its optimizer minibatch.

        w_i = 1/G · 1/C_g · 1/K_gc · length_i / Σ lengths of i's trajectory

    This is the factor ½ · 1/K_c of CRL eq. 5, averaged over groups. G is the number of groups
    that are present. C_g (1 or 2) is the number of conditions present in the sample's group. K_gc
    is the number of trajectories in the sample's group and condition.

    `groups`, `guided`: [n]. `trajectories`: [n] labels, unique within a group and condition; if
    None, every sample is a separate trajectory. `lengths`: [n] trained tokens. The samples of a
    trajectory share its weight equally if `lengths` is None or all its lengths are 0. The result is
    float32 [n] and sums to 1.

    Raise `ValueError` on wrong shapes or a negative length.
    """
    n = len(groups)
    ones = torch.ones(
        n, dtype=torch.float64, device=groups.device if isinstance(groups, Tensor) else None
    )
    trajectories = range(n) if trajectories is None else trajectories
    group = _cells(ones, groups=groups)
    condition = _cells(ones, groups=groups, guided=guided)
    trajectory = _cells(ones, groups=groups, guided=guided, trajectories=trajectories)
    share = _length_shares(
        trajectory, ones if lengths is None else _vector("lengths", lengths).to(ones)
    )
    divisor = (
        _children(torch.zeros_like(group), group)
        * _children(group, condition)
        * _children(condition, trajectory)
    )
    return (share / divisor).to(torch.float32)


def _children(parent: Tensor, child: Tensor) -> Tensor:
    """Return, for each sample, the number of distinct children of its parent: [n]."""
    pairs = torch.unique(torch.stack([parent, child]), dim=1)
    return torch.bincount(pairs[0])[parent]


def _length_shares(trajectory: Tensor, lengths: Tensor) -> Tensor:
    """Return each sample's share of its trajectory, by length: [n]."""
    if lengths.shape != trajectory.shape:
        raise ValueError(
            f"lengths must be [{len(trajectory)}] like groups, not {list(lengths.shape)}"
        )
    if bool((lengths < 0).any()):
        raise ValueError("lengths must not be negative")
    empty = _sums(trajectory, lengths)[trajectory] == 0
    lengths = torch.where(empty, torch.ones_like(lengths), lengths)
    return lengths / _sums(trajectory, lengths)[trajectory]


# ── cells and their statistics ────────────────────────────────────────────────────────────────────


def _vector(name: str, values: Values) -> Tensor:
    """Return `values` as a 1-d float tensor. Raise `ValueError` if it is not 1-d or not finite."""
    vector = torch.as_tensor(values)
    if vector.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, not {list(vector.shape)}")
    vector = vector if vector.is_floating_point() else vector.to(torch.get_default_dtype())
    if not bool(torch.isfinite(vector).all()):
        raise ValueError(f"{name} must be finite")
    return vector


def _cells(values: Tensor, **keys: Labels) -> Tensor:
    """Return the cell number (0, 1, …) of each sample: [n].

    Samples that agree on all keys are in the same cell. Raise `ValueError` on wrong shapes.
    """
    columns = {name: _labels(name, column) for name, column in keys.items()}
    for name, column in columns.items():
        if len(column) != len(values):
            raise ValueError(
                f"{name} must have one entry per sample: {len(values)}, not {len(column)}"
            )
    numbers: dict[tuple[Hashable, ...], int] = {}
    cells = [numbers.setdefault(key, len(numbers)) for key in zip(*columns.values(), strict=True)]
    return torch.tensor(cells, dtype=torch.long, device=values.device)


def _labels(name: str, column: Iterable[Hashable]) -> list[Hashable]:
    if isinstance(column, Tensor) and column.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, not {list(column.shape)}")
    return column.tolist() if isinstance(column, Tensor) else list(column)


def _sums(cells: Tensor, values: Tensor) -> Tensor:
    """Return the sum of `values` in each cell: [number of cells]."""
    count = int(cells.max()) + 1 if cells.numel() else 0
    return values.new_zeros(count).index_add_(0, cells, values)


def _normalise(values: Tensor, cells: Tensor, *, scale: Scale, eps: float) -> Tensor:
    """Return (value − mean) / (std + eps) within each cell, or value − mean if scale is "none".

    The result is exactly 0 in cells whose values are all equal.
    """
    if scale not in ("std", "none"):
        raise ValueError(f"scale must be 'std' or 'none', not {scale!r}")
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, not {eps}")
    doubles = values.to(torch.float64)
    counts = _sums(cells, torch.ones_like(doubles))
    deviations = doubles - (_sums(cells, doubles) / counts)[cells]
    if scale == "std":
        variance = _sums(cells, deviations.square()) / (counts - 1).clamp(min=1)
        deviations = deviations / (variance.sqrt() + eps)[cells]
    # The computed mean of equal numbers can have a rounding error. The division would amplify it.
    return torch.where(_constant(cells, doubles), torch.zeros_like(doubles), deviations).to(
        values.dtype
    )


def _constant(cells: Tensor, values: Tensor) -> Tensor:
    """Return whether all values in the sample's cell are equal: bool [n]."""
    count = int(cells.max()) + 1 if cells.numel() else 0
    empty = values.new_zeros(count)
    high = empty.scatter_reduce(0, cells, values, "amax", include_self=False)
    low = empty.scatter_reduce(0, cells, values, "amin", include_self=False)
    return (high == low)[cells]

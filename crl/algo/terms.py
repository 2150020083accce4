"""Sum of advantage terms that have one value per trajectory, per turn or per sampled token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from crl.algo.batching import Advantage
from crl.protocols import PerToken, PerTurn
from crl.types import Trajectory

if TYPE_CHECKING:
    from torch import Tensor


def sum_terms(
    terms: Sequence[Tensor | PerTurn | PerToken], trajectories: Sequence[Trajectory]
) -> list[Advantage]:
    """Return the sum of the terms for each trajectory.

    The result is one number per trajectory if all terms have one, otherwise one per sampled token.

    Raise `ValueError` if a term has another number of values than trajectories, turns or tokens.
    """
    import torch

    whole = [term for term in terms if isinstance(term, torch.Tensor)]
    if any(len(term) != len(trajectories) for term in whole):
        raise ValueError(f"a term must have one advantage per trajectory ({len(trajectories)})")
    sums: list[float] = torch.stack(whole).sum(0).tolist() if whole else [0.0] * len(trajectories)
    fine = [term for term in terms if isinstance(term, PerTurn | PerToken)]
    if not fine:
        return list(sums)
    by_term = [
        [_per_token(term, i, trajectory) for i, trajectory in enumerate(trajectories)]
        for term in fine
    ]
    return [
        tuple(total + sum(values) for values in zip(*rows, strict=True))
        for total, *rows in zip(sums, *by_term, strict=True)
    ]


def _per_token(term: PerTurn | PerToken, index: int, trajectory: Trajectory) -> list[float]:
    """Return the term's advantage of each sampled token of the trajectory `index`."""
    if len(term.values) <= index:
        raise ValueError(f"a term has advantages of {len(term.values)} trajectories only")
    values, turns = term.values[index], _token_turns(trajectory)
    expected = trajectory.turns if isinstance(term, PerTurn) else len(turns)
    if len(values) != expected:
        unit = "turn" if isinstance(term, PerTurn) else "sampled token"
        raise ValueError(
            f"a trajectory needs one advantage per {unit} ({expected}), not {len(values)}"
        )
    return [values[turn] for turn in turns] if isinstance(term, PerTurn) else list(values)


def _token_turns(trajectory: Trajectory) -> list[int]:
    """Return the turn of each sampled token. The tokens of a question belong to the next turn."""
    completions = [
        len(positions) for trace in trajectory.traces for positions in trace.completions()
    ]
    turns: list[int] = []
    turn = 0
    sampled = [s.origin for s in trajectory.segments if s.origin in ("policy", "tool_call")]
    for length, origin in zip(completions, sampled, strict=False):
        turns += [min(turn, max(trajectory.turns - 1, 0))] * length
        turn += origin == "policy"
    return turns

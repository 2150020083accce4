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

    Raise `ValueError` if a term has another type, or another number of values than trajectories,
    turns or tokens.
    """
    import torch

    whole, fine = [], []
    for term in terms:
        values = term.values if isinstance(term, PerTurn | PerToken) else term
        if not isinstance(term, torch.Tensor | PerTurn | PerToken):
            raise ValueError(
                f"a term must return a tensor, PerTurn or PerToken, not a {type(term).__name__}"
            )
        if len(values) != len(trajectories):
            raise ValueError(
                f"a term must have advantages of all {len(trajectories)} trajectories, "
                f"not of {len(values)}"
            )
        (whole if isinstance(term, torch.Tensor) else fine).append(term)
    sums: list[float] = torch.stack(whole).sum(0).tolist() if whole else [0.0] * len(trajectories)
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
    values, turns = term.values[index], _token_turns(trajectory)
    expected = trajectory.turns if isinstance(term, PerTurn) else len(turns)
    if len(values) != expected:
        unit = "turn" if isinstance(term, PerTurn) else "sampled token"
        raise ValueError(
            f"a trajectory needs one advantage per {unit} ({expected}), not {len(values)}"
        )
    if not isinstance(term, PerTurn):
        return list(values)
    # An episode that ends after a question has sampled tokens, but no turn.
    return [values[turn] for turn in turns] if values else [0.0] * len(turns)


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

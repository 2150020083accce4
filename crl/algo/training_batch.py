"""Training batch of a step: from finished episodes to minibatches."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from crl.algo import build_minibatches, sum_terms
from crl.algo.batching import Advantage, DistillationSamples, has_signal
from crl.protocols import Rerender, TrainSpec
from crl.types import GUIDANCE_ORIGINS, Minibatch, Trajectory


def training_batch(
    role: TrainSpec, rerender: Rerender, batch: Sequence[Trajectory], *,
    count: int, rng: random.Random,
) -> tuple[Sequence[Minibatch], dict[str, float]]:  # fmt: skip
    """Return the minibatches of the actor's training step, and metrics of their signal.

    `batch` holds whole groups. Its episodes with an error are not trained on. `count` is the number
    of minibatches, and `rng` shuffles the groups.

    With thousands of tokens per episode this takes long. Call it in a thread, so that other work of
    the event loop goes on.
    """
    valid = [t for t in batch if t.error is None]
    advantages = sum_terms([term(valid) for term in role.terms], valid) if valid else []
    metrics: dict[str, float] = {
        "rollout/groups_with_signal": _groups_with_signal(valid, advantages)
    }
    distilled = _self_distillation(role, rerender, valid)
    if role.distillation:
        metrics["rollout/self_distilled"] = len(distilled)
    views = [role.view(t, rerender) for t in valid]
    minibatches = build_minibatches(
        valid, advantages, views, count=count, rng=rng, distilled=distilled
    )
    return minibatches, metrics


def _self_distillation(
    role: TrainSpec, rerender: Rerender, valid: Sequence[Trajectory]
) -> Mapping[int, DistillationSamples]:
    """Return the self-distillation samples by trajectory index: weight and unguided traces.

    Trajectories with weight 0 are left out.
    """
    weights = role.distillation(valid).tolist() if role.distillation and valid else []
    return {
        i: (weight, rerender.without(valid[i], GUIDANCE_ORIGINS))
        for i, weight in enumerate(weights)
        if weight
    }


def _groups_with_signal(valid: Sequence[Trajectory], advantages: Sequence[Advantage]) -> int:
    """Return the number of groups with a trajectory that has a training signal."""
    return len(
        {t.group for t, advantage in zip(valid, advantages, strict=True) if has_signal(advantage)}
    )

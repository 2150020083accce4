"""A word when the trainer's log-probs are not the engine's: gradients are then not those of the policy that sampled."""

from __future__ import annotations

from collections.abc import Mapping

from crl.protocols import Monitor

LARGE = 0.02
"""Nats a token. Rounding in half precision comes to about a tenth of it."""

EVERY = 20
"""Steps between two notes at least."""

AGREEING = 0.9
"""Correlation of the two log-probs below which the models differ, and not only their arithmetic."""


class MismatchWatch:
    """Notes a large mismatch of one role, with its probable cause, once in `EVERY` steps."""

    def __init__(self, role: str, monitor: Monitor) -> None:
        self._role, self._monitor = role, monitor
        self._silent_until = 0

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """metrics: what the learner's step measured."""
        kl = metrics.get("mismatch_kl", 0.0)
        if kl > LARGE and step >= self._silent_until:
            self._silent_until = step + EVERY
            self._monitor.note(
                f"{self._role}: the trainer's log-probs are {kl:.3f} nats a token (KL) from the engine's, which sampled them; "
                f"probably {probable_cause(metrics)}"
            )


def probable_cause(metrics: Mapping[str, float]) -> str:
    """From how the log-probs differ: not the same model, one distribution sharper than the other, or noise."""
    if metrics["mismatch_correlation"] < AGREEING:
        return "the engine samples with other weights than the trainer's: a sync of weights that did not arrive, or another checkpoint"
    if metrics["mismatch_explained"] > 0.5:
        return "the engine's log-probs are at another temperature than the sampling, or of a truncated distribution (top-p, top-k, min-p)"
    return "rounding: try learner.precision=float32, or correct for it with actor.old_logp=recompute and actor.importance_cap=2"

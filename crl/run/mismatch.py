"""Warning if the trainer's log-probs differ from the engine's.

With such a mismatch, gradients are not those of the policy that sampled.
"""

from __future__ import annotations

from collections.abc import Mapping

from crl.protocols import Monitor

LARGE = 0.02
"""KL in nats per token above which a note is written. Half-precision rounding: about 0.002."""

EVERY = 20
"""Minimum number of steps between two notes."""

AGREEING = 0.9
"""Correlation of the two log-probs below which different weights, not rounding, are the cause."""


class MismatchWatch:
    """Detector of a large mismatch of one role. Its notes are at least `EVERY` steps apart."""

    def __init__(self, role: str, monitor: Monitor) -> None:
        self._role, self._monitor = role, monitor
        self._silent_until = 0

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a note with the likely cause if the metrics of `step` show a large mismatch."""
        kl = metrics.get("mismatch_kl", 0.0)
        if kl > LARGE and step >= self._silent_until:
            self._silent_until = step + EVERY
            self._monitor.note(
                f"{self._role}: the trainer's log-probs are {kl:.3f} nats a token (KL) from the "
                "engine's, which sampled them; "
                f"probably {probable_cause(metrics)}"
            )


def probable_cause(metrics: Mapping[str, float]) -> str:
    """Return the probable cause of a mismatch, from the way in which the log-probs differ.

    Low correlation: different weights. A gap that is mostly explained by the engine's log-prob:
    another temperature or truncation. Anything else: rounding.
    """
    if metrics["mismatch_correlation"] < AGREEING:
        return (
            "the engine samples with other weights than the trainer's: "
            "a sync of weights that did not arrive, or another checkpoint"
        )
    if metrics["mismatch_explained"] > 0.5:
        return (
            "the engine's log-probs are at another temperature than the sampling, "
            "or of a truncated distribution (top-p, top-k, min-p)"
        )
    return (
        "rounding: try learner.precision=float32, "
        "or correct for it with actor.old_logp=recompute and actor.importance_cap=2"
    )

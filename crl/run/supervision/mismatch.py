"""Warning if the trainer's log-probs differ from the engine's.

With such a mismatch, gradients are not those of the policy that sampled.
"""

from __future__ import annotations

from collections.abc import Mapping

from crl.protocols import Monitor

MAX_KL = 0.02
"""KL in nats per token above which a note is written. Half-precision rounding: about 0.002."""

NOTE_INTERVAL = 20
"""Minimum number of steps between two notes."""

MIN_CORRELATION = 0.9
"""Correlation of the two log-probs below which different weights, not rounding, are the cause."""


class MismatchDetector:
    """Detector of a large mismatch of one role.

    Its notes are at least `NOTE_INTERVAL` steps apart.
    """

    def __init__(self, role: str, monitor: Monitor) -> None:
        self._role, self._monitor = role, monitor
        self._next_note_step = 0

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a note with the likely cause if the metrics of `step` show a large mismatch."""
        kl = metrics.get("mismatch_kl", 0.0)
        if kl > MAX_KL and step >= self._next_note_step:
            self._next_note_step = step + NOTE_INTERVAL
            self._monitor.note(
                f"{self._role}: the trainer's log-probs differ from the engine's by a KL of "
                f"{kl:.3f} nats per token. Probable cause: {probable_cause(metrics)}"
            )


def probable_cause(metrics: Mapping[str, float]) -> str:
    """Return the probable cause of a mismatch, from the way in which the log-probs differ.

    Low correlation: different weights. A gap that is mostly explained by the engine's log-prob:
    another temperature or truncation. Anything else: rounding.
    """
    if metrics["mismatch_correlation"] < MIN_CORRELATION:
        return (
            "engine and trainer have different weights, "
            "because a weight sync failed or the engine loaded another checkpoint"
        )
    if metrics["mismatch_explained"] > 0.5:
        return (
            "the engine computes log-probs at another temperature than it samples, "
            "or from a truncated distribution (top-p, top-k, min-p)"
        )
    return (
        "rounding. Use learner.precision=float32, "
        "or correct for it with actor.old_logp=recompute and actor.importance_cap=2"
    )

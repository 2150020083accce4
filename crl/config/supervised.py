"""Settings of a run that supervised fine-tuning fixes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crl.types import RoleName

OBJECTIVE: Mapping[RoleName, Mapping[str, Any]] = {
    "actor": {
        "temperature": 1.0,
        "kl_coef": 0.0,
        # Demonstrations have no log-probs of an engine.
        "old_logp": "behaviour",
        "importance_cap": None,
    },
    "extractor": {"temperature": 1.0, "kl_coef": 0.0},
}
"""Settings of each role that the loss of supervised fine-tuning fixes."""


def role_settings(role: RoleName, model: str | None) -> dict[str, Any]:
    """Return settings with which `role` is trained. `model` is None for that of the config."""
    settings: dict[str, Any] = {f"{role}.{name}": value for name, value in OBJECTIVE[role].items()}
    if model is not None:
        settings[f"{role}.model"] = model
    settings[decay_key(role)] = 0  # not that of a run or of a preset; see --decay
    # With the method grpo, no other model is needed.
    return settings | {f"{role}.train": True} | ({"method": "grpo"} if role == "actor" else {})


def rate_key(role: RoleName) -> str:
    """Return the key of the learning rate of a role."""
    return f"{role}.optimizer.learning_rate"


def decay_key(role: RoleName) -> str:
    """Return the key of the update at which the learning rate of a role is 0."""
    return f"{role}.optimizer.decay_steps"

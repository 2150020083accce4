"""Settings of a run that supervised fine-tuning fixes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crl.config.method import ACTOR_ALONE
from crl.types import RoleName

_NEXT_TOKEN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "kl_coef": 0.0}
"""Settings of both roles that the loss fixes."""

OBJECTIVE: Mapping[RoleName, Mapping[str, Any]] = {
    "actor": {
        **_NEXT_TOKEN,
        # Demonstrations have no log-probs of an engine.
        "old_logp": "behaviour",
        "importance_cap": None,
    },
    "extractor": _NEXT_TOKEN,
}
"""Settings of each role that the loss of supervised fine-tuning fixes."""


ACTOR_ALONE_SETTINGS: Mapping[str, Any] = {
    "method": ACTOR_ALONE,
    "critic.enabled": False,
    "extractor.perplexity.weight": 0.0,
}
"""Settings without the other models of a run, and without the switches that need them."""


def role_settings(role: RoleName, model: str | None) -> dict[str, Any]:
    """Return settings with which `role` is trained. `model` is None for that of the config."""
    settings: dict[str, Any] = {f"{role}.{name}": value for name, value in OBJECTIVE[role].items()}
    if model is not None:
        settings[f"{role}.model"] = model
    settings[decay_key(role)] = 0  # not that of a run or of a preset; see --decay
    settings[f"{role}.train"] = True
    return {**settings, **(ACTOR_ALONE_SETTINGS if role == "actor" else {})}


def rate_key(role: RoleName) -> str:
    """Return the key of the learning rate of a role."""
    return f"{role}.optimizer.learning_rate"


def decay_key(role: RoleName) -> str:
    """Return the key of the update at which the learning rate of a role is 0."""
    return f"{role}.optimizer.decay_steps"

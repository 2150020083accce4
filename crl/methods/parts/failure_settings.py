"""Settings of the bank as a library of failures (Role-Agent §3.3): defaults and contradictions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from crl.config.method import check_texts
from crl.config.schema import GOAL_SCOPES
from crl.errors import ConfigError
from crl.wording import counted

if TYPE_CHECKING:
    from crl.config.schema import RunConfig
    from crl.methods.role_agent import RoleAgentSection

LIBRARY_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "bank": {
            "scope": "task",
            "max_per_goal": None,
            # All failures of `role_agent.history` tasks, played by groups of 8.
            "max_entries": 16_000,
            "evict": "fifo",
            # Failures are found by their notes and not by their goals.
            "key_text_weight": None,
        },
        # Enough for the 30 tasks among which the model chooses, with 8 failures each.
        "retrieval": {"candidates": 256, "min_similarity": 0.1},
        # Table 5: temperature of the reflection.
        "extractor": {"merge_every": 0, "temperature": 0.5},
        "ask": {"enabled": False},
        "critic": {"enabled": False},
    }
)
"""Settings of a method with a library of failures, which replace those of the preset."""

UNUSED_WITHOUT: Mapping[str, str] = MappingProxyType(
    {
        "horizon": "role_agent.prediction_weight",
        **dict.fromkeys(("writer", "retrieval", "matches", "history"), "role_agent.replay_ratio"),
    }
)
"""Settings of Role-Agent without effect if another one is 0."""


def unpredicted_reason(config: RunConfig, name: str) -> tuple[str, str] | None:
    """Return reason and remedy for a setting of predictions if no agent predicts; else None."""
    asked = name == "horizon" or (
        name == "prediction_weight" and config.method_settings.prediction_weight
    )
    if not asked or predicted_states(config):
        return None
    return "only agents of the full rendering predict", "Use a language model, or leave it out"


def predicted_states(config: RunConfig) -> dict[str, int]:
    """Return H, the number of predicted states in a reply, by name of the tasks with predictions.

    `role_agent.prediction_weight` is not considered.
    """
    from crl.methods.parts.predicting import horizons

    return horizons(config.tasks, config.method_settings.horizon)


def plan_roles(config: RunConfig, settings: RoleAgentSection) -> list[str]:
    """Return the lines of a plan for the predictions and the replay."""
    predicted = predicted_states(config) if settings.prediction_weight else {}
    counts = (f"{name} {counted(h, 'state')} per reply" for name, h in predicted.items())
    replay = (
        f"with probability {settings.replay_ratio:g}, a retrieved task replaces a drawn one: at "
        f"most {settings.matches} per failure mode of a group, of the last {settings.history:,}"
    )
    return [
        f"predictions  {', '.join(counts) or 'none'}",
        f"replay       {replay if settings.replay_ratio else 'none'}",
    ]


def check_library(config: RunConfig, settings: RoleAgentSection) -> None:
    """Raise `ConfigError` if the settings would lose failures or not find them."""
    if settings.retrieval == "model" and config.profile(config.writer) == "compact":
        reason = "needs a language model that analyses failures"
        raise ConfigError("role_agent.retrieval", "model", reason, "Use embedding")
    if not config.with_bank:
        return
    bank = config.bank
    by_goal, duplicates = bank.scope in GOAL_SCOPES, bank.duplicate_similarity
    for key, value, refused, reason in (
        ("bank.frozen", True, bank.frozen, "no failure could be added to the bank"),
        ("bank.scope", bank.scope, by_goal, "failures with other goals would not be found"),
        (
            "bank.duplicate_similarity",
            duplicates,
            duplicates is not None,
            "similar failures of other tasks, which replay looks for, would be dropped",
        ),
    ):
        if refused:
            raise ConfigError(key, value, f"cannot be used: {reason}", "Leave it out")
    check_texts(config)

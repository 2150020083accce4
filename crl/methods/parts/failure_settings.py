"""Settings of the bank as a library of failures (Role-Agent §3.3): defaults and contradictions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from crl.config.method import check_texts
from crl.config.schema import GOAL_SCOPES
from crl.errors import ConfigError

if TYPE_CHECKING:
    from crl.config.schema import RunConfig

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


def check_library(config: RunConfig) -> None:
    """Raise `ConfigError` if the settings would lose failures or not find them."""
    bank, merge_every = config.bank, config.extractor.merge_every
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
        (
            "extractor.merge_every",
            merge_every,
            merge_every > 0,
            "a merged note belongs to no training task that could return",
        ),
    ):
        if refused:
            raise ConfigError(key, value, f"cannot be used: {reason}", "Leave it out")
    check_texts(config)

"""Settings of a memory of tips (EMPO²): defaults of other sections, and contradictions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from crl.config.method import NOTE_DEFAULTS, check_notes
from crl.errors import ConfigError

if TYPE_CHECKING:
    from crl.config.schema import RunConfig
    from crl.methods.empo2 import Empo2Section

MEMORY_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        **NOTE_DEFAULTS,
        # Appendix D.2. The lower clip width of the paper, 0.2, is the default of all methods.
        "actor": {"clip_high": 0.3},
        # Listing 1: one memory per task variation; tips above the threshold, sorted by score.
        "bank": {"scope": "variation", "max_per_goal": 1000, "evict": "fifo"},
        "retrieval": {
            **NOTE_DEFAULTS["retrieval"],
            "choice": "reward",
            "min_similarity": 0.5,
            "candidates": 1000,
        },
    }
)
"""Settings of EMPO² that replace those of the preset."""

UNUSED_WITHOUT: Mapping[str, str] = MappingProxyType(
    {
        "off_policy_share": "empo2.memory_share",
        "off_policy_old": "empo2.off_policy_share",
        "novelty_in": "empo2.novelty_coef",
        "novelty_states": "empo2.novelty_coef",
        "novelty_similarity": "empo2.novelty_coef",
    }
)
"""Settings of EMPO² without effect if another one is 0."""

OF_TRAINING = ("off_policy_share", "off_policy_old", "low_probability", "dual_clip", "novelty_in")
"""Settings of EMPO² without effect if the actor is not trained."""


def check_memory(config: RunConfig, settings: Empo2Section) -> None:
    """Raise `ConfigError` for settings that contradict tips or off-policy updates."""
    check_notes(config, settings)
    actor = config.actor
    truncated = "top_p" if actor.top_p < 1 else "top_k" if actor.top_k else ""
    off_policy = settings.memory_share > 0 and settings.off_policy_share > 0
    if truncated and off_policy and settings.off_policy_old == "with_tips":
        raise ConfigError(
            "empo2.off_policy_old",
            "with_tips",
            f"cannot be used with actor.{truncated}: the old log-probs are normalised over the "
            "tokens that the engine kept with the tips, but the log-probs without the tips over "
            "all tokens",
            "Add --set empo2.off_policy_old=without_tips",
        )

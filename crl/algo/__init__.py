"""Pure functions of the algorithms: advantages, losses, batching, experience (eq. 6, 7, 8, B.2).

Names are loaded on first use. Therefore `import crl.algo`, and the use of a formula that needs no
torch, do not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crl.algo.advantages import (
        discounted_returns,
        group_advantages,
        sequence_weights,
        split_group_advantages,
        step_advantages,
    )
    from crl.algo.batching import (
        build_minibatches,
        micro_batches,
        optimizer_minibatches,
        rank_shares,
    )
    from crl.algo.experience import (
        critic_reward,
        diversity_score,
        experience_reward,
        perplexity_bonus,
        training_weight,
    )
    from crl.algo.losses import cispo, clipped_surrogate, nll, truncated_importance_weights
    from crl.algo.states import similar_states
    from crl.algo.terms import sum_terms

__all__ = [
    "build_minibatches",
    "cispo",
    "clipped_surrogate",
    "critic_reward",
    "discounted_returns",
    "diversity_score",
    "experience_reward",
    "group_advantages",
    "micro_batches",
    "nll",
    "optimizer_minibatches",
    "perplexity_bonus",
    "rank_shares",
    "sequence_weights",
    "similar_states",
    "split_group_advantages",
    "step_advantages",
    "sum_terms",
    "training_weight",
    "truncated_importance_weights",
]

_NAMES = {
    "advantages": (
        "discounted_returns",
        "group_advantages",
        "sequence_weights",
        "split_group_advantages",
        "step_advantages",
    ),
    "batching": ("build_minibatches", "micro_batches", "optimizer_minibatches", "rank_shares"),
    "experience": (
        "critic_reward",
        "diversity_score",
        "experience_reward",
        "perplexity_bonus",
        "training_weight",
    ),
    "losses": ("cispo", "clipped_surrogate", "nll", "truncated_importance_weights"),
    "states": ("similar_states",),
    "terms": ("sum_terms",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

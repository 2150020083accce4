"""Experience formulas: retrieval scores (eq. 6), training weight (eq. 7), rewards (eq. 8, B.2).

This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import get_args

from crl.types import PerplexityNormaliser, Verdict

CRITIC_SCORES: Mapping[Verdict, float] = MappingProxyType(
    {"accept": 1.0, "refine": 0.5, "reject": 0.0}
)
"""Scores s_c(m) of the verdicts, CRL appendix B.1."""

PRIOR_SUCCESS_RATE = 0.3
"""Prior success rate in `success_score`, with the weight of one episode."""


def diversity_score(rank_score: float, count: int, recent: bool, *, count_penalty: float) -> float:
    """Return s(m) = s_rank(m) − λ·log(1 + c(m)) − 1[recent(m)]: CRL eq. 6.

    The experience with the highest score is retrieved. `rank_score`: relevance rank score of the
    candidate; **ours**: −rank, where rank 0 is the most similar candidate. `count`: c(m) ≥ 0,
    number of earlier retrievals of the experience. `recent`: True if it was retrieved within the
    recency window. `count_penalty`: λ ≥ 0, ranks lost per unit of log count.

    Raise `ValueError` if `count` or `count_penalty` is negative.
    """
    _not_negative(count=count, count_penalty=count_penalty)
    return rank_score - count_penalty * math.log1p(count) - float(recent)


def success_score(credited: int, credit: float) -> float:
    """Return (won + 0.3) / (n + 1), the success record of an experience. **Ours**.

    The retrieval policy `credit` and `bank.evict = "credit"` rank experiences by this score.
    `credited`: n ≥ 0, number of credited episodes that the experience's version guided. `credit`:
    Σ r over them, r = ±1.
    """
    return ((credit + credited) / 2 + PRIOR_SUCCESS_RATE) / (credited + 1)


def training_weight(
    step: int, last_step: int | None, count: int, *, cooldown: int, alpha: float
) -> float:
    """Return w(m) = 0 if t − t_last < δ else (1 + c_train(m))^−α: CRL eq. 7.

    The weight multiplies the advantage of the experience. `step`: t, completed actor steps.
    `last_step`: t_last, the step that last trained on m; None if there was none, and then no
    cooldown applies. `count`: c_train(m) ≥ 0, how often m was trained on. `cooldown`: δ ≥ 0 steps.
    `alpha`: α ≥ 0.

    Raise `ValueError` if count, cooldown or alpha is negative.
    """
    _not_negative(count=count, cooldown=cooldown, alpha=alpha)
    if last_step is not None and step - last_step < cooldown:
        return 0.0
    return (1.0 + count) ** -alpha


def critic_reward(score: float, reward: float) -> float:
    """Return r̃(m) = s_c(m) + r(m): CRL eq. 8.

    `score`: s_c(m), 1 for accept, 0.5 for refine, 0 for reject. `reward`: r(m) ∈ {−1, +1}, by the
    outcome of the episode that m guided. **Ours**: a rejected m guides nothing, so r(m) is not
    observed; the caller passes reward 0 and r̃ = 0.

    Raise `ValueError` if score is outside [0, 1].
    """
    if not 0 <= score <= 1:
        raise ValueError(f"score must be 1 (accept), 0.5 (refine) or 0 (reject), not {score}")
    return score + reward


def experience_reward(verdict: Verdict | None, success: bool) -> float:
    """Return the reward of one episode for the experience m that was retrieved for it.

    This is r(m), or r̃(m) = s_c(m) + r(m) (CRL eq. 8) if the actor judged m. `verdict`: None if the
    actor did not judge m. `success`: success of the episode; r(m) = +1 or −1. So r̃ is 2 or 0 after
    accept, and 1.5 or −0.5 after refine. **Ours**: r̃ is 0 after reject, whatever the outcome,
    because the episode was not guided by m.
    """
    reward = 1.0 if success else -1.0
    if verdict is None:
        return reward
    return critic_reward(CRITIC_SCORES[verdict], 0.0 if verdict == "reject" else reward)


def perplexity_bonus(
    entropy: float,
    guided_entropy: float,
    normaliser: PerplexityNormaliser,
    *,
    weight: float,
    clip_low: float,
    clip_high: float,
    temperature: float,
) -> float:
    """Return the bonus b for an experience that reduces the actor's perplexity: CRL appendix B.2.

    With Δ = H(π|q) − H(π|q, m):

    * relative: w·Δ / H(π|q), clipped to [−clip_low, clip_high]
    * tanh: w·tanh(Δ)
    * sigmoid: w·(2σ(Δ/τ) − 1)
    * asymmetric: w·Δ, clipped to [−clip_low, clip_high]
    * log: w·sgn(Δ)·log(1 + |Δ|)

    B.2 gives no formula for asymmetric. **Ours**: the form above, and clips of the bonus instead of
    the unweighted value, so that they have the unit of the reward r = ±1.

    `entropy`: H(π|q) ≥ 0, the actor's entropy over the query q without experience, in nats per
    token. `guided_entropy`: H(π|q, m), the same with the experience m in the prompt. `weight`:
    w > 0. `temperature`: τ > 0, in nats per token.

    Raise `ValueError` if an entropy is negative, or another normaliser is given.
    """
    _not_negative(entropy=entropy, guided_entropy=guided_entropy)
    reduction = entropy - guided_entropy
    match normaliser:
        case "relative":
            # H(π|q) = 0 leaves nothing to reduce: the reduction is 0 or negative.
            share = reduction / entropy if entropy else -math.inf if reduction else 0.0
            return min(max(weight * share, -clip_low), clip_high)
        case "tanh":
            return weight * math.tanh(reduction)
        case "sigmoid":
            # 2σ(x) − 1 = tanh(x/2), which does not overflow
            return weight * math.tanh(reduction / temperature / 2)
        case "asymmetric":
            return min(max(weight * reduction, -clip_low), clip_high)
        case "log":
            return weight * math.copysign(math.log1p(abs(reduction)), reduction)
    raise ValueError(
        f"normaliser must be one of {get_args(PerplexityNormaliser)}, not {normaliser}"
    )


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, not {value}")

"""The formulas of the experience side: retrieval diversity (eq. 6), training weight (eq. 7), critic reward (eq. 8). No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from crl.types import Verdict

CRITIC_SCORES: Mapping[Verdict, float] = MappingProxyType(
    {"accept": 1.0, "refine": 0.5, "reject": 0.0}
)
"""s_c(m) of CRL appendix B.1."""


def diversity_score(rank_score: float, count: int, recent: bool, *, lam: float) -> float:
    """s(m) = s_rank(m) − λ·log(1 + c(m)) − 1[recent(m)]: CRL eq. 6; the highest score is retrieved.

    rank_score: the candidate's relevance rank score; **ours**: −rank, with rank 0 the most similar. count: how often the
    experience was retrieved so far, c(m) ≥ 0. recent: retrieved within the recency window. lam: λ ≥ 0, rank places lost
    per unit of log count. Raises `ValueError` on a negative count or lam.
    """
    _not_negative(count=count, lam=lam)
    return rank_score - lam * math.log1p(count) - float(recent)


def training_weight(
    step: int, last_step: int | None, count: int, *, cooldown: int, alpha: float
) -> float:
    """w(m) = 0 if t − t_last < δ else (1 + c_train(m))^−α: CRL eq. 7, which multiplies the experience's advantage.

    step: t, completed actor steps; last_step: t_last, the step that last trained on m, None if none did (no cooldown then);
    count: c_train(m) ≥ 0, how often m was trained on; cooldown: δ ≥ 0 steps; alpha: α ≥ 0.
    Raises `ValueError` on a negative count, cooldown or alpha.
    """
    _not_negative(count=count, cooldown=cooldown, alpha=alpha)
    if last_step is not None and step - last_step < cooldown:
        return 0.0
    return (1.0 + count) ** -alpha


def critic_reward(score: float, reward: float) -> float:
    """r̃(m) = s_c(m) + r(m): CRL eq. 8.

    score: s_c, 1 accept, 0.5 refine, 0 reject, outside [0, 1] a `ValueError`; reward: r(m) ∈ {−1, +1} of the episode that m guided.
    **Ours**: after a reject m guided nothing and r(m) was not observed; the caller passes reward 0, so that r̃ = 0.
    """
    if not 0 <= score <= 1:
        raise ValueError(f"score must be 1 (accept), 0.5 (refine) or 0 (reject), not {score}")
    return score + reward


def experience_reward(verdict: Verdict | None, success: bool) -> float:
    """What one episode earns the experience m that was found for it: r(m), or r̃(m) = s_c(m) + r(m) (CRL eq. 8) where m was judged.

    verdict: None = the actor was not asked; success: of the episode, r(m) = +1 or −1. So r̃ is 2 or 0 for what was accepted, 1.5 or
    −0.5 for what was refined, and **ours** 0 for what was rejected, however the episode ended: it went on without m.
    """
    reward = 1.0 if success else -1.0
    if verdict is None:
        return reward
    return critic_reward(CRITIC_SCORES[verdict], 0.0 if verdict == "reject" else reward)


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, not {value}")

"""Step advantages of returns that predictions modulate (Role-Agent §3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crl.algo import discounted_returns
from crl.methods.parts.predicting import Horizons, prediction_rewards
from crl.methods.parts.training import StepAdvantage
from crl.protocols import PerTurn
from crl.types import Trajectory

ROUNDING_ERROR = 1e-9
"""Bound of the rounding error in the sum of an episode's rewards."""


@dataclass(frozen=True)
class PredictedStepAdvantage(StepAdvantage):
    """`AdvantageTerm`: step advantages of returns that predictions modulate (eq. 6, 8).

    The return of turn t is R_t = R_task + c · R_task⁺ · Σ_h γ^(h−1) · r̃(t, h). R_task is the
    discounted return of the rewards r, R_task⁺ that of max(r, 0). A missing prediction has r̃ = 0.
    In tasks without predictions and in failed episodes, R_t is R_task. An episode has failed if it
    is not a success and its rewards sum to 0 or less.

    With rewards r ≥ 0 this is eq. 6: R_task (1 + R_pre). The paper has no other rewards ("suc=1,
    fail=0", Table 5). With a negative return, eq. 6 would punish accurate predictions. **Ours**:
    negative rewards, such as the −1 with which each episode of ALFWorld begins, count without
    modulation, and so do the rewards that a failed episode gains and loses again. Thus a prediction
    never lowers R_t, and no failed episode is "rewarded solely for plausible state predictions"
    (§3.2).
    """

    horizons: Horizons
    """H by task name."""
    coef: float
    """c; 1 in eq. 6."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> PerTurn:
        return self.of_returns(trajectories, [self.modulated_returns(t) for t in trajectories])

    def modulated_returns(self, trajectory: Trajectory) -> list[float]:
        """Return R_t of each turn."""
        returns = self._discounted(trajectory.turn_rewards)
        horizon = self.horizons.get(trajectory.task.name)
        gained = trajectory.success or sum(trajectory.turn_rewards) > ROUNDING_ERROR
        if not horizon or not gained:
            return returns
        positive = self._discounted([max(reward, 0.0) for reward in trajectory.turn_rewards])
        rewards = [
            sum(self.gamma**h * (reward or 0.0) for h, reward in enumerate(row))
            for row in prediction_rewards(trajectory, horizon)
        ]
        return [
            task + self.coef * modulated * reward
            for task, modulated, reward in zip(returns, positive, rewards, strict=True)
        ]

    def _discounted(self, rewards: Sequence[float]) -> list[float]:
        return discounted_returns(rewards, self.gamma).tolist()

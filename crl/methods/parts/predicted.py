"""Step advantages of returns that predictions modulate (Role-Agent §3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crl.algo import discounted_returns
from crl.methods.parts.predicting import Horizons, prediction_rewards
from crl.methods.parts.training import StepAdvantage
from crl.protocols import PerTurn
from crl.types import Trajectory


@dataclass(frozen=True)
class PredictedStepAdvantage(StepAdvantage):
    """`AdvantageTerm`: step advantages of returns that predictions modulate (eq. 6, 8).

    The return of turn t is R_t = R_task (1 + c · Σ_h γ^(h−1) · r̃(t, h)). R_task is the discounted
    return. A missing prediction has r̃ = 0. In tasks without predictions, R_t is R_task.
    """

    horizons: Horizons
    """H by task name."""
    coef: float
    """c; 1 in eq. 6."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> PerTurn:
        return self.of_returns(trajectories, [self.modulated_returns(t) for t in trajectories])

    def modulated_returns(self, trajectory: Trajectory) -> list[float]:
        """Return R_t of each turn."""
        returns = discounted_returns(trajectory.turn_rewards, self.gamma).tolist()
        horizon = self.horizons.get(trajectory.task.name)
        if not horizon:
            return returns
        rewards = [
            sum(self.gamma**h * (reward or 0.0) for h, reward in enumerate(row))
            for row in prediction_rewards(trajectory, horizon)
        ]
        return [r * (1 + self.coef * reward) for r, reward in zip(returns, rewards, strict=True)]

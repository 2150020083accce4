"""Parts that shape training: advantages, training views, losses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean
from typing import TYPE_CHECKING, Literal

import torch

from crl.algo import (
    cispo,
    clipped_surrogate,
    discounted_returns,
    group_advantages,
    similar_states,
    split_group_advantages,
    step_advantages,
)
from crl.protocols import AdvantageTerm, PerTurn, Rerender, TrainSpec
from crl.types import ExperienceUse, TokenTrace, Trajectory

if TYPE_CHECKING:
    from crl.config.schema import ActorSection


@dataclass(frozen=True)
class GroupAdvantage:
    """`AdvantageTerm`: GRPO's advantage within each group (CRL eq. 4)."""

    scale: Literal["std", "none"]
    """Scale of `crl.algo.group_advantages`."""
    weight: float = 1.0
    """Factor of the advantage."""
    reward: Callable[[Trajectory], float] = attrgetter("reward")
    """Reward of an episode."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> torch.Tensor:
        rewards = torch.tensor([self.reward(t) for t in trajectories], dtype=torch.float32)
        groups = torch.tensor([t.group for t in trajectories])
        return self.weight * group_advantages(rewards, groups, scale=self.scale)


@dataclass(frozen=True)
class SplitAdvantage:
    """`AdvantageTerm`: advantage within each group half, guided and free (CRL eq. 5).

    **Ours**: guided members are compared with each other even if different experiences guided them.
    Eq. 4 is defined per group and experience. With `retrieval.per=rollout`, however, most
    experiences guide only one member of a group, and its advantage would always be 0. Our form
    reinforces the members that followed the better lesson. The actor thus learns to distinguish
    lessons as well as to follow them.
    """

    scale: Literal["std", "none"]
    """Scale of `crl.algo.split_group_advantages`."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> torch.Tensor:
        rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float32)
        groups, guided = (
            [t.group for t in trajectories],
            [t.condition == "guided" for t in trajectories],
        )
        return split_group_advantages(
            rewards, torch.tensor(groups), torch.tensor(guided), scale=self.scale
        )


@dataclass(frozen=True)
class StepAdvantage:
    """`AdvantageTerm`: w times the step advantage of GiGPO (arXiv 2505.10978).

    The discounted return of each turn is compared with the returns of turns of the same group that
    were taken in the same state. The state is the observation before the turn. A state that occurs
    once in its group gives 0.

    The mean of a state has one term per turn. That of the episodes (`GroupAdvantage`) has one term
    per episode, so that long episodes do not count more.
    """

    weight: float
    """w."""
    gamma: float
    """Discount per turn."""
    similarity: float
    """Similarity at or above which two observations are one state (`crl.algo.similar_states`)."""
    scale: Literal["std", "none"]
    """Scale of `crl.algo.step_advantages`."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> PerTurn:
        returns = [discounted_returns(t.turn_rewards, self.gamma).tolist() for t in trajectories]
        return self.of_returns(trajectories, returns)

    def of_returns(
        self, trajectories: Sequence[Trajectory], returns: Sequence[Sequence[float]]
    ) -> PerTurn:
        """Return the advantages of given returns, one for each turn of each trajectory."""
        groups = [t.group for t in trajectories for _ in range(t.turns)]
        states = [text for t in trajectories for text in t.turn_states]
        flat = step_advantages(
            [value for values in returns for value in values],
            groups,
            similar_states(states, groups, self.similarity),
            scale=self.scale,
        )
        values = iter((self.weight * flat).tolist())
        return PerTurn([[next(values) for _ in range(t.turns)] for t in trajectories])


@dataclass(frozen=True)
class LiftAdvantage:
    """`AdvantageTerm` for guided members: the benefit of an experience for its group. **Ours**.

    The value is coef · (mean success of the members that the same experience guided − mean success
    of the free members). It is 0 for free members, for guided members without an experience, and in
    groups without a free member. If several experiences guided a member, only the first one counts.

    Eq. 5 compares guided members only with each other. If all of them follow a right experience and
    win, their advantages are 0, and nothing reinforces following.
    """

    coef: float
    """Factor of the advantage."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> torch.Tensor:
        won: defaultdict[tuple[int, ExperienceUse | None], list[bool]] = defaultdict(list)
        keys = [(t.group, t.used[0] if t.used else None) for t in trajectories]
        for t, key in zip(trajectories, keys, strict=True):
            if t.used or t.condition == "free":
                won[key].append(t.success)
        means = {key: fmean(successes) for key, successes in won.items()}
        lifts = [
            means[key] - means[key[0], None] if key[1] and (key[0], None) in means else 0.0
            for key in keys
        ]
        return self.coef * torch.tensor(lifts, dtype=torch.float32)


@dataclass(frozen=True)
class SelfDistillation:
    """Weights of self-distillation: guided episodes that beat the free ones.

    This is the self-distillation of CRL §4.3. The value is coef for guided trajectories with an
    experience whose reward exceeds the mean reward of their group's free members. It is 0 for all
    others, in groups without a free member, and in the steps between two multiples of `every`.
    """

    coef: float
    """Weight of a distilled trajectory."""
    every: int = 1
    """Actor steps between two steps with self-distillation."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> torch.Tensor:
        free: defaultdict[int, list[float]] = defaultdict(list)
        for t in trajectories:
            if t.condition == "free":
                free[t.group].append(t.reward)
        better = [
            (t.address.step + 1) % self.every == 0
            and bool(t.used)
            and t.group in free
            and t.reward > fmean(free[t.group])
            for t in trajectories
        ]
        return self.coef * torch.tensor(better, dtype=torch.float32)


@dataclass(frozen=True)
class FullView:
    """`TrainView` of every sampled token, with unchanged token ids."""

    mask_truncated: bool
    """True if truncated trajectories are excluded."""

    def __call__(self, trajectory: Trajectory, rerender: Rerender) -> Sequence[TokenTrace]:
        return () if self.mask_truncated and trajectory.truncated else trajectory.traces


@dataclass(frozen=True)
class SurrogateLoss:
    """`Loss`: the clipped surrogate (CRL eq. 4, 5), weighted over the whole minibatch.

    The fields except `low_probability` are those of `crl.algo.clipped_surrogate`.
    """

    clip_low: float
    clip_high: float
    ratio: Literal["token", "sequence"]
    low_probability: float = 0.0
    """δ of EMPO² eq. 2: a token with a lower probability under the current policy has the term 0.

    The token still counts in the mean over tokens, and its probability in the ratio of a sequence,
    but it has no gradient. 0 = off.
    """
    dual_clip: float | None = None

    def __call__(
        self,
        logp: torch.Tensor,
        old_logp: torch.Tensor,
        advantage: torch.Tensor,
        mask: torch.Tensor,
        *,
        weights: torch.Tensor,
        total_tokens: int,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
        unlikely = {}
        if self.low_probability:
            likely, trained = logp.detach().exp() >= self.low_probability, mask.bool()
            advantage = (advantage[:, None] if advantage.dim() == 1 else advantage) * likely
            logp = torch.where(likely, logp, logp.detach())
            share = (trained & ~likely).sum() / trained.sum().clamp(min=1)
            unlikely = {"low_probability_fraction": share}
        loss, metrics = clipped_surrogate(
            logp, old_logp, advantage, mask,
            clip_low=self.clip_low, clip_high=self.clip_high, ratio=self.ratio,
            dual_clip=self.dual_clip, weights=weights,
        )  # fmt: skip
        return loss, metrics | unlikely


def actor_role(
    actor: ActorSection, *terms: AdvantageTerm, distillation: SelfDistillation | None = None
) -> TrainSpec:
    """Return the actor's role: the clipped surrogate on every token that the actor sampled.

    `terms`: terms of the actor's advantage, which are summed.
    """
    loss = SurrogateLoss(actor.clip_low, actor.clip_high, actor.ratio)
    return TrainSpec("actor", terms, FullView(actor.mask_truncated), loss, distillation)


@dataclass(frozen=True)
class CispoLoss:
    """`Loss`: CISPO (CRL eq. 3). All tokens of the minibatch have the same weight."""

    clip_low: float
    clip_high: float

    def __call__(
        self,
        logp: torch.Tensor,
        old_logp: torch.Tensor,
        advantage: torch.Tensor,
        mask: torch.Tensor,
        *,
        weights: torch.Tensor,
        total_tokens: int,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
        return cispo(
            logp,
            old_logp,
            advantage,
            mask,
            eps_low=self.clip_low,
            eps_high=self.clip_high,
            total_tokens=total_tokens,
        )

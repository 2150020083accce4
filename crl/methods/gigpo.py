"""GiGPO (Feng et al., arXiv 2505.10978): GRPO with a second advantage for each turn.

The advantage of a turn (a step in the paper) is A = A_E + w · A_S. A_E is GRPO's advantage of the
episode. A_S is the discounted return R_t = Σ_k γ^(k−t) r_k of the turn minus the mean return of all
turns of its group in the same state. Like A_E, it is divided by the standard deviation of what is
compared (`actor.advantage_scale`). The equations are 5, 7 and 8 of Role-Agent (arXiv 2606.10917),
whose eq. 7 compares the turns of a whole batch. A state is the observation before a turn. A state
that occurs once gives 0. There is no experience.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from crl.config.method import MethodSection, MethodSpec
from crl.config.section import NonNegative, Share

if TYPE_CHECKING:
    from crl.config.schema import RunConfig
    from crl.methods.parts.rollouts import ChatContext
    from crl.protocols import Method


class GigpoSection(MethodSection):
    """Settings of the method `gigpo`."""

    TRAINING: ClassVar = ("step_weight", "gamma", "similarity")

    step_weight: NonNegative = 1.0
    """w: weight of the advantage of a turn, relative to that of the episode."""
    gamma: Share = 0.95
    """Discount of the returns per turn."""
    similarity: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Similarity at or above which two observations count as the same state.

    1 = equal texts, as by a hash. Below 1, the similarity is twice the length of the longest common
    subsequence divided by the sum of both lengths.
    """


def build(config: RunConfig, settings: GigpoSection, context: ChatContext) -> Method:
    """Return the method for `config`. `context` writes the prompts of the run's tasks."""
    from crl.methods.parts.rollouts import GuidedShare, OutcomeReward
    from crl.methods.parts.training import GroupAdvantage, StepAdvantage, actor_role
    from crl.protocols import Method

    scale = config.actor.advantage_scale
    step = StepAdvantage(settings.step_weight, settings.gamma, settings.similarity, scale)
    return Method(
        planner=GuidedShare(0.0),
        context=context,
        shaper=OutcomeReward(),
        actor=actor_role(config.actor, GroupAdvantage(scale), step),
    )


SPEC = MethodSpec("gigpo", build, GigpoSection)

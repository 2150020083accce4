"""GRPO: the actor alone, without experience. The baseline of everything else."""

from __future__ import annotations

from crl.config.schema import RunConfig
from crl.methods.parts.rollouts import GuidedShare, OutcomeReward
from crl.methods.parts.training import FullView, GroupAdvantage, SurrogateLoss
from crl.protocols import ContextProvider, Method, Role


def build(config: RunConfig, context: ContextProvider) -> Method:
    """context: how the run's tasks are put to the actor."""
    actor = config.actor
    return Method(
        planner=GuidedShare(0.0),
        context=context,
        shaper=OutcomeReward(),
        actor=Role(
            name="actor",
            terms=(GroupAdvantage(actor.advantage_scale),),
            view=FullView(actor.mask_truncated),
            loss=SurrogateLoss(actor.clip_low, actor.clip_high, actor.ratio),
        ),
    )

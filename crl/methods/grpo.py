"""GRPO: the actor alone, without experience. The baseline of everything else."""

from __future__ import annotations

from collections.abc import Mapping

from crl.config.schema import RunConfig
from crl.methods.parts.rollouts import AllFree, ChatContext, OutcomeReward
from crl.methods.parts.training import FullView, GroupAdvantage, SurrogateLoss
from crl.protocols import Method, Role


def build(config: RunConfig, instructions: Mapping[str, str]) -> Method:
    """`instructions`: the system prompt of each task, by task name."""
    actor = config.actor
    return Method(
        planner=AllFree(),
        context=ChatContext(instructions),
        shaper=OutcomeReward(),
        actor=Role(
            name="actor",
            terms=(GroupAdvantage(actor.advantage_scale),),
            view=FullView(actor.mask_truncated),
            loss=SurrogateLoss(actor.clip_low, actor.clip_high, actor.ratio),
        ),
    )

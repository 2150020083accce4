"""GRPO: the actor alone, without experience. The baseline of everything else."""

from __future__ import annotations

from crl.config.schema import RunConfig
from crl.methods.parts.rollouts import GuidedShare, OutcomeReward
from crl.methods.parts.training import GroupAdvantage, actor_role
from crl.protocols import ContextProvider, Method


def build(config: RunConfig, context: ContextProvider) -> Method:
    """context: how the run's tasks are put to the actor."""
    return Method(
        planner=GuidedShare(0.0),
        context=context,
        shaper=OutcomeReward(),
        actor=actor_role(config.actor, GroupAdvantage(config.actor.advantage_scale)),
    )

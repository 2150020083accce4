"""GRPO: the actor alone, without experience. This is the baseline of all other methods."""

from __future__ import annotations

from crl.config.schema import RunConfig
from crl.methods.parts.rollouts import GuidedShare, OutcomeReward
from crl.methods.parts.training import GroupAdvantage, actor_role
from crl.protocols import ContextProvider, Method


def build(config: RunConfig, context: ContextProvider) -> Method:
    """Return the method for `config`. `context` writes the prompts of the run's tasks."""
    return Method(
        planner=GuidedShare(0.0),
        context=context,
        shaper=OutcomeReward(),
        actor=actor_role(config.actor, GroupAdvantage(config.actor.advantage_scale)),
    )

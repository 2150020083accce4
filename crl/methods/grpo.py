"""GRPO: the actor alone, without experience. This is the baseline of all other methods.

The advantage of an episode is (reward − mean of its group) / standard deviation of its group (CRL
eq. 4; `actor.advantage_scale`). The loss is the clipped surrogate, averaged over the tokens of an
episode. It has one ratio per token; that of eq. 4 is for the whole answer (`actor.ratio`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from crl.config.method import MethodSpec

if TYPE_CHECKING:
    from crl.config.schema import RunConfig
    from crl.methods.parts.rollouts import ChatContext
    from crl.protocols import Method


def build(config: RunConfig, settings: None, context: ChatContext) -> Method:
    """Return the method for `config`. `context` writes the prompts of the run's tasks."""
    from crl.methods.parts.rollouts import GuidedShare, OutcomeReward
    from crl.methods.parts.training import GroupAdvantage, actor_role
    from crl.protocols import Method

    return Method(
        planner=GuidedShare(0.0),
        context=context,
        shaper=OutcomeReward(),
        actor=actor_role(config.actor, GroupAdvantage(config.actor.advantage_scale)),
    )


SPEC = MethodSpec("grpo", build)

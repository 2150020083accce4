"""Role-Agent (Wang et al., arXiv 2606.10917): the actor is both the agent and the environment.

World-in-Agent: the agent predicts the next states in its replies. The similarity of a prediction
and the state that followed raises the return of a turn, R_t = R_task (1 + R_pre) (eq. 6). The
advantages are those of GiGPO with these returns, A = A_S + α · A_E.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from crl.config.method import MethodSpec
from crl.config.section import Section

if TYPE_CHECKING:
    from crl.config.schema import RunConfig
    from crl.methods.parts.rollouts import ChatContext
    from crl.protocols import Method

Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0)]


class RoleAgentSection(Section):
    """Settings of the method `role_agent`."""

    prediction_weight: Weight = 1.0
    """c in R_t = R_task (1 + c · R_pre). 0 = nothing is predicted.

    1 is eq. 6. The released code has 0.2.
    """
    horizon: Share = 0.05
    """Number H of predicted states in a reply, as a share of the task's max_turns.

    H is rounded and at least 1. 0.05 is the paper's value: 2 states for 50 turns, 1 for 15. 0 gives
    H = 1 for all tasks, as in the released code.
    """
    episode_weight: Weight = 1.0
    """α: weight of the advantage of the episode, relative to that of the step."""
    gamma: Share = 0.95
    """Discount of the returns per turn, and of the predictions per state.

    The paper gives no value. The default is that of GiGPO.
    """
    similarity: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Similarity from which two observations count as the same state, see gigpo.similarity.

    1 = equal texts, as in eq. 7 and Algorithm 1. §4.1 has 0.9, which merges different states of
    ALFWorld.
    """


def build(config: RunConfig, settings: RoleAgentSection, context: ChatContext) -> Method:
    """Return the method for `config`. `context` writes the prompts of the run's tasks."""
    from crl.methods.parts.predicted import PredictedStepAdvantage
    from crl.methods.parts.predicting import PredictionMetrics, horizons, requests
    from crl.methods.parts.rollouts import GuidedShare, OutcomeReward
    from crl.methods.parts.training import GroupAdvantage, actor_role
    from crl.protocols import Method

    scale, coef = config.actor.advantage_scale, settings.prediction_weight
    predicted = horizons(config.tasks, settings.horizon) if coef else {}
    step = PredictedStepAdvantage(1.0, settings.gamma, settings.similarity, scale, predicted, coef)
    return Method(
        planner=GuidedShare(0.0),
        context=context.with_predictions(requests(predicted, config.prompts.files)),
        shaper=OutcomeReward(),
        actor=actor_role(config.actor, GroupAdvantage(scale, settings.episode_weight), step),
        measure=PredictionMetrics(predicted),
    )


SPEC = MethodSpec("role_agent", build, RoleAgentSection)

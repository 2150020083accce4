"""Role-Agent (Wang et al., arXiv 2606.10917): the actor is both the agent and the environment.

World-in-Agent (§3.2): the agent predicts the next H states in its replies, in evaluations too. The
similarity r̃ of a prediction and the state that followed (`crl.algo.states.similarity`) raises the
return of a turn to R_task · (1 + c · Σ_h γ^(h−1) r̃(t, h)), if a positive reward follows and the
episode has not failed (`PredictedStepAdvantage`, eq. 4 to 6). The advantages are those of GiGPO
with these returns, A = A_S + α · A_E (eq. 7 and 8, line 17 of Algorithm 1).

Agent-in-World (§3.3): after a failed episode, the actor writes a note with failure mode
(`crl.manager.failure_notes`), lesson and query into the bank. Training tasks with similar failures
are retrieved and drawn again (`crl.methods.parts.replay`). No agent is shown a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from crl.config.method import MethodSection, MethodSpec, Notes, Part, parts_with_writer
from crl.config.section import Count, NonNegative, Share
from crl.methods.parts import failure_settings as library

if TYPE_CHECKING:
    from crl.config.schema import RunConfig
    from crl.methods.parts.rollouts import ChatContext
    from crl.protocols import Method


class RoleAgentSection(MethodSection):
    """Settings of the method `role_agent`."""

    SWITCHES: ClassVar = library.UNUSED_WITHOUT
    TRAINING: ClassVar = ("episode_weight", "gamma", "similarity")

    prediction_weight: NonNegative = 1.0
    """Weight c of the predictions in the returns: 1 in eq. 6, 0.2 in the released code. 0 = off.

    With actor.advantage_scale = "std", it hardly matters in states with equal outcomes.
    """
    horizon: Share = 0.05
    """Number H of predicted states in a reply, as a share of the task's max_turns.

    H is rounded (a half to the even number) and at least 1. The paper's 0.05 gives 2 states for 30
    and for 50 turns, and 1 for 15. 0 gives H = 1 for all tasks, as in the released code.
    """
    episode_weight: NonNegative = 1.0
    """α: weight of the advantage of the episode, relative to that of the turn."""
    gamma: Share = 0.95
    """Discount of the returns per turn, and of the predictions per state.

    The paper gives no value. The default is that of GiGPO.
    """
    similarity: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Similarity at or above which two observations count as the same state, see gigpo.similarity.

    1 = equal texts, as in eq. 7 and Algorithm 1. §4.1 has 0.9, which merges different states of
    ALFWorld.
    """
    replay_ratio: Share = 0.25
    """Probability that a drawn training task is a retrieved one. 0 = failures are not analysed.

    The paper gives no value. With the default, most tasks are new.
    """
    writer: Literal["actor", "extractor"] = "actor"
    """Model that analyses failures: in the paper the actor. The bundled actor cannot write."""
    retrieval: Literal["embedding", "model"] = "embedding"
    """Choice of the tasks with similar failures.

    embedding = the failures whose notes are nearest to the query; model = the writer chooses among
    the nearest, as in the paper (Figure 9). The default needs no further answers, and suits tiny
    models.
    """
    matches: Count = 3
    """Maximum number of tasks that are retrieved for a failure mode of a group (Figure 10: 3)."""
    history: Count = 2000
    """Number of the last drawn training tasks that can be retrieved. The paper has no limit."""

    def unused_reason(self, config: RunConfig, name: str) -> tuple[str, str] | None:
        """Return why the setting `name` has no effect and the remedy; None if it has an effect."""
        return super().unused_reason(config, name) or library.unpredicted_reason(config, name)

    def plan(self, config: RunConfig) -> list[str]:
        """Return the lines of a plan for the predictions and the replay."""
        return library.plan_roles(config, self)

    def prompts(self) -> frozenset[str]:
        """Return the prompts of predictions and of retrieval, if they are used."""
        used = {"predict": self.prediction_weight, "retrieve": self.retrieval == "model"}
        return frozenset(name for name in used if used[name])

    def measured(self, config: RunConfig) -> Mapping[str, Any]:
        """Return the request for predictions, which is part of the prompts of evaluations."""
        from crl.methods.parts.predicting import measured_request

        return measured_request(config, self.horizon if self.prediction_weight else None)


def build(config: RunConfig, settings: RoleAgentSection, context: ChatContext) -> Method:
    """Return the method for `config`. `context` writes the prompts of the run's tasks."""
    from crl.methods.parts.distilling import FailedEpisodes
    from crl.methods.parts.predicted import PredictedStepAdvantage
    from crl.methods.parts.predicting import PredictionMetrics, horizons, requests
    from crl.methods.parts.replay import failure_replay
    from crl.methods.parts.rollouts import GuidedShare, OutcomeReward
    from crl.methods.parts.training import GroupAdvantage, actor_role
    from crl.protocols import Method, StepParts

    scale, files = config.actor.advantage_scale, config.prompts.files
    coef = settings.prediction_weight
    predicted = horizons(config.tasks, settings.horizon) if coef else {}
    metrics = PredictionMetrics(predicted)
    turns = PredictedStepAdvantage(
        weight=1.0, gamma=settings.gamma, similarity=settings.similarity, scale=scale,
        horizons=predicted, coef=coef,
    )  # fmt: skip
    return Method(
        planner=GuidedShare(0.0),
        context=context.with_predictions(requests(predicted, files)),
        shaper=OutcomeReward(),
        actor=actor_role(config.actor, GroupAdvantage(scale, settings.episode_weight), turns),
        distiller=FailedEpisodes() if config.with_bank else None,
        step=StepParts(
            replay=failure_replay(config, settings),
            measure=metrics,
            predicted=metrics.share if predicted else None,
        ),
    )


def parts(settings: RoleAgentSection) -> frozenset[Part]:
    """Return the parts of a run; without a bank if failures are not analysed."""
    return parts_with_writer(settings) if settings.replay_ratio else frozenset({"probe"})


SPEC = MethodSpec(
    "role_agent",
    build,
    RoleAgentSection,
    uses=parts,
    notes=Notes("failure"),
    defaults=library.LIBRARY_DEFAULTS,
    check=library.check_library,
)

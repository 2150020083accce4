"""EMPO² (Liu et al., arXiv 2602.23008): GRPO with a memory of tips, on- and off-policy.

After each episode, the actor (`empo2.writer`) writes a tip into a memory for the variation of the
task, which keeps the last 1,000. The memory is the bank, and `distiller` selects the episodes. A
training step is played with memory with probability p, otherwise without. With memory, the tips
near the current state (cosine of at least 0.5) are shown before every turn, those of the episodes
with the highest rewards first, and stay in the conversation. Steps with memory are trained in one
of two modes. On-policy, the prompts keep the tips. Off-policy (probability q), the episodes are
rendered again without them, so that the actor learns to act without tips (eq. 2, appendix C). Novel
states give an intrinsic reward (§4.2). The tokens of tips are not trained on.

Evaluations are played without memory, with that of the run, and with one that is built in unseen
places (Figure 8). Algorithm 1 and the text contradict each other; the settings name the readings.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from crl.config.method import Guidance, MethodSection, MethodSpec, Notes, parts_with_writer
from crl.config.section import Count, NonNegative, Share
from crl.methods.parts import memory_settings as memory

if TYPE_CHECKING:
    from crl.config.schema import RunConfig
    from crl.methods.parts.rollouts import ChatContext
    from crl.protocols import Method


class Empo2Section(MethodSection):
    """Settings of the method `empo2`."""

    SHOWN: ClassVar = ("tips",)
    SWITCHES: ClassVar = memory.UNUSED_WITHOUT
    TRAINING: ClassVar = memory.OF_TRAINING

    memory_share: Share = 0.25
    """p: probability that a training step is played with memory.

    p and q are named as in §4.2, in appendix F.1 and in the released code. Algorithm 1 swaps them.
    """
    off_policy_share: Share = 2 / 3
    """q: probability that a step with memory is trained off-policy, without the tips."""
    off_policy_old: Literal["with_tips", "without_tips"] = "with_tips"
    """Prompts of the old log-probs in off-policy training.

    with_tips = those of the rollout, as in appendix C and in the released code; the ratio then
    corrects for the policy that sampled. without_tips = without the tips, as in §4.2 and in
    Algorithm 1; the ratio starts at 1.
    """
    low_probability: Annotated[float, Field(ge=0, lt=1)] = math.exp(-5)
    """δ of eq. 2: tokens with a lower probability get no advantage. 0 = off.

    The paper gives no value. The default is the log-prob −5 of the released code.
    """
    dual_clip: Annotated[float, Field(gt=1)] = 10.0
    """c of the dual clip: with a negative advantage A, the term of a token is at least c · A.

    The paper's "clipping ratio coefficient" (D.2).
    """
    key: Literal["conversation", "state"] = "conversation"
    """Key of a tip, and of the searches before a turn: that of the last state with an action.

    conversation = all texts up to the state, as in Listing 1. Their beginning is the same, so a tip
    is found from the first turn on. state = the observation, as in §4.2. A tip is then found where
    this state returns, which is often after the mistake that it warns of.
    """
    tips: Count = 10
    """Maximum number of tips that are retrieved before a turn."""
    writer: Literal["actor", "extractor"] = "actor"
    """Model that writes the tips. In the paper it is the actor. The bundled actor cannot write."""
    novelty_coef: NonNegative = 0.01
    """Weight of the intrinsic reward, the sum of 1/n over the states of an episode. 0 = off.

    n is the number of visits to the most similar known state of the same variation, this visit
    included. The paper has a coefficient without a value (F.2), and scores of up to 100 (Table 1).
    """
    novelty_in: Literal["advantage", "reward"] = "advantage"
    """Sum of which the intrinsic reward is a term: the paper does not say which.

    advantage = its difference from the group's mean is a term, so the weight has an effect, as in
    F.2. reward = with actor.advantage_scale = "std", the advantages of a group of equal outcomes
    then depend on novelty alone, whatever its weight is.
    """
    novelty_states: Literal["visited", "new"] = "visited"
    """States that give an intrinsic reward.

    visited = every one in which an episode acted, so that 1/n has an effect: a state that returns
    earns less. new = only those that are similar to no earlier one (n = 1), as in the text of §4.2.
    """
    novelty_similarity: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Cosine similarity at or above which two states count as similar. The paper gives no value."""


def build(config: RunConfig, settings: Empo2Section, context: ChatContext) -> Method:
    """Return the method for `config`. `context` writes the prompts of the run's tasks."""
    from dataclasses import replace

    from crl.manager.keys import STATE_KEYS
    from crl.methods.parts.distilling import EveryEpisode, NoEpisode
    from crl.methods.parts.memory import MemorySteps, StrippedView
    from crl.methods.parts.novelty import advantage_terms, novelty_parts
    from crl.methods.parts.rollouts import OutcomeReward
    from crl.methods.parts.training import SurrogateLoss
    from crl.protocols import Advice, Method, TrainSpec
    from crl.types import BEHAVIOUR, STEP_START

    actor, seed = config.actor, config.run.seed
    old = BEHAVIOUR if settings.off_policy_old == "with_tips" else STEP_START
    off_policy = MemorySteps(settings.off_policy_share, seed, "update mode")
    loss = SurrogateLoss(
        actor.clip_low, actor.clip_high, actor.ratio, settings.low_probability, settings.dual_clip
    )
    return Method(
        planner=MemorySteps(settings.memory_share, seed, "rollout mode"),
        context=replace(context.without_records(), state=STATE_KEYS[settings.key]),
        shaper=OutcomeReward(),
        actor=TrainSpec(
            "actor",
            advantage_terms(settings, actor.advantage_scale),
            StrippedView(off_policy, old, actor.mask_truncated),
            loss,
        ),
        distiller=NoEpisode() if config.bank.frozen else EveryEpisode(),
        advice=Advice(settings.tips, every_turn=True),
        step=novelty_parts(settings),
    )


SPEC = MethodSpec(
    "empo2",
    build,
    Empo2Section,
    uses=parts_with_writer,
    notes=Notes("tip", key=lambda settings: settings.key),
    guidance=Guidance(
        lambda settings, members: members if settings.memory_share else 0,
        lambda settings: (
            f"a step is guided with probability {settings.memory_share:g}, by at most "
            f"{settings.tips} tips before every turn"
        ),
    ),
    defaults=memory.MEMORY_DEFAULTS,
    check=memory.check_memory,
)

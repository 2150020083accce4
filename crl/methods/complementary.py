"""Complementary RL (CRL §2.3): actor and extractor are trained together.

The actor is guided by experience that the extractor distils from its episodes, and that
`crl.manager.retrieval` chooses (eq. 6). Guided and free members of a group have separate advantages
(eq. 5). An experience earns r = ±1 for each episode that it guided (`crl.rollout.crediting`). The
extractor is trained on these rewards with CISPO (eq. 3; eq. 7: `crl.manager.credit`). Evaluations
are played without experience, with the bank of the run, and with a bank that is built in unseen
places. The defaults here are the paper's, except those marked **Ours**. For tiny models, the preset
`cpu` changes several. docs/algorithm.md lists switches and departures. The baseline is
`--method grpo`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from crl.config.method import Guidance, MethodSection, MethodSpec
from crl.config.section import Count, NonNegative
from crl.errors import ConfigError

if TYPE_CHECKING:
    from crl.config.schema import RunConfig
    from crl.methods.parts.rollouts import ChatContext
    from crl.protocols import Method


class ComplementarySection(MethodSection):
    """Ablations and extensions of the method `complementary`."""

    SHOWN: ClassVar = ("show_record",)
    SWITCHES: ClassVar = {"self_distillation_every": "complementary.self_distillation"}
    TRAINING: ClassVar = ("advantages", "lift_coef", *SWITCHES, "self_distillation")

    guided_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a group's members that are guided by experience.

    0.5 = half of them, as in the paper. The share must give a whole number of members.
    """
    advantages: Literal["split", "cross"] = "split"
    """Members that are compared in an advantage.

    split = guided and free members separately (eq. 5), regardless of the experience that guided
    them; cross = all members of the group (eq. 4). In the loss, each half has half of the weight.
    """
    lift_coef: NonNegative = 0.0
    """Weight of a second advantage of guided members (**ours**).

    This advantage is the mean success of the members that the same experience guided minus the mean
    success of the free members. 0 = off, only eq. 5, as in the paper.
    """
    self_distillation: NonNegative = 0.0
    """Weight of self-distillation (CRL §4.3), relative to the policy loss.

    It is the next-token loss on the actions of guided members whose reward exceeds the mean reward
    of the free members. Their prompts are rendered again without the experience, the tool
    search_and_ask and the questions. 0 = off, as in the paper's main runs.
    """
    self_distillation_every: Count = 1
    """Number of actor steps between two steps with self-distillation.

    1 = every step, as in the paper, whose run collapsed late. The paper proposes periodic
    self-distillation as a remedy and did not try it. With n, the steps n, 2n, … have it.
    """
    show_record: bool = False
    """True if guided agents are shown the record of their experience (**ours**).

    The record is the number of earlier episodes that the experience guided and how many of them
    succeeded; language models also see its lift. The bundled actor was not trained to read it.
    """

    def unused_reason(self, config: RunConfig, name: str) -> tuple[str, str] | None:
        """Return why the setting `name` has no effect and the remedy; None if it has an effect."""
        compared = name in ("lift_coef", "self_distillation") and getattr(self, name) > 0
        if compared and self.guided_share == 1:
            cause = "complementary.guided_share is 1, so a group has no free members"
            return f"{cause} to compare with", "Remove one of the two settings"
        return super().unused_reason(config, name)


def build(config: RunConfig, settings: ComplementarySection, context: ChatContext) -> Method:
    """Return the method for `config`. `context` writes the prompts of the run's tasks."""
    from crl.methods.parts.distilling import EveryEpisode, NoEpisode
    from crl.methods.parts.rollouts import GuidedShare, OutcomeReward
    from crl.methods.parts.training import (
        CispoLoss,
        GroupAdvantage,
        LiftAdvantage,
        SelfDistillation,
        SplitAdvantage,
        actor_role,
    )
    from crl.protocols import AdvantageTerm, ExtractorRole, Method

    extractor = config.extractor
    group_advantage = SplitAdvantage if settings.advantages == "split" else GroupAdvantage
    terms: list[AdvantageTerm] = [group_advantage(config.actor.advantage_scale)]
    if settings.lift_coef:
        terms.append(LiftAdvantage(settings.lift_coef))
    distillation = None
    if weight := settings.self_distillation:
        distillation = SelfDistillation(weight, settings.self_distillation_every)
    return Method(
        planner=GuidedShare(settings.guided_share),
        context=context if settings.show_record else context.without_records(),
        shaper=OutcomeReward(),
        actor=actor_role(config.actor, *terms, distillation=distillation),
        distiller=NoEpisode() if config.bank.frozen else EveryEpisode(),
        extractor=ExtractorRole(CispoLoss(extractor.clip_low, extractor.clip_high), extractor.batch)
        if config.trains_extractor
        else None,
    )


def guided_members(settings: ComplementarySection, members: int) -> int:
    """Return how many of a group's members are guided."""
    return round(members * settings.guided_share)


def check(config: RunConfig, settings: ComplementarySection) -> None:
    """Raise `ConfigError` if the share gives no whole number, or only one member in a half."""
    size, share = config.rollout.group_size, settings.guided_share
    guided, reason, remedy = guided_members(settings, size), "", ""
    if not math.isclose(guided, share * size):
        reason = f"gives no whole number of members in a group of {size} (rollout.group_size)"
        remedy = f"Choose a multiple of 1/{size}, or another group size"
    elif settings.advantages == "split" and 1 in (guided, size - guided):
        reason = (
            f"gives one guided or one free member in a group of {size}: it is compared "
            "with no other member, so its advantage is always 0"
        )
        remedy = (
            "Choose another share, a larger rollout.group_size, or complementary.advantages=cross"
        )
    if reason:
        raise ConfigError("complementary.guided_share", share, reason, remedy)


SPEC = MethodSpec(
    "complementary",
    build,
    ComplementarySection,
    uses=frozenset({"bank", "extractor", "probe"}),
    guidance=Guidance(guided_members),
    check=check,
)

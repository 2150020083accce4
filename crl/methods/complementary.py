"""Complementary RL (CRL §2.3): actor and extractor are trained together.

The actor is guided by experience that the extractor distils from the actor's episodes. Switches:
`complementary.guided_share`, `complementary.advantages`, `complementary.lift_coef`,
`complementary.self_distillation`, `extractor.train`, `bank.frozen`, `retrieval.per`.
The baseline without experience is `--method grpo`.
"""

from __future__ import annotations

from crl.config.schema import RunConfig
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
from crl.protocols import AdvantageTerm, ContextProvider, ExtractorRole, Method


def build(config: RunConfig, context: ContextProvider) -> Method:
    """Return the method for `config`. `context` writes the prompts of the run's tasks."""
    extractor, switches = config.extractor, config.complementary
    group_advantage = SplitAdvantage if switches.advantages == "split" else GroupAdvantage
    terms: list[AdvantageTerm] = [group_advantage(config.actor.advantage_scale)]
    if switches.lift_coef:
        terms.append(LiftAdvantage(switches.lift_coef))
    distillation = (
        SelfDistillation(switches.self_distillation) if switches.self_distillation else None
    )
    train_extractor = extractor.train and not config.bank.frozen
    return Method(
        planner=GuidedShare(switches.guided_share),
        context=context,
        shaper=OutcomeReward(),
        actor=actor_role(config.actor, *terms, distillation=distillation),
        distiller=NoEpisode() if config.bank.frozen else EveryEpisode(),
        extractor=ExtractorRole(CispoLoss(extractor.clip_low, extractor.clip_high), extractor.batch)
        if train_extractor
        else None,
    )

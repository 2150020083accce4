"""Complementary RL: an actor guided by what an extractor distilled from its episodes, and both trained (CRL §2.3).

Its switches: `complementary.guided`, `complementary.advantages`, `complementary.listening`,
`complementary.self_distillation`, `complementary.show_record`, `extractor.train`, `bank.frozen`,
`retrieval.per`.
The baseline without experience is `--method grpo`.
"""

from __future__ import annotations

from crl.config.schema import RunConfig
from crl.methods.parts.distilling import EveryEpisode, NoEpisode
from crl.methods.parts.rollouts import GuidedShare, OutcomeReward
from crl.methods.parts.training import CispoLoss, GroupAdvantage, ListeningAdvantage, SelfDistillation, SplitAdvantage, actor_role
from crl.protocols import AdvantageTerm, ContextProvider, ExtractorRole, Method


def build(config: RunConfig, context: ContextProvider) -> Method:
    """context: how the run's tasks are put to the actor."""
    extractor, switches = config.extractor, config.complementary
    compared = SplitAdvantage if switches.advantages == "split" else GroupAdvantage
    terms: list[AdvantageTerm] = [compared(config.actor.advantage_scale)]
    if switches.listening:
        terms.append(ListeningAdvantage(switches.listening))
    distillation = SelfDistillation(switches.self_distillation) if switches.self_distillation else None
    trained = extractor.train and not config.bank.frozen
    return Method(
        planner=GuidedShare(switches.guided),
        context=context,
        shaper=OutcomeReward(),
        actor=actor_role(config.actor, *terms, distillation=distillation),
        distiller=NoEpisode() if config.bank.frozen else EveryEpisode(),
        extractor=ExtractorRole(CispoLoss(extractor.clip_low, extractor.clip_high), extractor.batch) if trained else None,
    )

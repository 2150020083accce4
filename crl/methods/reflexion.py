"""Reflexion (Shinn et al., arXiv 2303.11366): attempts with reflections, without training.

The members of a group are attempts at its task, one after the other, until one succeeds. After a
failed attempt, the actor or the extractor reflects on it in words. The last reflections guide the
next attempt (Algorithm 1; `crl.rollout.attempts`). `rollout.group_size` is the maximum number of
attempts. The paper's Evaluator is the environment, which reports the success.

**Ours**: the reflections are also experiences of the bank, each for its own game. Evaluations are
played without reflections, with those of the bank, and in unseen places with those of earlier
visits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from crl.config.method import (
    NOTE_DEFAULTS,
    Guidance,
    MethodSection,
    MethodSpec,
    Notes,
    check_notes,
    parts_with_writer,
)
from crl.config.section import Count
from crl.errors import ConfigError

if TYPE_CHECKING:
    from crl.config.schema import RunConfig
    from crl.methods.parts.rollouts import ChatContext
    from crl.protocols import Method


class ReflexionSection(MethodSection):
    """Settings of the method `reflexion`."""

    SHOWN: ClassVar = ("memory",)

    writer: Literal["actor", "extractor"] = "actor"
    """Model that reflects on failed attempts: in the paper the actor. The bundled actor cannot."""
    memory: Count = 3
    """Maximum number of reflections that guide an attempt (Ω in the paper, 1 to 3)."""


def build(config: RunConfig, settings: ReflexionSection, context: ChatContext) -> Method:
    """Return the method for `config`. `context` writes the prompts of the run's tasks."""
    from crl.methods.parts.distilling import FailedEpisodes
    from crl.methods.parts.rollouts import GuidedShare, OutcomeReward
    from crl.methods.parts.training import actor_role
    from crl.protocols import Advice, Method

    return Method(
        planner=GuidedShare(1.0),
        context=context.without_records(),
        shaper=OutcomeReward(),
        actor=actor_role(config.actor),
        distiller=FailedEpisodes(),
        advice=Advice(settings.memory, between_attempts=True),
    )


def check(config: RunConfig, settings: ReflexionSection) -> None:
    """Raise `ConfigError` for settings that contradict attempts without training."""
    if config.actor.train:
        reason = "cannot be used: reflexion trains no model"
        raise ConfigError("actor.train", True, reason, "Choose another method")
    if config.bank.frozen:
        reason = "leaves nothing to learn: reflexion trains no model"
        raise ConfigError("bank.frozen", True, reason, "Leave it out")
    check_notes(config, settings)


SPEC = MethodSpec(
    "reflexion",
    build,
    ReflexionSection,
    uses=lambda settings: parts_with_writer(settings) - {"probe"},
    notes=Notes("reflection"),
    guidance=Guidance(
        lambda settings, members: members,
        lambda settings: (
            f"attempts one after the other, guided by the last {settings.memory} reflections; "
            f"evaluations are guided by at most {settings.memory}"
        ),
        attempts=True,
    ),
    # In evaluations, the reflections on a game with the best record come first, however similar the
    # goal is. The paper has no bound for their number.
    defaults={
        **NOTE_DEFAULTS,
        "actor": {"train": False},
        "bank": {"scope": "variation", "max_entries": 16_000},
        "retrieval": {**NOTE_DEFAULTS["retrieval"], "min_similarity": -1.0},
    },
    check=check,
)

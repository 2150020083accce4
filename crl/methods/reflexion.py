"""Reflexion (Shinn et al., arXiv 2303.11366): attempts with reflections, without training.

The members of a group are attempts at its task, one after the other, until one succeeds. After a
failed attempt, the actor or the extractor reflects on it in words. The last reflections guide the
next attempt. `rollout.group_size` is the maximum number of attempts.

The reflections are also experiences of the bank, each for its own goal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from crl.config.method import NOTE_DEFAULTS, MethodSpec, Part, check_notes
from crl.config.section import Count, Section

if TYPE_CHECKING:
    from crl.config.schema import RunConfig
    from crl.methods.parts.rollouts import ChatContext
    from crl.protocols import Method


class ReflexionSection(Section):
    """Settings of the method `reflexion`."""

    reflector: Literal["actor", "extractor"] = "actor"
    """Model that reflects on failed attempts. In the paper it is the actor."""
    memory: Count = 3
    """Maximum number of reflections that guide an attempt (Ω in the paper, 1 to 3)."""


def build(config: RunConfig, settings: ReflexionSection, context: ChatContext) -> Method:
    """Return the method for `config`. `context` writes the prompts of the run's tasks."""
    from crl.methods.parts.distilling import FailedEpisodes, NoEpisode
    from crl.methods.parts.rollouts import GuidedShare, OutcomeReward
    from crl.methods.parts.training import actor_role
    from crl.protocols import Advice, Method

    return Method(
        planner=GuidedShare(1.0),
        context=context.without_records(),
        shaper=OutcomeReward(),
        actor=actor_role(config.actor),
        distiller=NoEpisode() if config.bank.frozen else FailedEpisodes(),
        advice=Advice(settings.memory),
        attempts=settings.memory,
    )


def unused_parts(settings: ReflexionSection) -> frozenset[Part]:
    """Return the extractor, unless it is the one who reflects."""
    return frozenset({"extractor"} if settings.reflector == "actor" else ())


SPEC = MethodSpec(
    "reflexion",
    build,
    ReflexionSection,
    uses=frozenset({"bank", "extractor"}),
    unused_parts=unused_parts,
    trains_actor=False,
    note="reflection",
    guidance=lambda settings: (
        f"attempts one after the other, guided by at most {settings.memory} reflections"
    ),
    # In evaluations, all reflections on a goal are eligible, those with the best record first.
    defaults={
        **NOTE_DEFAULTS,
        "bank": {"scope": "goal"},
        "retrieval": {**NOTE_DEFAULTS["retrieval"], "min_similarity": -1.0},
    },
    guided_members=lambda settings, members: members,
    check=check_notes,
)

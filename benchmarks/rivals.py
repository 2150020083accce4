"""Rival methods as switches of crl: Evolving-RL, MemRL and SkillOS. `RIVALS` has their arms.

    python benchmarks/coevolution.py --figure rivals

Each rival is a few settings of crl, with the parts of this module where a setting is not enough.
Models, environment, episodes per step and evaluations are those of the arm `co-evolved`, so only
the rule of the rival differs. The models of this benchmark are the bundled tiny ones. Everything
that is not listed below has the value of the preset `cpu`. No code of the rivals is used.

Common to all three:

* Assumed: a *task that a lesson is reused on* is a later visit of the same place, with other
  dynamics. The stream visits a place five times, some places for the whole run.
* Assumed: an episode reads one lesson. MemRL shows 3 to 5 memories, and SkillOS 5 skills.
* Assumed: the reward is r = ±1, not 0 or 1. Advantages relative to a mean differ by a factor of 2.
* Assumed: half of the members of a group stay free, so that all arms have the metric `free`.
  Their episodes are distilled too. In MemRL and SkillOS every episode retrieves. `evolving-rl` has
  one free member.
* Left out: the rivals' prompts and models. The tiny extractor writes one short lesson.
* Online evaluations distil every episode of a visit once, as in all arms.

Evolving-RL (arXiv 2605.10663; details from its code, github.com/Fanzy27/Evolving-RL), the arm
`evolving-rl`:

* One source episode without experience gives N candidates, which other episodes evaluate: the
  method `EVOLVING_RL`. In its code N is 8, with one episode in each of 4 tasks. Here a group of 8
  has one source and 7 guided members, so N is 7, with one episode for each candidate.
* The extractor's reward is the success of the candidate's episodes, relative to the mean over the N
  candidates: `extractor.baseline=guided`, because one group evaluates the candidates of one source.
* The solver is trained on the evaluations, in GRPO groups of one task: the guided members. The
  source is not trained on: the only free member of a group has the advantage 0. There is no lift
  advantage.
* Every candidate is evaluated, the least evaluated one first: `retrieval.trial_share=1.0`.
* There is no bank beyond the candidates of the last source: `bank.max_per_goal=7`, first in, first
  out. Evaluations with a bank draw one of them at random (`SIMILAR`).
* Assumed: the candidates wait for the next visit of the place. There, every evaluation is one of
  the N. In the paper, evaluation follows at once, in tasks that are similar to the source.
* Left out: parameters that extractor and solver share, with the weight 0.2 for the extractor. The
  models are separate in all arms.
* Left out: the division by the standard deviation in the extractor's advantage.
* Changed: an answer without a usable operation earns −1 (preset), not 0. It is the lowest reward in
  both.

MemRL (arXiv 2601.03192 v2; details also from its code, github.com/MemTensor/MemRL), the arms
`memrl` and `memrl retrieval`:

* Q of a memory is an exponential moving average of the rewards of the episodes that used it: eq. 4,
  with α = 0.3, start 0, and r = ±1 as in its code for ALFWorld.
* Two-phase retrieval: eq. 6 keeps the candidates above a similarity, and eq. 7 scores them by
  (1 − λ) · z(similarity) + λ · z(Q) with λ = 0.5, greedily (ε = 0 in its code for ALFWorld): the
  policy `VALUE`, `retrieval.trial_share=0.0`.
* Phase A is `retrieval.min_similarity` and `retrieval.margin` of the preset, which admit the
  lessons of the same place. `retrieval.candidates=1024` (k1) admits all of them.
* The key of a memory is its intent alone: `bank.key_text_weight=1e-6`.
* `memrl`: the actor is frozen and the extractor is not trained, as in the paper. Nothing is evicted
  (`bank.max_per_goal=1000000`).
* `memrl retrieval`: co-evolution with the retrieval of MemRL. The bank keeps eviction by credit.
* z is taken over the candidates, as in the paper. The code has a fixed mean and deviation for the
  similarity.
* Left out: memories that are merged with a similar one, and the clip of z(Q) at ±3 (code only).

SkillOS (arXiv 2605.06614; its code is not published; weights and eq. 1 as quoted by an independent
implementation, github.com/belt-sh/skillos), the arm `skillos`:

* The executor is frozen (`actor.optimizer.learning_rate=0.0`), and the curator is trained.
* The curator inserts and updates skills after each episode: the operations add and update. It
  deletes skills with the operation discard of the merge pass (`extractor.merge_every=5`).
* Grouped task streams are the visits of a place: earlier visits write lessons, later ones evaluate
  them.
* Its reward is eq. 1, r_task + λ_f r_fc + λ_u r_cnt + λ_c r_comp with λ_f = 1, λ_u = 0.1 and
  λ_c = 0.05. r_task is the success of later episodes.
* Advantages are relative to other curations for the same task, as in GRPO:
  `extractor.baseline=guided`. In the paper, 8 rollouts curate the same stream. Here, the lessons
  that guide the members of one group are compared.
* Changed: r_task is the success of the episodes that used the lesson. In the paper it is the mean
  success of all later tasks of the stream, the same for all operations of a rollout.
* Changed: r_fc, the share of valid operations, is −1 for an answer without one (preset).
* Left out: r_cnt needs a judge, which the tiny models cannot replace. r_comp is a bound instead:
  the length of a lesson is limited (preset).
* Changed: a stream does not start with an empty repository. The bank keeps the newest 8 lessons of
  a place (`bank.evict=fifo`), so that the current curator has written them.
* Assumed: retrieval by similarity has no record of success: `SIMILAR` without trials. In the paper
  it is BM25.
* The weight of the KL term is that of the preset. Sources differ on whether SkillOS has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean
from typing import TYPE_CHECKING

from crl.config.method import Guidance, MethodSpec
from crl.config.retrieval import RetrievalPolicy
from crl.errors import ConfigError

if TYPE_CHECKING:
    from crl.config.schema import RetrievalSection, RunConfig
    from crl.manager.retrieval.choice import Candidate
    from crl.methods.parts.rollouts import ChatContext
    from crl.protocols import Method
    from crl.types import Trajectory

# ── Evolving-RL ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class SourceCandidates:
    """`DistillationFilter` that selects the free member of each group, once for each candidate.

    The candidates of a source are told apart by members that the group does not have: member m
    gives m, m + `members`, m + 2 · `members`, … The id of a request must be unique, and it seeds
    the extractor's sampling.
    """

    members: int
    """Members of a group. There are `members` − 1 candidates."""

    def select(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        return [
            replace(
                source,
                address=replace(source.address, member=source.address.member + n * self.members),
            )
            for source in trajectories
            if source.condition == "free" and source.error is None
            for n in range(self.members - 1)
        ]


def build(config: RunConfig, settings: None, context: ChatContext) -> Method:
    """Return the method for `config`. `context` writes the prompts of the run's tasks."""
    from crl.methods.parts.distilling import NoEpisode
    from crl.methods.parts.rollouts import GuidedShare, OutcomeReward
    from crl.methods.parts.training import CispoLoss, SplitAdvantage, actor_role
    from crl.protocols import ExtractorRole, Method

    extractor, members = config.extractor, config.rollout.group_size
    return Method(
        planner=GuidedShare(guided_members(settings, members) / members),
        context=context.without_records(),
        shaper=OutcomeReward(),
        actor=actor_role(config.actor, SplitAdvantage(config.actor.advantage_scale)),
        distiller=NoEpisode() if config.bank.frozen else SourceCandidates(members),
        extractor=ExtractorRole(CispoLoss(extractor.clip_low, extractor.clip_high), extractor.batch)
        if config.trains_extractor
        else None,
    )


def guided_members(settings: None, members: int) -> int:
    """Return how many of a group's members evaluate candidates: all except the source."""
    return members - 1


def check(config: RunConfig, settings: None) -> None:
    """Raise `ConfigError` for groups without at least two evaluations."""
    size = config.rollout.group_size
    if size < 3:
        reason = "leaves fewer than two evaluations beside the source episode"
        raise ConfigError("rollout.group_size", size, reason, "Choose at least 3")


EVOLVING_RL = MethodSpec(
    "evolving_rl",
    build,
    uses=frozenset({"bank", "extractor", "probe"}),
    guidance=Guidance(guided_members),
    check=check,
)

# ── MemRL ─────────────────────────────────────────────────────────────────────────────────────────

LEARNING_RATE = 0.3
"""α of eq. 4 (MemRL Table 8)."""
Q_START = 0.0
"""Q of a new memory, also if its episode failed."""
VALUE_WEIGHT = 0.5
"""λ of eq. 7 (MemRL Table 8)."""
EQUAL = 1e-6
"""Standard deviation below which values count as equal: float32 similarities of equal keys."""


def q_value(outcomes: Sequence[float]) -> float:
    """Return Q after these rewards: Q ← Q + α (r − Q), MemRL eq. 4.

    `outcomes`: r = ±1 of the last episodes that the memory guided, the oldest first. Older ones
    than `crl.types.MAX_OUTCOMES` = 64 would change Q by less than 1e-9.
    """
    value = Q_START
    for reward in outcomes:
        value += LEARNING_RATE * (reward - value)
    return value


def z_scores(values: Sequence[float]) -> list[float]:
    """Return (value − mean) / std over the candidates; 0 if all values are equal."""
    mean = fmean(values)
    deviation = sqrt(fmean((value - mean) ** 2 for value in values))
    return [(value - mean) / deviation if deviation > EQUAL else 0.0 for value in values]


def value_scores(
    candidates: Sequence[Candidate], step: int, settings: RetrievalSection
) -> list[float]:
    """Return (1 − λ) · z(similarity) + λ · z(Q) of each candidate: MemRL eq. 7."""
    similarities = z_scores([candidate.similarity for candidate in candidates])
    values = z_scores([q_value(c.entry.counters.outcomes) for c in candidates])
    return [
        (1 - VALUE_WEIGHT) * similarity + VALUE_WEIGHT * value
        for similarity, value in zip(similarities, values, strict=True)
    ]


VALUE = RetrievalPolicy(value_scores, "similarity and Q (MemRL)")

# ── Evolving-RL and SkillOS ───────────────────────────────────────────────────────────────────────


def equal_scores(
    candidates: Sequence[Candidate], step: int, settings: RetrievalSection
) -> list[float]:
    """Return the same score for all candidates, so that one of them is drawn at random.

    They are about equally similar (`retrieval.margin`), and no record of success is used.
    """
    return [0.0] * len(candidates)


SIMILAR = RetrievalPolicy(equal_scores, "similarity alone")

# ── arms ──────────────────────────────────────────────────────────────────────────────────────────

_FILE = "benchmarks/rivals.py"
_MEMRL_RETRIEVAL = (
    f"retrieval.choice={_FILE}:VALUE", "retrieval.trial_share=0.0", "bank.key_text_weight=1e-6",
)  # fmt: skip
_FROZEN_ACTOR = "actor.optimizer.learning_rate=0.0"

RIVALS: Mapping[str, tuple[str, ...]] = {
    "evolving-rl": (
        f"method={_FILE}:EVOLVING_RL", "extractor.baseline=guided",
        "bank.max_per_goal=7", "bank.evict=fifo",
        f"retrieval.choice={_FILE}:SIMILAR", "retrieval.trial_share=1.0",
    ),
    "memrl": (
        _FROZEN_ACTOR, "extractor.train=false", "bank.max_per_goal=1000000", "bank.evict=fifo",
        *_MEMRL_RETRIEVAL, "retrieval.candidates=1024",
    ),
    "memrl retrieval": _MEMRL_RETRIEVAL,
    "skillos": (
        _FROZEN_ACTOR, "extractor.baseline=guided", "extractor.merge_every=5", "bank.evict=fifo",
        f"retrieval.choice={_FILE}:SIMILAR", "retrieval.trial_share=0.0",
    ),
}  # fmt: skip
"""Settings by name of the arm."""

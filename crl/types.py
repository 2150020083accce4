"""The data that travels between the rooms. Frozen, and checked when it is made: a bad record fails where it was born.

Task → Trajectory (segments for people, token traces for training) → TrainSample → Minibatch → PublishHandle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from crl.intervals import t_975

Role = Literal["system", "user", "assistant", "tool"]
Origin = Literal["task", "env", "policy", "tool_spec", "tool_call", "tool_result", "experience"]
Condition = Literal["guided", "free"]
Split = Literal["train", "known", "new"]
Finish = Literal["stop", "length"]
ExperienceStatus = Literal["active", "evicted", "merged"]
UseKind = Literal["start", "ask", "ask_unrefined"]
Verdict = Literal["accept", "refine", "reject"]
Param = int | float | str | bool

GUIDANCE_ORIGINS = frozenset({"experience", "tool_spec", "tool_call", "tool_result"})
"""Segments that only an experience-guided episode may hold; a stripped view drops them."""


def _one_of(name: str, value: object, literal: Any) -> None:
    if value not in get_args(literal):
        raise ValueError(f"{name} must be one of {get_args(literal)}, not {value!r}")


def _same_length(**columns: tuple[Any, ...]) -> None:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns differ in length: {lengths}")


@dataclass(frozen=True, slots=True)
class Task:
    """One episode's definition: layout *and* dynamics. `reset(task)` twice is the same episode.

    `params` carries what one seed cannot, such as NetHack's `lgen` (layout) and `core` (dynamics).
    """

    name: str
    seed: int
    split: Split
    goal: str
    params: Mapping[str, Param] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _one_of("split", self.split, Split)
        if not self.name:
            raise ValueError("a task needs a name")
        object.__setattr__(self, "params", dict(self.params))


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a conversation and where it came from. Prompts are lists of segments (see `crl.tokens`)."""

    role: Role
    text: str
    origin: Origin

    def __post_init__(self) -> None:
        _one_of("role", self.role, Role)
        _one_of("origin", self.origin, Origin)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one completion. Temperature only: truncation (top-p, top-k) would make importance ratios wrong.

    `temperature` 0 is greedy. `max_tokens` counts sampled tokens, the stop token included.
    """

    max_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be finite and not negative, not {self.temperature}")


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled: token ids, the log-prob of each under the sampling distribution, and the policy version of each."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish

    def __post_init__(self) -> None:
        _same_length(ids=self.ids, logprobs=self.logprobs, versions=self.versions)
        _one_of("finish", self.finish, Finish)


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """Append-only token record of one training sample: what was sampled is trained as it was sampled.

    Columns of equal length: `ids`; `mask` (1 on sampled tokens only); `logprobs` of the behaviour policy and the
    `versions` that sampled (0.0 and -1 where the mask is 0).
    """

    ids: tuple[int, ...] = ()
    mask: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _same_length(ids=self.ids, mask=self.mask, logprobs=self.logprobs, versions=self.versions)
        if self.mask.count(0) + self.mask.count(1) != len(self.mask):
            raise ValueError("the mask holds only 0 and 1")

    def with_context(self, ids: tuple[int, ...]) -> TokenTrace:
        """This trace and then `ids`, which nobody sampled."""
        n = len(ids)
        return TokenTrace(self.ids + ids, self.mask + (0,) * n, self.logprobs + (0.0,) * n, self.versions + (-1,) * n)

    def with_sampled(self, completion: Completion) -> TokenTrace:
        """This trace and then what the policy sampled."""
        return TokenTrace(
            self.ids + completion.ids,
            self.mask + (1,) * len(completion.ids),
            self.logprobs + completion.logprobs,
            self.versions + completion.versions,
        )

    def until_last_sampled(self) -> TokenTrace:
        """This trace without the context that nothing was sampled after; empty when nothing was sampled at all."""
        end = max((i + 1 for i, sampled in enumerate(self.mask) if sampled), default=0)
        return TokenTrace(self.ids[:end], self.mask[:end], self.logprobs[:end], self.versions[:end])


@dataclass(frozen=True, slots=True)
class Lift:
    """What an experience adds: success with it minus success without any, in the same groups.

    A group gives one difference: the mean success of the members that the experience guided minus
    that of the group's experience-free members. The sum of two lifts is that of their groups
    together.

    The interval of the mean is a credible interval. The sample variance of a few groups says
    little: differences that happen to be equal have none. The variance of a difference therefore
    has a scaled inverse-χ² prior with one degree of freedom and scale 1, the largest variance of
    values in [−1, 1]; the prior of the mean is uniform. The posterior of the mean is Student's t
    with `groups` degrees of freedom, centre `mean` and squared scale (1 + m2) / groups² (Gelman et
    al., Bayesian Data Analysis, 3rd ed., sections 3.2 and 3.3). The interval of one group is wide.
    """

    groups: int
    """Groups that gave a difference, at least one."""
    mean: float
    """Mean of the differences, in [−1, 1]."""
    m2: float = 0.0
    """Sum of the squared deviations from the mean."""

    def __post_init__(self) -> None:
        if self.groups < 1 or not abs(self.mean) <= 1 + 1e-9 or not 0 <= self.m2 <= self.groups + 1e-6:
            raise ValueError(f"a lift needs a group, a mean in [−1, 1] and an m2 of 0 or more, not {self}")

    def __add__(self, other: Lift) -> Lift:
        """Pool the groups of both (Chan, Golub & LeVeque 1983)."""
        groups, apart = self.groups + other.groups, other.mean - self.mean
        mean = self.mean + apart * other.groups / groups
        return Lift(groups, mean, self.m2 + other.m2 + apart**2 * self.groups * other.groups / groups)

    def __neg__(self) -> Lift:
        return Lift(self.groups, -self.mean, self.m2)

    @property
    def half(self) -> float:
        """Half the width of the 95 % credible interval, t_975(groups) · √(1 + m2) / groups."""
        return t_975(self.groups) * math.sqrt(1 + self.m2) / self.groups

    @property
    def sign(self) -> int:
        """1 or −1 where the 95 % credible interval is above or below 0, else 0."""
        return 0 if abs(self.mean) <= self.half else 1 if self.mean > 0 else -1

    @property
    def low(self) -> float:
        """Lower end of the 95 % credible interval; −1, the least possible lift, if below that."""
        return max(-1.0, self.mean - self.half)


def lift_order(lift: Lift | None) -> tuple[float, float]:
    """Return a sort key: the highest lower end first, then the highest mean; unknown ones last.

    Lifts with a lower end of −1, such as those of one group, are ordered by their means. An order
    by the mean alone would put the luck of a few groups first.
    """
    return (-lift.low, -lift.mean) if lift else (1.0, math.inf)


@dataclass(frozen=True, slots=True)
class TrackRecord:
    """Outcomes of the episodes that one version of an experience guided."""

    credited: int = 0
    """Number of credited episodes."""
    won: int = 0
    """Number of credited episodes that succeeded."""
    lift: float | None = None
    """Mean success with the experience minus without one, in [−1, 1]; None if unknown."""


NO_RECORD = TrackRecord()


@dataclass(frozen=True, slots=True)
class Experience:
    """A bank entry at one version. `span`: its tokens' range in the generation that wrote it; `goal`: of the episode that taught
    it; `parents`: its lineage."""

    uid: str
    version: int
    text: str
    task: str
    generation: str
    span: tuple[int, int]
    goal: str = ""
    parents: tuple[str, ...] = ()
    status: ExperienceStatus = "active"
    retrieved: int = 0
    credited: int = 0
    credit: float = 0.0
    lift: Lift | None = None
    """None before the first group that has experience-free members too."""

    def __post_init__(self) -> None:
        _one_of("status", self.status, ExperienceStatus)
        if self.version < 1 or self.span[0] > self.span[1]:
            raise ValueError(f"bad version or span: {self.version}, {self.span}")


@dataclass(frozen=True, slots=True)
class ExperienceUse:
    """That an episode was guided by one version of one experience, and how it got there.

    verdict: what the actor said of it; None where it was not asked.
    """

    uid: str
    version: int
    generation: str
    how: UseKind
    verdict: Verdict | None = None

    def __post_init__(self) -> None:
        _one_of("how", self.how, UseKind)
        if self.verdict is not None:
            _one_of("verdict", self.verdict, Verdict)

    @property
    def reworded(self) -> bool:
        """Whether the agent read other words than the experience's: the extractor's answer to its question, or its own."""
        return self.how == "ask" or self.verdict == "refine"


@dataclass(frozen=True, slots=True)
class Observation:
    """What the environment shows at the start of an episode."""

    text: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one action did. An invalid action does not advance the game: `valid` is False and `text` tells the agent.

    score: how well the episode has gone so far, in [0, 1], where the environment grades that apart from its reward.
    """

    text: str
    reward: float = 0.0
    done: bool = False
    success: bool = False
    valid: bool = True
    score: float | None = None


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """What one member of a group may see."""

    condition: Condition

    def __post_init__(self) -> None:
        _one_of("condition", self.condition, Condition)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished episode. `segments` is the conversation as the agent saw it; `traces` are its training samples.

    `reward` is the training reward, the sum of the channels in `rewards`; `success` is the environment's own verdict, `score` its
    grade in [0, 1] where it gives one: neither is trained on.
    `truncated`: ended by the turn, generation or context limit. `error`: None, or why the episode could not be finished;
    such a trajectory is never trained on. `used`: the experiences that guided it; `shown`: their texts, in the same order;
    `rejected`: those that it went on without. `turns`: environment turns that count;
    `overtime_turns`: those played after them, which are neither rewarded nor trained on.
    `sampled_tokens`: tokens that the actor sampled, overtime included.
    """

    task: Task
    step: int
    group: int
    member: int
    condition: Condition
    segments: tuple[Segment, ...] = ()
    traces: tuple[TokenTrace, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    reward: float = 0.0
    success: bool = False
    score: float | None = None
    turns: int = 0
    overtime_turns: int = 0
    invalid_actions: int = 0
    sampled_tokens: int = 0
    used: tuple[ExperienceUse, ...] = ()
    shown: tuple[str, ...] = ()
    rejected: tuple[ExperienceUse, ...] = ()
    truncated: bool = False
    error: str | None = None

    def __post_init__(self) -> None:
        _one_of("condition", self.condition, Condition)
        if not math.isfinite(self.reward):
            raise ValueError(f"reward must be finite, not {self.reward}")
        _same_length(used=self.used, shown=self.shown)
        if self.condition == "free" and (self.used or self.rejected or any(s.origin in GUIDANCE_ORIGINS for s in self.segments)):
            raise ValueError("an experience-free trajectory must not have seen an experience, nor a tool to ask for one")
        if any(use.verdict == "reject" for use in self.used) or any(use.verdict != "reject" for use in self.rejected):
            raise ValueError("what was rejected guides no trajectory, and what was not is not among the rejected")
        object.__setattr__(self, "rewards", dict(self.rewards))

    def with_rewards(self, rewards: Mapping[str, float]) -> Trajectory:
        """This trajectory with other reward channels; its reward is their sum."""
        return replace(self, rewards=rewards, reward=sum(rewards.values()))


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One sequence for a learner: a trace, its advantage (one number, or one per token) and its weight in the minibatch."""

    trace: TokenTrace
    advantage: float | tuple[float, ...]
    weight: float

    def __post_init__(self) -> None:
        if isinstance(self.advantage, tuple) and len(self.advantage) != len(self.trace.ids):
            raise ValueError("a per-token advantage needs one value per token")


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The samples of one optimizer update. `total_tokens` counts trained tokens before samples without signal were dropped. `probe`: is
    not trained; on it the trainer's log-probs are held against the engine's."""

    samples: tuple[TrainSample, ...]
    total_tokens: int
    probe: tuple[TokenTrace, ...] = ()


@dataclass(frozen=True, slots=True)
class StepStats:
    """What a learner's step did: `updates` optimizer updates applied, `skipped` refused by the NaN guard."""

    updates: int
    skipped: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", dict(self.metrics))

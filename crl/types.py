"""Data types that packages exchange.

All of them are frozen. Values that can be invalid are checked in the constructor, so that a bad
record raises `ValueError` where it is created.

Data flow: Task → Trajectory (segments for readers, token traces for training) → TrainSample →
Minibatch → PublishHandle.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from crl.intervals import t_975

RoleName = Literal["actor", "extractor"]
Role = Literal["system", "user", "assistant", "tool"]
Origin = Literal["task", "env", "policy", "tool_spec", "tool_call", "tool_result", "experience"]
Condition = Literal["guided", "free"]
Split = Literal["train", "seen", "unseen"]
"""Origin of a task: the train stream, or the seen or the unseen split of an evaluation."""

SPLIT_DRAW_NAMES: Mapping[Split, str] = MappingProxyType(
    {"train": "train", "seen": "known", "unseen": "new"}
)
"""Name of each split in random draws and session names.

They are the old names of the splits. Other names would change the draws, and thereby the results of
every run.
"""

Finish = Literal["stop", "length"]
ExperienceStatus = Literal["active", "evicted", "merged"]
UseKind = Literal["start", "ask", "ask_unrefined"]
"""Path on which an experience reached an episode.

* start: retrieved at the start of the episode.
* ask: retrieved for a question of the agent and rewritten by the extractor.
* ask_unrefined: retrieved for a question of the agent and returned unchanged.
"""

Verdict = Literal["accept", "refine", "reject"]
Param = int | float | str | bool

SAMPLED_ORIGINS: frozenset[Origin] = frozenset({"policy", "tool_call"})
"""Origins of the segments that the policy wrote."""

GUIDANCE_ORIGINS: frozenset[Origin] = frozenset(
    {"experience", "tool_spec", "tool_call", "tool_result"}
)
"""Origins of segments that only a guided episode may contain. Unguided views drop them."""


def _check_choice(name: str, value: object, literal: Any) -> None:
    if value not in get_args(literal):
        raise ValueError(f"{name} must be one of {get_args(literal)}, not {value!r}")


def _check_same_length(**columns: tuple[Any, ...]) -> None:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns differ in length: {lengths}")


@dataclass(frozen=True)
class StreamSettings:
    """Settings of the train stream of an environment with persistent places.

    Other environments ignore them.
    """

    places: int = 32
    """Number of named places that exist at the same time."""
    permanent: int = 8
    """Number of places that stay for the whole run.

    The seen split is evaluated in these places.
    """
    visits: int = 5
    """Number of visits after which a place that is not permanent gets a new layout."""

    def __post_init__(self) -> None:
        if self.places < 1 or not 0 <= self.permanent <= self.places:
            raise ValueError(
                f"places must be at least 1, and permanent must be between 0 and places, "
                f"not {self.places} and {self.permanent}"
            )
        if self.visits < 1:
            raise ValueError(f"visits must be at least 1, not {self.visits}")


class Place(NamedTuple):
    """Place that an episode is played in, as experience refers to it."""

    task: str
    """Name of the task."""
    goal: str
    variation: str = ""
    """Variation among the task's games with this goal; empty if the goal names the place."""


@dataclass(frozen=True, slots=True)
class Task:
    """Definition of one episode, including layout *and* dynamics.

    Two calls of `reset(task)` start the same episode.
    """

    name: str
    seed: int
    split: Split
    goal: str
    params: Mapping[str, Param] = field(default_factory=dict)
    """Parameters beyond `seed`, such as NetHack's seeds `lgen` (layout) and `core` (dynamics).

    `variation` separates places with the same goal (`Task.place`).
    """

    def __post_init__(self) -> None:
        _check_choice("split", self.split, Split)
        if not self.name:
            raise ValueError("a task's name must not be empty")
        object.__setattr__(self, "params", dict(self.params))

    @property
    def place(self) -> Place:
        """Place of the episode. Its variation is the parameter `variation`."""
        return Place(self.name, self.goal, str(self.params.get("variation", "")))


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a conversation, with its origin. Prompts are lists of segments."""

    role: Role
    text: str
    origin: Origin

    def __post_init__(self) -> None:
        _check_choice("role", self.role, Role)
        _check_choice("origin", self.origin, Origin)


COMMANDS = "\nCommands: "
"""Separator before the commands that a game accepts now. An observation may end with them."""


def states(segments: Iterable[Segment]) -> list[str]:
    """Return the states between the actions of a conversation: one more than it has actions.

    A state is the text that the environment shows since the last action, without `COMMANDS` and
    what follows them. It is empty if the environment shows none.
    """
    texts: list[list[str]] = [[]]
    for segment in segments:
        if segment.origin == "env":
            texts[-1].append(segment.text.rsplit(COMMANDS, 1)[0])
        elif segment.origin == "policy":
            texts.append([])
    return ["\n".join(parts) for parts in texts]


def task_text(segments: Iterable[Segment]) -> str:
    """Return the text of the task of an episode. Raise `ValueError` if its segments have none."""
    texts = [segment.text for segment in segments if segment.origin == "task"]
    if not texts:
        raise ValueError("the episode names no task")
    return "\n".join(texts)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one completion."""

    max_tokens: int
    """Maximum number of sampled tokens, including the stop token."""
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy decoding."""
    top_p: float = 1.0
    """Probability mass of the most probable tokens that are kept, after `top_k`; 1 keeps all."""
    top_k: int = 0
    """Number of most probable tokens that are kept; 0 keeps all."""
    json_schema: str = ""
    """JSON schema that the completion must match, as JSON text; empty for any completion.

    An engine excludes all tokens that the schema forbids and renormalises over the others.
    """

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be finite and not negative, not {self.temperature}")
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(
                "top_p must be in (0, 1], and top_k must not be negative, "
                f"not {self.top_p} and {self.top_k}"
            )

    @property
    def truncated(self) -> bool:
        """True if top-p or top-k drop tokens. Greedy decoding ignores both."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


KeptSet = bytes
"""Kept set of a sampled token: ids of the tokens that top-p and top-k kept, as int32.

The sampled token is one of them. An empty kept set stands for the whole vocabulary.
"""

KEPT_ID_BYTES = 4
"""Bytes of one id in a `KeptSet`."""


def kept_counts(kept: Iterable[KeptSet]) -> list[int]:
    """Return the number of ids in each kept set."""
    return [len(ids) // KEPT_ID_BYTES for ids in kept]


def split_kept(ids: bytes, counts: Iterable[int]) -> tuple[KeptSet, ...]:
    """Return the kept sets with these numbers of ids, whose concatenation is `ids`."""
    ends = list(accumulate((KEPT_ID_BYTES * count for count in counts), initial=0))
    return tuple(ids[start:end] for start, end in pairwise(ends))


@dataclass(frozen=True, slots=True)
class Completion:
    """Tokens that an engine sampled. The columns have equal length."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-prob of each token under the sampling distribution."""
    versions: tuple[int, ...]
    """Policy version that sampled each token."""
    finish: Finish
    kept: tuple[KeptSet, ...] = ()
    """Kept set of each token. () stands for empty kept sets."""

    def __post_init__(self) -> None:
        _fill_kept(self)
        _check_same_length(
            ids=self.ids, logprobs=self.logprobs, versions=self.versions, kept=self.kept
        )
        _check_choice("finish", self.finish, Finish)


def _fill_kept(record: Completion | TokenTrace) -> None:
    """Replace `kept` = () by one empty kept set per token."""
    if not record.kept:
        object.__setattr__(record, "kept", (b"",) * len(record.ids))


CURRENT_POLICY = -1
"""Version in a `TokenTrace`: the old log-probs are those of the learner at the update.

The importance ratio is 1, and the gradient is that of the advantage times the log-likelihood.
"""

STEP_START = -2
"""Version in a `TokenTrace`: the old log-probs are those of the learner at the start of the step.

The learner computes them before its first update.
"""

BEHAVIOUR = -3
"""Version in a `TokenTrace`: the old log-probs are those of the policy that sampled the tokens.

It sampled them after another prompt, so the importance ratio also corrects for the prompt.
"""

OldPolicy = Literal[-1, -2, -3]
"""`CURRENT_POLICY`, `STEP_START` or `BEHAVIOUR`."""


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """Append-only token record of one training sample.

    Sampled token ids are trained unchanged. The columns have equal length.
    """

    ids: tuple[int, ...] = ()
    mask: tuple[int, ...] = ()
    """1 for sampled tokens, 0 for context tokens."""
    logprobs: tuple[float, ...] = ()
    """Log-probs under the behaviour policy; 0.0 where the mask is 0."""
    versions: tuple[int, ...] = ()
    """Policy version that sampled each token; −1 where the mask is 0.

    Sampled tokens after another prompt than the one they were sampled for have
    `CURRENT_POLICY`, `STEP_START` or `BEHAVIOUR` instead.
    """
    kept: tuple[KeptSet, ...] = ()
    """Kept set of each token; empty where the mask is 0, and after another prompt.

    The learner's log-prob of a token is renormalised over its kept set. () stands for empty kept
    sets.
    """

    def __post_init__(self) -> None:
        _fill_kept(self)
        _check_same_length(
            ids=self.ids,
            mask=self.mask,
            logprobs=self.logprobs,
            versions=self.versions,
            kept=self.kept,
        )
        if self.mask.count(0) + self.mask.count(1) != len(self.mask):
            raise ValueError("the mask may contain only 0 and 1")

    def __reduce__(self) -> tuple[Callable[..., TokenTrace], tuple[bytes, ...]]:
        """Pickle the columns as bytes.

        Tuples of thousands of numbers would keep the interpreter lock from the event loop for long.
        """
        return _unpickled_trace, (
            array("q", self.ids).tobytes(),
            bytes(self.mask),
            array("d", self.logprobs).tobytes(),
            array("q", self.versions).tobytes(),
            b"".join(self.kept),
            array("q", kept_counts(self.kept)).tobytes(),
        )

    def with_context(self, ids: tuple[int, ...]) -> TokenTrace:
        """Return this trace with `ids` appended as context, with mask 0."""
        n = len(ids)
        return TokenTrace(
            self.ids + ids,
            self.mask + (0,) * n,
            self.logprobs + (0.0,) * n,
            self.versions + (-1,) * n,
            self.kept + (b"",) * n,
        )

    def with_sampled(self, completion: Completion) -> TokenTrace:
        """Return this trace with `completion` appended as sampled tokens, with mask 1."""
        return TokenTrace(
            self.ids + completion.ids,
            self.mask + (1,) * len(completion.ids),
            self.logprobs + completion.logprobs,
            self.versions + completion.versions,
            self.kept + completion.kept,
        )

    def completions(self) -> Iterator[range]:
        """Yield the positions of every sampled completion, in order."""
        start = 0
        for sampled, run in groupby(self.mask):
            end = start + len(tuple(run))
            if sampled:
                yield range(start, end)
            start = end

    def until_last_sampled(self) -> TokenTrace:
        """Return this trace up to its last sampled token; empty if it has no sampled token."""
        end = len(self.mask) - self.mask[::-1].index(1) if 1 in self.mask else 0
        return TokenTrace(
            self.ids[:end],
            self.mask[:end],
            self.logprobs[:end],
            self.versions[:end],
            self.kept[:end],
        )


def _unpickled_trace(
    ids: bytes, mask: bytes, logprobs: bytes, versions: bytes, kept: bytes, counts: bytes
) -> TokenTrace:
    return TokenTrace(
        tuple(array("q", ids)),
        tuple(mask),
        tuple(array("d", logprobs)),
        tuple(array("q", versions)),
        split_kept(kept, array("q", counts)),
    )


@dataclass(frozen=True, slots=True)
class Lift:
    """Effect of an experience on success: success with it minus success without any experience.

    Both are measured in the same groups. Each group yields one difference: the mean success of the
    members that the experience guided minus the mean success of the group's free members. The sum
    of two lifts is the lift over the groups of both.

    The interval of the mean is a credible interval. The sample variance of a few groups is
    unreliable: it is 0 if the differences happen to be equal. Therefore the variance of a
    difference has a scaled inverse-χ² prior with one degree of freedom and scale 1, which is the
    largest variance of values in [−1, 1]. The prior of the mean is uniform. The posterior of the
    mean is Student's t with `groups` degrees of freedom, centre `mean` and squared scale
    (1 + m2) / groups² (Gelman et al., Bayesian Data Analysis, 3rd ed., sections 3.2 and 3.3).
    The interval from a single group is wide.
    """

    groups: int
    """Number of groups that yielded a difference; at least 1."""
    mean: float
    """Mean of the differences, in [−1, 1]."""
    m2: float = 0.0
    """Sum of the squared deviations of the differences from their mean."""

    def __post_init__(self) -> None:
        if (
            self.groups < 1
            or not abs(self.mean) <= 1 + 1e-9
            or not 0 <= self.m2 <= self.groups + 1e-6
        ):
            raise ValueError(
                "a lift needs at least one group, a mean in [−1, 1] and 0 ≤ m2 ≤ groups, "
                f"not {self}"
            )

    def __add__(self, other: Lift) -> Lift:
        """Return the lift over the groups of both (Chan, Golub & LeVeque 1983)."""
        groups, difference = self.groups + other.groups, other.mean - self.mean
        mean = self.mean + difference * other.groups / groups
        return Lift(
            groups, mean, self.m2 + other.m2 + difference**2 * self.groups * other.groups / groups
        )

    def __neg__(self) -> Lift:
        return Lift(self.groups, -self.mean, self.m2)

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % credible interval, t_975(groups) · √(1 + m2) / groups."""
        return t_975(self.groups) * math.sqrt(1 + self.m2) / self.groups

    @property
    def sign(self) -> int:
        """1 if the 95 % credible interval is above 0, −1 if it is below 0, otherwise 0."""
        return 0 if abs(self.mean) <= self.half_width else 1 if self.mean > 0 else -1

    @property
    def low(self) -> float:
        """Lower end of the 95 % credible interval, at least −1 (the lowest possible lift)."""
        return max(-1.0, self.mean - self.half_width)

    @property
    def high(self) -> float:
        """Upper end of the 95 % credible interval, at most 1 (the highest possible lift)."""
        return min(1.0, self.mean + self.half_width)


def lift_order(lift: Lift | None) -> tuple[float, float]:
    """Return a sort key: the highest `low` first, then the highest mean; None last.

    Lifts with equal `low`, such as the −1 of a single group, are ordered by their means. Sorting by
    the mean alone would put lifts first that are high by chance, because they have few groups.
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


MAX_OUTCOMES = 64
"""Maximum number of outcomes that `Counters.outcomes` holds."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of one version of an experience."""

    retrieved: int = 0
    """c(m) of CRL eq. 6: number of times that a search returned the version."""
    last_returned_step: int | None = None
    """Actor step at which a search last returned the version.

    None if no search returned it, or if the last one belonged to another run.
    """
    credited: int = 0
    """Number of credited episodes that the version guided."""
    credit: float = 0.0
    """Σ r over the credited episodes, with r = ±1."""
    votes: int = 0
    """Up votes of the extractor minus its down votes."""
    lift: Lift | None = None
    """Lift; None before the first group that also has free members."""
    outcomes: tuple[float, ...] = ()
    """r = ±1 of the last `MAX_OUTCOMES` credited episodes, in the order of their credit.

    Only the entries of an open bank have outcomes. Imported entries start without them.
    """

    @property
    def won(self) -> int:
        """Number of credited episodes that succeeded."""
        return round((self.credited + self.credit) / 2)

    @property
    def record(self) -> TrackRecord:
        """Outcomes, as models read them."""
        return TrackRecord(self.credited, self.won, self.lift.mean if self.lift else None)


NO_COUNTERS = Counters()

RewardBaseline = Literal["batch", "group", "guided"]
"""Baseline of the extractor's rewards, see `ExtractorSection.baseline` in `crl.config.schema`."""

PerplexityNormaliser = Literal["relative", "tanh", "sigmoid", "asymmetric", "log"]
"""Normaliser of the perplexity-reduction reward, see `crl.algo.perplexity_bonus`."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Provenance of one version of an experience."""

    generation: str
    """Id of the generation that wrote the version."""
    span: tuple[int, int]
    """Tokens [start, stop) of the experience in the sampled tokens of its generation."""
    parents: tuple[str, ...] = ()
    """Versions that the version was made from, as `uid@version`."""
    reward: float | None = None
    """Sum of the environment's rewards in the episode that the version was written about.

    None if it is unknown, or if the version was written about no episode.
    """


@dataclass(frozen=True, slots=True)
class Experience:
    """Bank entry at one version, with the counters of that version."""

    uid: str
    """Id of the entry, the same for all versions."""
    version: int
    """Number of the version, from 1."""
    text: str
    """Experience as the agent reads it."""
    task: str
    """Name of the task that this entry was distilled from."""
    goal: str
    """Goal of the episode that this entry was distilled from."""
    provenance: Provenance
    """Provenance of this version."""
    counters: Counters = NO_COUNTERS
    """Counters of this version."""
    status: ExperienceStatus = "active"

    def __post_init__(self) -> None:
        _check_choice("status", self.status, ExperienceStatus)
        start, stop = self.provenance.span
        if self.version < 1 or start > stop:
            raise ValueError(f"invalid version or span: {self.version}, {(start, stop)}")


@dataclass(frozen=True, slots=True)
class ExperienceUse:
    """Use of one version of an experience in an episode."""

    uid: str
    version: int
    generation: str
    """Id of the generation that wrote the text: the entry's, or the refinement's for `ask`."""
    how: UseKind
    verdict: Verdict | None = None
    """Actor's verdict on the experience; None if it was not judged.

    In runs that judge experiences, an experience for a question is accepted without being judged.
    """

    def __post_init__(self) -> None:
        _check_choice("how", self.how, UseKind)
        if self.verdict is not None:
            _check_choice("verdict", self.verdict, Verdict)

    @property
    def reworded(self) -> bool:
        """True if the agent read a text that differs from the entry's.

        The text is then the extractor's answer to a question or the actor's own refinement.
        """
        return self.how == "ask" or self.verdict == "refine"


@dataclass(frozen=True, slots=True)
class Observation:
    """First observation of an episode."""

    text: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one action."""

    text: str
    """Observation for the agent. After an invalid action it says that the action is invalid."""
    reward: float = 0.0
    done: bool = False
    success: bool = False
    valid: bool = True
    """False for an invalid action, which does not advance the game."""
    score: float | None = None
    """Grade of the episode so far, in [0, 1]; None if the environment grades by reward alone."""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Plan for one member of a group. The condition determines what the member may see."""

    condition: Condition

    def __post_init__(self) -> None:
        _check_choice("condition", self.condition, Condition)


@dataclass(frozen=True, slots=True)
class EpisodeAddress:
    """Address of an episode among the episodes of the same kind in its run."""

    step: int
    """Number of the step, visit or batch, from 0."""
    group: int
    """Number of the group. The members of a group play the same task."""
    member: int
    """Number of the episode in its group, from 0."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of an episode."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward channels by name."""
    success: bool = False
    """True if the environment reported a success; not part of the reward."""
    score: float | None = None
    """Environment's grade in [0, 1], None if it gives none; not part of the reward."""
    truncated: bool = False
    """True if the episode reached its turn limit, a generation limit or the context limit."""
    error: str | None = None
    """Reason why the episode failed, else None. A failed trajectory is never trained on."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rewards", dict(self.rewards))
        if not math.isfinite(self.reward):
            raise ValueError(f"reward must be finite, not {self.reward}")

    @property
    def reward(self) -> float:
        """Training reward: the sum of the channels."""
        return sum(self.rewards.values())


@dataclass(frozen=True, slots=True)
class Activity:
    """Turns and sampled tokens of an episode."""

    turn_rewards: tuple[float, ...] = ()
    """Environment's reward for each turn within the turn limit."""
    overtime_turns: int = 0
    """Environment turns after the turn limit, which are neither rewarded nor trained on."""
    invalid_actions: int = 0
    """Invalid actions within the turn limit."""
    sampled_tokens: int = 0
    """Tokens that the actor sampled, including overtime."""

    @property
    def turns(self) -> int:
        """Number of environment turns within the turn limit."""
        return len(self.turn_rewards)


@dataclass(frozen=True, slots=True)
class Guidance:
    """Experiences that were retrieved for an episode."""

    used: tuple[ExperienceUse, ...] = ()
    """Experiences that guided the episode."""
    shown: tuple[str, ...] = ()
    """Texts of the experiences in `used`, in the same order."""
    rejected: tuple[ExperienceUse, ...] = ()
    """Experiences that the actor rejected; the episode continued without them."""

    def __post_init__(self) -> None:
        _check_same_length(used=self.used, shown=self.shown)
        if any(use.verdict == "reject" for use in self.used) or any(
            use.verdict != "reject" for use in self.rejected
        ):
            raise ValueError(
                "`used` must not contain rejected experiences, and `rejected` must contain only "
                "rejected ones"
            )


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Finished episode.

    Properties give short access to facts of its parts that methods often read.
    """

    task: Task
    """Task that was played."""
    address: EpisodeAddress
    """Address in the run."""
    condition: Condition
    """Condition of the episode: guided if it was allowed to use experience, otherwise free."""
    segments: tuple[Segment, ...] = ()
    """Conversation as the agent saw it."""
    traces: tuple[TokenTrace, ...] = ()
    """Training samples of the episode."""
    outcome: Outcome = field(default_factory=Outcome)
    """Rewards, success and the way in which the episode ended."""
    activity: Activity = field(default_factory=Activity)
    """Turns and sampled tokens."""
    guidance: Guidance = field(default_factory=Guidance)
    """Experiences that were used or rejected."""

    def __post_init__(self) -> None:
        _check_choice("condition", self.condition, Condition)
        if self.condition == "free" and (
            self.guidance.used
            or self.guidance.rejected
            or any(s.origin in GUIDANCE_ORIGINS for s in self.segments)
        ):
            raise ValueError(
                "the trajectory of a free episode must contain neither an experience nor the tool "
                "search_and_ask"
            )

    @property
    def group(self) -> int:
        """Number of the group. The members of a group play the same task."""
        return self.address.group

    @property
    def rewards(self) -> Mapping[str, float]:
        """Reward channels by name."""
        return self.outcome.rewards

    @property
    def reward(self) -> float:
        """Training reward: the sum of the channels."""
        return self.outcome.reward

    @property
    def success(self) -> bool:
        """True if the environment reported a success."""
        return self.outcome.success

    @property
    def truncated(self) -> bool:
        """True if the episode reached its turn limit, a generation limit or the context limit."""
        return self.outcome.truncated

    @property
    def error(self) -> str | None:
        """Reason why the episode failed, else None."""
        return self.outcome.error

    @property
    def used(self) -> tuple[ExperienceUse, ...]:
        """Experiences that guided the episode."""
        return self.guidance.used

    @property
    def turns(self) -> int:
        """Number of environment turns within the turn limit."""
        return self.activity.turns

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Environment's reward for each of the `turns`."""
        return self.activity.turn_rewards

    @property
    def turn_states(self) -> tuple[str, ...]:
        """State in which the agent acted (see `states`), for each of `turns`."""
        return tuple(states(self.segments)[: self.turns])

    def with_rewards(self, rewards: Mapping[str, float]) -> Trajectory:
        """Return this trajectory with `rewards` as its channels and their sum as its reward."""
        return replace(self, outcome=replace(self.outcome, rewards=rewards))


@dataclass(frozen=True, slots=True)
class TrainSample:
    """Training sequence for a learner."""

    trace: TokenTrace
    advantage: float | tuple[float, ...]
    """Advantage of the whole sequence, or one advantage per token."""
    weight: float
    """Weight of the sequence in its minibatch."""

    def __post_init__(self) -> None:
        if isinstance(self.advantage, tuple) and len(self.advantage) != len(self.trace.ids):
            raise ValueError("a per-token advantage needs one value per token")


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Samples of one optimizer update."""

    samples: tuple[TrainSample, ...]
    total_tokens: int
    """Trained tokens (mask 1), counted before samples without signal were dropped."""
    probe: tuple[TokenTrace, ...] = ()
    """Traces for comparing the learner's log-probs with the engine's. They are not trained."""

    @property
    def sequence_tokens(self) -> int:
        """Number of tokens of the samples: prompts and answers."""
        return sum(len(sample.trace.ids) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class StepStats:
    """Result of a learner's step."""

    updates: int
    """Optimizer updates that were applied."""
    skipped: int
    """Optimizer updates that were skipped because the loss or the gradient was not finite."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", dict(self.metrics))

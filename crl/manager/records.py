"""Data types of the manager's modules: requests, generations, entries and credit units."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crl.algo.experience import experience_reward
from crl.config.schema import EvictionOrder, Scope
from crl.protocols import Hit
from crl.types import (
    NO_COUNTERS,
    SPLIT_DRAW_NAMES,
    Completion,
    Counters,
    Experience,
    ExperienceStatus,
    ExperienceUse,
    Lift,
    Place,
    Provenance,
    Segment,
    Split,
    Task,
    TokenTrace,
    TrackRecord,
    Trajectory,
    Verdict,
)


class UnitKey(NamedTuple):
    """Key of a credit unit: one version of one entry. Its text form is `uid@version`.

    Two other kinds of unit use the id of a generation as `uid`: a refinement has version 1, a
    generation without a usable op has version 0.
    """

    uid: str
    version: int

    def __str__(self) -> str:
        return f"{self.uid}@{self.version}"

    @classmethod
    def credited_by(cls, use: ExperienceUse) -> UnitKey:
        """Return the unit that earns the credit of a use.

        This is the refinement if there is one, otherwise the entry.
        """
        return cls(use.generation, 1) if use.how == "ask" else cls(use.uid, use.version)


class Stamp(NamedTuple):
    """Time stamp of an operation in the log."""

    step: int
    """Completed actor steps."""
    extractor: int
    """Policy version of the extractor."""


def _fields(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, without copies and without nested conversion."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


_JSON = json.JSONEncoder(default=_fields, check_circular=False, ensure_ascii=False)
"""Encoder that leaves non-ASCII characters unescaped.

SQLite therefore refuses texts with lone surrogates, which no extractor could read either.
"""

_OLD_SPLITS: Mapping[str, Split] = {old: split for split, old in SPLIT_DRAW_NAMES.items()}
"""Splits by their names in requests of older banks."""


@dataclass(frozen=True, slots=True)
class EpisodeId:
    """Id of an episode. It is unique in a bank that episodes of several runs have written.

    Raise `ValueError` if `run` is empty or contains a slash.
    """

    run: str
    """Name of the run."""
    step: int
    group: int
    member: int

    def __post_init__(self) -> None:
        if not self.run or "/" in self.run:
            raise ValueError(
                f"the run's name must not be empty or contain a slash, not {self.run!r}"
            )

    def __str__(self) -> str:
        return f"{self.run}/{self.step}/{self.group}/{self.member}"


@dataclass(frozen=True, slots=True)
class DistilRequest:
    """Request to distil a finished episode: R = (τ, g, o, m) of CRL §3.2.1."""

    episode: EpisodeId
    task: Task
    """Task of the episode; `task.goal` is g."""
    segments: tuple[Segment, ...]
    """Conversation τ as the agent saw it."""
    success: bool
    """Outcome o of the episode."""
    truncated: bool
    shown: tuple[Hit, ...] = ()
    """Experiences m that guided the episode, in the order of their numbers in the prompt.

    Empty for a free episode.
    """
    reward: float | None = None
    """Sum of the environment's rewards in the episode; None in requests of older banks."""

    @classmethod
    def from_trajectory(cls, run: str, trajectory: Trajectory) -> DistilRequest:
        """Return the request for a trajectory. Raise `ValueError` if it has an error."""
        if trajectory.error is not None:
            raise ValueError(f"a failed trajectory cannot be distilled: {trajectory.error}")
        address = trajectory.address
        return cls(
            EpisodeId(run, address.step, address.group, address.member),
            trajectory.task,
            trajectory.segments,
            trajectory.success,
            trajectory.truncated,
            shown=tuple(map(Hit, trajectory.guidance.shown, trajectory.used)),
            reward=sum(trajectory.turn_rewards),
        )

    @property
    def id(self) -> str:
        """Id of the request: the id of its episode, as text."""
        return str(self.episode)

    def to_json(self) -> str:
        """Return the request as JSON. The fields of `episode` are not nested."""
        data = _fields(self)
        return _JSON.encode(_fields(data.pop("episode")) | data)

    @classmethod
    def from_json(cls, text: str) -> DistilRequest:
        data: dict[str, Any] = json.loads(text)
        return cls(
            EpisodeId(data["run"], data["step"], data["group"], data["member"]),
            _task(data["task"]),
            tuple(Segment(**segment) for segment in data["segments"]),
            data["success"],
            data["truncated"],
            shown=tuple(map(_hit, data["shown"])),
            reward=data.get("reward"),
        )


def _task(fields: Mapping[str, Any]) -> Task:
    """Read a task. In older banks, splits have their old names."""
    split = fields["split"]
    return Task(**{**fields, "split": _OLD_SPLITS.get(split, split)})


def _hit(fields: Mapping[str, Any]) -> Hit:
    """Read a hit. In older banks, hits have no record."""
    return Hit(
        **{
            **fields,
            "use": ExperienceUse(**fields["use"]),
            "record": TrackRecord(**fields.get("record", {})),
        }
    )


@dataclass(frozen=True, slots=True)
class Generation:
    """Prompt of the extractor and the completion that it sampled, for training."""

    id: str
    """Id of the request, of the merge or of the question."""
    extractor: int
    """Policy version of the extractor that sampled the first token."""
    prompt: tuple[int, ...]
    """Token ids of the prompt."""
    completion: Completion
    """Sampled tokens with their behaviour log-probs."""
    head_tokens: int
    """Number of sampled tokens before the first op.

    For a malformed answer: number of tokens before its departure (see
    `crl.manager.distillation.departure`).
    """
    c_train: int = 0
    """c_train of CRL eq. 7: number of times that the generation was trained on."""
    t_last: int | None = None
    """t_last of CRL eq. 7: actor step that last trained on the generation; None if none did."""

    @property
    def trace(self) -> TokenTrace:
        """Trace of all sampled tokens. Training masks only some of them (`masked_trace`)."""
        return TokenTrace().with_context(self.prompt).with_sampled(self.completion)


@dataclass(frozen=True, slots=True)
class Write:
    """Add, update or merge that is ready to be applied to the bank."""

    op: int
    """Index of the op among the usable ops of its generation."""
    text: str
    span: tuple[int, int]
    """Tokens [start, stop) of the op in the sampled tokens of the generation.

    The last op may include the tokens after it (`Extractor`).
    """
    vector: NDArray[np.float32]
    """Embedding of the entry's key: float32 [dim]."""
    targets: tuple[UnitKey, ...] = ()
    """Versions to replace: none for an add, one for an update, several for a merge."""


@dataclass(frozen=True, slots=True)
class Vote:
    """Vote of the extractor on an experience that guided the episode."""

    op: int
    """Index of the op among the usable ops of its generation."""
    unit: UnitKey
    value: Literal[1, -1]
    """+1 for an up vote, −1 for a down vote."""


@dataclass(frozen=True, slots=True)
class Distilled:
    """Result of distilling one request."""

    request: DistilRequest
    generation: Generation
    writes: tuple[Write, ...]
    returns: int
    """Number of `return` ops."""
    dropped: Mapping[str, int]
    """Number of refused ops, by reason."""
    votes: tuple[Vote, ...] = ()
    duplicates: int = 0
    """Number of adds that were dropped because the bank has a near duplicate."""

    @property
    def malformed(self) -> bool:
        """True if the answer has no usable op."""
        return not (self.writes or self.returns or self.votes or self.duplicates)


@dataclass(frozen=True, slots=True)
class Merged:
    """Answer of the extractor about one chunk of the bank."""

    generation: Generation
    merges: tuple[Write, ...]
    discards: tuple[tuple[int, tuple[UnitKey, ...]], ...]
    """Discard ops: the index of the op and the versions that it names."""
    dropped: Mapping[str, int]
    """Number of refused ops, by reason."""
    malformed: bool
    """True if the answer has no usable op."""


@dataclass(frozen=True, slots=True)
class Refined:
    """Answer of the extractor to a question of an agent."""

    generation: Generation
    source: ExperienceUse
    """Use of the experience that was retrieved for the question."""
    text: str | None
    """Refined text; None if the experience is returned unchanged."""
    span: tuple[int, int]
    """Tokens [start, stop) of the op in the sampled tokens; (0, 0) if `text` is None."""
    dropped: Mapping[str, int]
    """Number of refused ops, by reason."""
    malformed: bool
    """True if the answer has no usable op."""


@dataclass(frozen=True, slots=True)
class ApplyRules:
    """Rules for applying answers of the extractor to the bank."""

    malformed_reward: float | None
    """Reward of a generation without a usable op; None: the generation is not stored."""
    max_per_goal: int | None
    """Maximum number of active entries with the same task and goal; None for no limit.

    With the scope variation, it is the maximum number per variation.
    """
    max_entries: int | None
    """Maximum number of active entries of the bank; None for no limit."""
    evict: EvictionOrder
    """Eviction order when `max_per_goal` or `max_entries` is exceeded."""
    evict_votes: int | None
    """Net down votes at which an entry is evicted; None: votes never evict."""
    scope: Scope = "task"
    """Range of episodes that an entry may guide."""
    distinct_texts: bool = False
    """True if no two active entries for the same episodes may have the same text.

    An add of a known text updates the entry if its episode had a lower reward, and is otherwise
    dropped.
    """


@dataclass(slots=True)
class Entry:
    """Bank entry at its current version, with the counters of that version (its credit unit)."""

    uid: str
    version: int
    text: str
    place: Place
    """Place of the episode that the entry is about."""
    provenance: Provenance
    counters: Counters = NO_COUNTERS
    status: ExperienceStatus = "active"

    @property
    def task(self) -> str:
        return self.place.task

    @property
    def goal(self) -> str:
        return self.place.goal

    @property
    def unit(self) -> UnitKey:
        return UnitKey(self.uid, self.version)

    @property
    def experience(self) -> Experience:
        """Frozen copy of the entry in its current state."""
        return Experience(
            self.uid, self.version, self.text, self.task, self.goal, self.provenance, self.counters,
            self.status,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Applied:
    """Changes that applying an answer made to the bank."""

    changed: tuple[tuple[Entry, Write], ...] = ()
    """Entries that were written, each with its write."""
    evicted: tuple[str, ...] = ()
    """Uids of entries that are no longer active."""
    votes: tuple[Vote, ...] = ()
    """Votes that were counted."""


@dataclass(frozen=True, slots=True)
class RolledBack:
    """Result of a rollback to a snapshot."""

    step: int
    """Completed actor steps at the snapshot."""
    archive: Path | None
    """Copy of the bank before the rollback; None if nothing had changed since the snapshot."""


class Credit(NamedTuple):
    """Credit of one unit from one episode."""

    unit: UnitKey
    verdict: Verdict | None
    outcome: float | None
    """r = ±1 of the episode, for the counters of the unit.

    None after a reject, because the unit did not guide the episode.
    """
    reward: float | None
    """Reward for training the generation.

    It also depends on the verdict (CRL eq. 8), on the expected r and on the bonus (CRL B.2). None
    if the expected r is unknown; then the generation is not trained on this episode.
    """

    @classmethod
    def from_use(
        cls,
        use: ExperienceUse,
        success: bool,
        expected: float | None = 0.0,
        bonus: float = 0.0,
    ) -> Credit:
        """Return the credit that a use earns from its episode.

        `expected` is the expected r of the episode without experience. It is subtracted from the
        reward of a unit that guided the episode. None means that it is unknown. `bonus` is added to
        the reward of a unit that guided the episode from its start.
        """
        guided = use.verdict != "reject"
        reward = experience_reward(use.verdict, success)
        if guided:
            reward = None if expected is None else reward - expected
        if guided and reward is not None and use.how == "start":
            reward += bonus
        return cls(
            UnitKey.credited_by(use),
            use.verdict,
            (1.0 if success else -1.0) if guided else None,
            reward,
        )


class GroupSuccess(NamedTuple):
    """Success of the members of one group that one unit guided, and of the group's free members."""

    unit: UnitKey
    guided: float
    """Success rate of the members that the unit guided."""
    free: float
    """Success rate of the free members."""

    @property
    def lift(self) -> Lift:
        return Lift(1, self.guided - self.free)


@dataclass(frozen=True, slots=True)
class PendingUnit:
    """Credit unit with rewards that were not trained on yet."""

    unit: UnitKey
    generation: str
    """Id of the generation that wrote the unit."""
    span: tuple[int, int]
    """Tokens [start, stop) of the unit in the sampled tokens of the generation."""
    count: int
    """Number of pending episodes."""
    total: float
    """Sum of the rewards of the pending episodes."""

    @property
    def malformed(self) -> bool:
        """True if the unit is a generation without a usable op (version 0)."""
        return self.unit.version == 0

    @property
    def reward(self) -> float:
        """r̄(m): mean reward over the pending episodes."""
        return self.total / self.count

"""What the rooms of the manager hand each other: requests, generations, entries, credit units."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crl.algo.experience import experience_reward
from crl.protocols import Hit
from crl.types import (
    Completion,
    Experience,
    ExperienceStatus,
    ExperienceUse,
    Lift,
    Segment,
    Task,
    TokenTrace,
    TrackRecord,
    Trajectory,
    Verdict,
)

Evict = Literal["fifo", "lru", "credit"]
"""Which entry goes where there is no room. fifo: the first written. lru: the least recently returned. credit: the half
with the highest `known_score` stays; of the others tried ones go first, the lowest score before the higher, then the
oldest untried one."""


class UnitKey(NamedTuple):
    """The unit of credit: one version of one entry. `uid@version` where text is wanted."""

    uid: str
    version: int

    def __str__(self) -> str:
        return f"{self.uid}@{self.version}"

    @classmethod
    def earning(cls, use: ExperienceUse) -> UnitKey:
        """What an episode's outcome is credited to: the refinement where there was one, else the entry."""
        return cls(use.generation, 1) if use.how == "ask" else cls(use.uid, use.version)


def successes(credited: int, credit: float) -> int:
    """Return how many of the `credited` episodes succeeded, from their sum of r = ±1."""
    return round((credited + credit) / 2)


class Stamp(NamedTuple):
    """What every operation is tagged with: completed actor steps, and the extractor's policy version."""

    step: int
    extractor: int


def _fields(record: Any) -> dict[str, Any]:
    """As `asdict`, but one record deep and without copies."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


_JSON = json.JSONEncoder(default=_fields, check_circular=False, ensure_ascii=False)
"""Nothing escaped: what holds lone surrogates, which no extractor can be asked about, SQLite refuses."""


@dataclass(frozen=True, slots=True)
class DistilRequest:
    """A finished episode to distil: R = (τ, g, o, m) of CRL §3.2.1.

    run, step, group, member: its address, which makes its id; segments: τ as the agent saw it; task.goal: g; success: o;
    shown: what guided it, in the order in which a prompt numbers it; empty for a free episode.
    """

    run: str
    step: int
    group: int
    member: int
    task: Task
    segments: tuple[Segment, ...]
    success: bool
    truncated: bool
    shown: tuple[Hit, ...] = ()

    def __post_init__(self) -> None:
        if not self.run or "/" in self.run:
            raise ValueError(f"a run's name in a request must not be empty nor hold a slash, not {self.run!r}")

    @classmethod
    def of(cls, run: str, trajectory: Trajectory) -> DistilRequest:
        """The request for a trajectory. Raises `ValueError` where it has an error."""
        if trajectory.error is not None:
            raise ValueError(f"a trajectory that failed is not distilled: {trajectory.error}")
        shown = tuple(map(Hit, trajectory.shown, trajectory.used))
        address = (trajectory.step, trajectory.group, trajectory.member)
        return cls(run, *address, trajectory.task, trajectory.segments, trajectory.success, trajectory.truncated, shown)

    @property
    def id(self) -> str:
        return f"{self.run}/{self.step}/{self.group}/{self.member}"

    def to_json(self) -> str:
        return _JSON.encode(self)

    @classmethod
    def from_json(cls, text: str) -> DistilRequest:
        data: dict[str, Any] = json.loads(text)
        return cls(
            **data
            | {
                "task": Task(**data["task"]),
                "segments": tuple(Segment(**segment) for segment in data["segments"]),
                "shown": tuple(map(_hit, data["shown"])),
            }
        )


def _hit(fields: Mapping[str, Any]) -> Hit:
    """Read a hit. Those of older banks have no record."""
    return Hit(**{**fields, "use": ExperienceUse(**fields["use"]), "record": TrackRecord(**fields.get("record", {}))})


@dataclass(frozen=True, slots=True)
class Generation:
    """What the extractor sampled once, as it is trained: prompt ids and the completion with its behaviour log-probs.

    id: the request's, the merge's or the question's; extractor: policy version when it began; head: sampled tokens before the first op,
    or of a malformed answer before its departure (`crl.manager.faults`); c_train, t_last: the
    counters of eq. 7, which belong to the generation.
    """

    id: str
    extractor: int
    prompt: tuple[int, ...]
    completion: Completion
    head: int
    c_train: int = 0
    t_last: int | None = None

    @property
    def trace(self) -> TokenTrace:
        """All that was sampled, which is more than what credit trains."""
        return TokenTrace().with_context(self.prompt).with_sampled(self.completion)


@dataclass(frozen=True, slots=True)
class Write:
    """An add, ready to be applied; with one target an update of that version, with several their merge.

    op: its index in the generation; span: its tokens [start, stop) in what was sampled, those after
    the last op included (`Extractor`); vector: float32 [dim] of its key.
    """

    op: int
    text: str
    span: tuple[int, int]
    vector: NDArray[np.float32]
    targets: tuple[UnitKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Vote:
    """What an answer says of an experience that guided its episode: value +1 (up) or −1 (down). op: its index in the generation."""

    op: int
    unit: UnitKey
    value: Literal[1, -1]


@dataclass(frozen=True, slots=True)
class Distilled:
    """What became of one request. returned: `return` ops; dropped: refused ops by reason; duplicates: adds that were left out because
    the bank says nearly the same; malformed: not one op stood."""

    request: DistilRequest
    generation: Generation
    writes: tuple[Write, ...]
    returned: int
    dropped: Mapping[str, int]
    votes: tuple[Vote, ...] = ()
    duplicates: int = 0

    @property
    def malformed(self) -> bool:
        return not (self.writes or self.returned or self.votes or self.duplicates)


@dataclass(frozen=True, slots=True)
class Merged:
    """What the extractor said of one chunk of the bank. discards: index of the op, and the versions that it names; dropped: refused
    ops by reason; malformed: not one op stood."""

    generation: Generation
    merges: tuple[Write, ...]
    discards: tuple[tuple[int, tuple[UnitKey, ...]], ...]
    dropped: Mapping[str, int]
    malformed: bool


@dataclass(frozen=True, slots=True)
class Refined:
    """What the extractor said to a question. source: the use of what was found; text: what it made of it, None = it is returned as it is;
    span: the op's tokens [start, stop) in what was sampled; dropped: refused ops by reason; malformed: not one op stood."""

    generation: Generation
    source: ExperienceUse
    text: str | None
    span: tuple[int, int]
    dropped: Mapping[str, int]
    malformed: bool


@dataclass(frozen=True, slots=True)
class ApplyRules:
    """malformed_reward: what a generation without any op earns, None = it is not kept. cap, size: active entries of one goal and of the
    whole bank, None = any number; over them those go that `evict` says. vote_out: net down votes at which an entry goes, None = never."""

    malformed_reward: float | None = None
    cap: int | None = None
    size: int | None = None
    evict: Evict = "fifo"
    vote_out: int | None = None


@dataclass(slots=True)
class Entry:
    """An entry of the bank at its current version, with the counters of that version (its unit).

    retrieved: c(m) of eq. 6; last_returned_step: the actor step of the last time, None before; credited: episodes that it
    guided and that were credited; credit: Σ r over them, r = ±1; votes: the extractor's up votes less its down votes.
    """

    uid: str
    version: int
    text: str
    task: str
    goal: str
    generation: str
    span: tuple[int, int]
    parents: tuple[str, ...] = ()
    status: ExperienceStatus = "active"
    retrieved: int = 0
    last_returned_step: int | None = None
    credited: int = 0
    credit: float = 0.0
    votes: int = 0
    lift: Lift | None = None
    """None before the first group that has experience-free members too."""

    @property
    def unit(self) -> UnitKey:
        return UnitKey(self.uid, self.version)

    @property
    def record(self) -> TrackRecord:
        return TrackRecord(self.credited, successes(self.credited, self.credit), self.lift.mean if self.lift else None)

    @property
    def experience(self) -> Experience:
        """A frozen copy of what the entry is now."""
        return Experience(
            self.uid, self.version, self.text, self.task, self.generation, self.span, self.goal, self.parents, self.status,
            retrieved=self.retrieved, credited=self.credited, credit=self.credit, lift=self.lift,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Applied:
    """changed: the entries that were written, each with the write that made it; evicted: uids that are active no more; votes: those that
    counted."""

    changed: tuple[tuple[Entry, Write], ...] = ()
    evicted: tuple[str, ...] = ()
    votes: tuple[Vote, ...] = ()


@dataclass(frozen=True, slots=True)
class RolledBack:
    """step: completed actor steps at the snapshot; archive: the bank as it was before, None where nothing had happened since."""

    step: int
    archive: Path | None


class Credit(NamedTuple):
    """What one episode says of one unit. outcome: r = ±1 of the episode that it guided, for the record of what helped; None after a
    reject, where it guided nothing. reward: what its generation is trained on, which depends on the verdict too (CRL eq. 8)
    and on what was expected; None = nothing, for what was expected is not known."""

    unit: UnitKey
    verdict: Verdict | None
    outcome: float | None
    reward: float | None

    @classmethod
    def of(cls, use: ExperienceUse, success: bool, expected: float | None = 0.0) -> Credit:
        """expected: r of such an episode without experience, which is taken off the reward of what guided it; None = not known."""
        guided = use.verdict != "reject"
        reward = experience_reward(use.verdict, success)
        if guided:
            reward = None if expected is None else reward - expected
        return cls(UnitKey.earning(use), use.verdict, (1.0 if success else -1.0) if guided else None, reward)


class GroupSuccess(NamedTuple):
    """Success of the members of one group that one unit guided, and of its experience-free ones."""

    unit: UnitKey
    guided: float
    """Share of the guided members that succeeded."""
    free: float
    """Share of the experience-free members that succeeded."""

    @property
    def lift(self) -> Lift:
        return Lift(1, self.guided - self.free)


@dataclass(frozen=True, slots=True)
class PendingUnit:
    """A credit unit with rewards that were not trained on yet. Version 0 is a generation without any op.

    span: its tokens in the generation; count, total: pending episodes and Σ of their rewards.
    """

    unit: UnitKey
    generation: str
    span: tuple[int, int]
    count: int
    total: float

    @property
    def malformed(self) -> bool:
        return self.unit.version == 0

    @property
    def reward(self) -> float:
        """r̄(m): the mean over the pending episodes."""
        return self.total / self.count

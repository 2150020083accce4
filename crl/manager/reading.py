"""A bank as people look at it: read-only, also while a run writes it.

Steps are those of the run that the bank is of: of what another run did, in a bank that began with its entries, none is known.

One reader sees one snapshot. SQLite's write-ahead log keeps readers and the writer out of each other's way; a reader that stays open
for long would only make that log grow, so read first and print then.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from crl.errors import ConfigError
from crl.manager.database import check_bank, connect_to_read, log_bytes, readable_rows, store_errors
from crl.manager.records import DistilRequest, UnitKey, successes
from crl.manager.tables import BEGUN, read_lift, read_vectors
from crl.types import ExperienceStatus, Lift, lift_order

QueueState = Literal["pending", "leased", "done", "dead"]

WROTE = "kind IN ('add', 'update', 'merge', 'import')"
"""Operations that made a version of an entry."""

STEP = f"IIF(seq > {BEGUN} AND kind != 'import', step, NULL)"
"""Completed actor steps at an operation; NULL where another run's clock counted them."""

_UID_AT = "rtrim(value, '0123456789')"
"""uid@ of a uid@version; of JSON."""

BINS = 5
"""Of the distribution of credit."""


@dataclass(frozen=True, slots=True)
class EntryView:
    """An entry at its current version. step: completed actor steps when that was written, None = in another run; retrieved: c(m) of CRL
    eq. 6; last_returned_step: None before the first time, and where the last time was in another run; credited: episodes that it guided
    and that were credited; credit: Σ r over them, r = ±1; votes: the extractor's up votes less its down votes."""

    uid: str
    version: int
    status: ExperienceStatus
    task: str
    goal: str
    text: str
    parents: tuple[str, ...]
    step: int | None
    generation: str
    retrieved: int
    last_returned_step: int | None
    credited: int
    credit: float
    votes: int
    lift: Lift | None
    """None before the first group that has experience-free members too."""

    @property
    def unit(self) -> UnitKey:
        return UnitKey(self.uid, self.version)

    @property
    def won(self) -> int:
        """Credited episodes that succeeded."""
        return successes(self.credited, self.credit)


@dataclass(frozen=True, slots=True)
class VersionView:
    """A version of an entry, as the log has it. seq: its place there; step: completed actor steps then, None = in another run; kind: add,
    update, merge or import; by: the request that it came of, or the merge."""

    seq: int
    uid: str
    version: int
    step: int | None
    kind: str
    by: str
    text: str
    parents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UseView:
    """A credited episode that an entry guided. step: completed actor steps when it was credited, None = in another run; reward: ±1."""

    step: int | None
    episode: str
    version: int
    reward: float


@dataclass(frozen=True, slots=True)
class LiftView:
    """Success in one group with an entry and without any experience."""

    step: int | None
    """Completed actor steps when it was recorded; None = in another run."""
    group: str
    """run/step/group."""
    version: int
    guided: float
    """Share of the members that the entry guided that succeeded."""
    free: float
    """Share of the experience-free members that succeeded."""

    @property
    def lift(self) -> Lift:
        return Lift(1, self.guided - self.free)


@dataclass(frozen=True, slots=True)
class RefinementView:
    """An answer of the extractor to a question of an agent (search_and_ask, CRL §3.2.2). id: of its generation; step: completed actor steps
    then, None = in another run; uid, version: of the entry that it was made from; text: what the agent was told, None = the entry as it
    stood."""

    id: str
    step: int | None
    uid: str
    version: int
    text: str | None

    @property
    def unit(self) -> UnitKey:
        """What it earns credit by."""
        return UnitKey(self.id, 1)


@dataclass(frozen=True, slots=True)
class GenerationView:
    """An answer of the extractor. extractor: its policy version; prompt, sampled: token ids; span: the entry's tokens of `sampled`,
    [start, stop); trained: how often it was trained on, for the last time after `trained_at` actor steps."""

    id: str
    extractor: int
    prompt: tuple[int, ...]
    sampled: tuple[int, ...]
    finish: str
    span: tuple[int, int]
    trained: int
    trained_at: int | None


@dataclass(frozen=True, slots=True)
class Eviction:
    """step: completed actor steps then, None = in another run; by: the request whose entries needed room (why = "room") or whose answer
    voted it out ("votes"), or the merge in which the extractor discarded it ("discarded"); None where somebody pruned the bank
    ("pruned"), or where a run opened it whose bounds were closer ("room")."""

    step: int | None
    by: str | None
    why: Literal["room", "votes", "discarded", "pruned"]


@dataclass(frozen=True, slots=True)
class Keys:
    """What active entries are found by. made_by: the embedder's name and how, None where there are no vectors yet, as in a bank
    that was imported and not opened by a run; vectors: by uid, float32 [dim], unit norm."""

    made_by: str | None
    vectors: Mapping[str, NDArray[np.float32]]

    def comparable(self, embedder: str, dim: int) -> bool:
        """With the vectors of that embedder."""
        by = self.made_by or ""
        return (by == embedder or by.startswith(f"{embedder}: goal + ")) and all(len(vector) == dim for vector in self.vectors.values())


@dataclass(frozen=True, slots=True)
class RequestView:
    """An episode that waits, is in work, or could not be distilled. guided: the uids of what guided it; reason: of a dead one."""

    id: str
    state: QueueState
    step: int
    task: str
    goal: str
    success: bool
    guided: tuple[str, ...]
    reason: str | None


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the active entries of one task, goal and text came to together."""

    task: str
    goal: str
    text: str
    won: int
    credited: int
    lift: Lift | None
    """None before the first group that has experience-free members too."""

    @property
    def rate(self) -> float:
        """Share of the credited episodes that were won; NaN before the first."""
        return self.won / self.credited if self.credited else math.nan


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two banks hold, in `lift_order`; both: (of A, of B), those whose lifts differ most first, then those whose rates do."""

    only_a: tuple[Lesson, ...]
    only_b: tuple[Lesson, ...]
    both: tuple[tuple[Lesson, Lesson], ...]

    @property
    def lessons(self) -> int:
        return len(self.only_a) + len(self.only_b) + len(self.both)


def require_bank(path: Path) -> None:
    """Raises `ConfigError` where there is no bank that this crl reads."""
    check_bank(path, "bank", "Give a run directory that holds a bank.sqlite, or such a file, of this version of crl")


@contextmanager
def reading(path: Path) -> Iterator[BankReader]:
    """A reader of the bank at `path`, open until the block ends. Raises `ConfigError` where there is no bank that this crl reads,
    `StoreError` when the file is damaged."""
    require_bank(path)
    with store_errors(path), closing(connect_to_read(path)) as db:
        db.row_factory = sqlite3.Row
        db.execute("BEGIN")  # all that follows sees one state
        with readable_rows(path):
            yield BankReader(path, db)


class BankReader:
    """Made by `reading`; its methods read anew at every call, always the same snapshot."""

    def __init__(self, path: Path, db: sqlite3.Connection) -> None:
        self.path, self._db = path, db

    def _rows(self, sql: str, *parameters: Any) -> list[sqlite3.Row]:
        return self._db.execute(sql, parameters).fetchall()

    def _pairs(self, sql: str) -> dict[str, int]:
        return {name: number for name, number in self._rows(sql)}

    # ── entries ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def entries(self, status: ExperienceStatus | None = "active") -> list[EntryView]:
        """In the order in which they were last written; None: of every status."""
        return self._entries("status = IFNULL(?, status)", status)

    def uids(self) -> list[str]:
        """Of all entries, whatever their status."""
        return [row["uid"] for row in self._rows("SELECT uid FROM entries")]

    def find(self, name: str) -> EntryView:
        """The entry whose uid, or uid without its run, is `name` or alone begins with it; behind it may be `@version`, of any that it had.

        Raises `ConfigError` when there is none, or more than one.
        """
        uids = self.uids()
        short = short_uids(uids)
        names = dict.fromkeys((name, re.sub(r"@[0-9]+$", "", name)))  # a uid may end like that too
        exact = [[uid for uid in uids if wanted in (uid, _tail(uid))] for wanted in names]
        begun = [[uid for uid in uids if wanted and (uid.startswith(wanted) or _tail(uid).startswith(wanted))] for wanted in names]
        fits = next(filter(None, exact + begun), None)
        if not fits:
            raise ConfigError("uid", name, "no experience of this bank has it", "crl bank ls lists them; --status all the evicted ones too")
        if len(fits) > 1:
            some = ", ".join(short[uid] for uid in sorted(fits)[:4]) + (", …" if len(fits) > 4 else "")
            raise ConfigError("uid", name, f"{len(fits)} experiences begin with it: {some!r}", "Give more of it")
        entry = self._entries("uid = ?", fits[0])[0]
        if not (entry.uid.startswith(name) or _tail(entry.uid).startswith(name)):
            version = name.rpartition("@")[2]
            if len(version) > 9 or not 1 <= int(version) <= entry.version:
                raise ConfigError("uid", name, f"the newest version of that experience is {entry.version}", "Leave the version out")
        return entry

    def _entries(self, where: str, *parameters: Any) -> list[EntryView]:
        written = self._rows(f"SELECT data ->> 'uid', data ->> 'version', {STEP} FROM log WHERE {WROTE}")
        steps = {(uid, version): step for uid, version, step in written}
        ((version,),) = self._rows("PRAGMA user_version")
        votes = "votes" if version > 2 else "0 AS votes"  # there were none before
        lift = "lift_groups, lift_mean, lift_m2" if version > 3 else "0 AS lift_groups"
        counters = f"generation, retrieved, last_returned_step, credited, credit, {votes}, {lift}"
        columns = f"uid, version, status, task, goal, text, parents, {counters}"
        sql = f"SELECT {columns} FROM entries JOIN units USING (uid, version) WHERE {where} ORDER BY entries.rowid"
        return [
            EntryView(
                row["uid"], row["version"], row["status"], row["task"], row["goal"], row["text"], tuple(json.loads(row["parents"])),
                steps.get((row["uid"], row["version"])), row["generation"], row["retrieved"], row["last_returned_step"],
                row["credited"], row["credit"], row["votes"], read_lift(row),
            )
            for row in self._rows(sql, *parameters)
        ]  # fmt: skip

    def lineage(self, unit: UnitKey) -> list[VersionView]:
        """The version itself and all that it came from, the newest first."""
        versions = {UnitKey(version.uid, version.version): version for version in self._versions()}
        found: dict[UnitKey, VersionView] = {}
        waiting = [unit]
        while waiting:
            key = waiting.pop()
            if key in versions and key not in found:
                found[key] = versions[key]
                waiting += [_unit(parent) for parent in versions[key].parents]
        return sorted(found.values(), key=lambda version: -version.seq)

    def offspring(self, uid: str) -> list[VersionView]:
        """Versions of other entries that came from a version of this one."""
        inherits = f"EXISTS (SELECT 1 FROM json_each(data, '$.parents') WHERE {_UID_AT} = ?)"
        return [version for version in self._versions(inherits, f"{uid}@") if version.uid != uid]

    def _versions(self, where: str = "TRUE", *parameters: Any) -> list[VersionView]:
        rows = self._rows(f"SELECT seq, {STEP} AS step, kind, origin, data FROM log WHERE {WROTE} AND {where} ORDER BY seq", *parameters)
        return [_version(row, json.loads(row["data"])) for row in rows]

    def uses(self, uid: str) -> list[UseView]:
        """The credited episodes of all its versions, in order; not those that went on without it."""
        columns = f"{STEP}, origin, data ->> 'version', data ->> 'reward'"
        where = "kind = 'credit' AND data ->> 'uid' = ? AND data ->> 'reward' IS NOT NULL"
        rows = self._rows(f"SELECT {columns} FROM log WHERE {where} ORDER BY seq", uid)
        return [UseView(*row) for row in rows]

    def lifts(self, uid: str) -> list[LiftView]:
        """Return what groups say of all versions of an entry, in order."""
        columns = f"{STEP}, origin, data ->> 'version', data ->> 'guided', data ->> 'free'"
        rows = self._rows(f"SELECT {columns} FROM log WHERE kind = 'lift' AND data ->> 'uid' = ? ORDER BY seq", uid)
        return [LiftView(*row) for row in rows]

    def refinement(self, name: str) -> RefinementView | None:
        """The one of this id; None where there is none."""
        return next(iter(self._refinements("origin = ?", name)), None)

    def refinements(self, uid: str) -> list[RefinementView]:
        """What was made of all versions of an entry for those who asked, in order."""
        return self._refinements("data ->> 'uid' = ?", uid)

    def _refinements(self, where: str, *parameters: Any) -> list[RefinementView]:
        columns = f"origin, {STEP}, data ->> 'uid', data ->> 'version', data ->> 'text'"
        rows = self._rows(f"SELECT {columns} FROM log WHERE kind = 'refine' AND {where} ORDER BY seq", *parameters)
        return [RefinementView(*row) for row in rows]

    def eviction(self, uid: str) -> Eviction | None:
        """None where the entry is not evicted."""
        columns = f"{STEP}, data ->> 'for', IFNULL(data ->> 'reason', IIF(data ->> 'for' IS NULL, 'pruned', 'room'))"
        for row in self._rows(f"SELECT {columns} FROM log WHERE kind = 'evict' AND origin = ?", uid):
            return Eviction(row[0], row[1], row[2])
        discards = f"log, json_each(data, '$.targets') WHERE kind = 'discard' AND {_UID_AT} = ?"
        for row in self._rows(f"SELECT {STEP}, origin FROM {discards}", f"{uid}@"):
            return Eviction(row[0], row[1], "discarded")
        return None

    def generation(self, unit: UnitKey) -> GenerationView | None:
        """What wrote a version; None when it is not kept (any more)."""
        sql = "SELECT * FROM units JOIN generations ON id = generation WHERE uid = ? AND version = ?"
        for row in self._rows(sql, *unit):
            prompt, sampled = (tuple(np.frombuffer(row[name], "<i4").tolist()) for name in ("prompt", "sampled"))
            span = (row["start"], row["stop"])
            return GenerationView(row["id"], row["extractor"], prompt, sampled, row["finish"], span, row["c_train"], row["t_last"])
        return None

    # ── search ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def keys(self) -> Keys:
        made_by = next((row["value"] for row in self._rows("SELECT value FROM facts WHERE name = 'embedder'")), None)
        rows = self._rows("SELECT uid, vector FROM entries WHERE status = 'active'") if made_by else []
        return Keys(made_by, dict(zip((row["uid"] for row in rows), read_vectors(row["vector"] for row in rows), strict=True)))

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────

    def requests(self, *states: QueueState) -> list[RequestView]:
        """Requests in one of `states` that are not done, in the order in which they are or were to be distilled."""
        marks = ", ".join("?" * len(states))
        sql = f"SELECT * FROM requests WHERE state IN ({marks}) AND payload IS NOT NULL ORDER BY step, team, member, id"
        return [_request(row) for row in self._rows(sql, *states)]

    def queue(self) -> dict[str, int]:
        """How many requests there are, by state."""
        states: dict[str, int] = dict.fromkeys(("pending", "leased", "done", "dead"), 0)
        return states | self._pairs("SELECT state, COUNT(*) FROM requests GROUP BY state")

    # ── figures ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def stats(self) -> dict[str, Any]:
        """Figures of the whole bank; its operations are the run's own.

        bytes: with the log beside the bank; log: how many operations there were; step: completed actor steps at the last one, None where
        that was of no run or of another one; earlier: operations of other runs, with whose entries the bank began; entries: by task, how
        many of each status, and the number of goals that active ones are about; used: of the active ones, how many were ever retrieved,
        credited and have votes; won: how many of those that were credited have which share of won episodes, in BINS equal parts of [0, 1];
        ops: by kind; dropped: by reason; queue: by state; generations: kept; ready: units to train on.

        lift: of how many active ones the 95 % interval of lift is above 0, below 0 or around 0 (it
        holds 0), and how many have no group (unknown).
        """
        entries = self.entries(None)
        active = [entry for entry in entries if entry.status == "active"]
        ((kept,),) = self._rows("SELECT COUNT(*) FROM generations")
        ((ready,),) = self._rows("SELECT COUNT(*) FROM units WHERE ready IS NOT NULL")
        ((step,),) = self._rows(f"SELECT {STEP} FROM log ORDER BY seq DESC LIMIT 1") or [(None,)]
        ops = self._pairs(f"SELECT kind, COUNT(*) FROM log WHERE seq > {BEGUN} GROUP BY kind ORDER BY kind")
        ((earlier,),) = self._rows(f"SELECT COUNT(*) FROM log WHERE seq <= {BEGUN}")
        bins = Counter(min(BINS - 1, int(BINS * entry.won / entry.credited)) for entry in active if entry.credited)
        return {
            "bank": str(self.path),
            "bytes": self.path.stat().st_size + log_bytes(self.path),
            "keys": self.keys().made_by,
            "log": sum(ops.values()),
            "step": step,
            "earlier": earlier,
            "entries": {task: _sizes([entry for entry in entries if entry.task == task]) for task in sorted({e.task for e in entries})},
            "used": {
                "active": len(active),
                "retrieved": sum(entry.retrieved > 0 for entry in active),
                "credited": sum(entry.credited > 0 for entry in active),
                "voted": sum(entry.votes != 0 for entry in active),
            },
            "lift": _lifts(active),
            "won": [bins[i] for i in range(BINS)],
            "ops": ops,
            "dropped": self._pairs(
                f"SELECT data ->> 'reason', SUM(data ->> 'count') FROM log WHERE kind = 'drop' AND seq > {BEGUN} GROUP BY 1"
            ),
            "queue": self.queue(),
            "generations": kept,
            "ready": ready,
        }


def compare(a: Sequence[EntryView], b: Sequence[EntryView]) -> Comparison:
    """Entries are the same where task, goal and text are."""
    of_a, of_b = _lessons(a), _lessons(b)
    both = [(lesson, of_b[key]) for key, lesson in of_a.items() if key in of_b]
    both.sort(key=lambda pair: _difference(*pair), reverse=True)
    return Comparison(
        tuple(lesson for key, lesson in of_a.items() if key not in of_b),
        tuple(lesson for key, lesson in of_b.items() if key not in of_a),
        tuple(both),
    )


def _lessons(entries: Sequence[EntryView]) -> dict[tuple[str, str, str], Lesson]:
    same: dict[tuple[str, str, str], list[EntryView]] = {}
    for entry in entries:
        same.setdefault((entry.task, entry.goal, entry.text), []).append(entry)
    lessons = {key: _lesson(*key, group) for key, group in same.items()}
    return dict(sorted(lessons.items(), key=lambda item: (lift_order(item[1].lift), item[1].credited - 2 * item[1].won)))


def _lesson(task: str, goal: str, text: str, same: Sequence[EntryView]) -> Lesson:
    lift = pooled(entry.lift for entry in same)
    return Lesson(task, goal, text, sum(entry.won for entry in same), sum(entry.credited for entry in same), lift)


def pooled(lifts: Iterable[Lift | None]) -> Lift | None:
    """Return the lift over the groups of all of `lifts`; None where none is known."""
    known = [lift for lift in lifts if lift]
    return reduce(add, known) if known else None


def _difference(a: Lesson, b: Lesson) -> tuple[float, float]:
    """Return how far lifts are apart beyond their intervals, and how far rates are; the least where one of them is not known yet."""
    lift = abs(a.lift.mean - b.lift.mean) - math.hypot(a.lift.half, b.lift.half) if a.lift and b.lift else -math.inf
    return lift, abs(a.rate - b.rate) if a.credited and b.credited else -1.0


def _lifts(entries: Sequence[EntryView]) -> dict[str, int]:
    counts: dict[str, int] = dict.fromkeys(("above", "below", "around", "unknown"), 0)
    for entry in entries:
        counts[("around", "above", "below")[entry.lift.sign] if entry.lift else "unknown"] += 1
    return counts


def short_uids(uids: Sequence[str]) -> dict[str, str]:
    """The uids without the names of the runs that they begin with, where that still tells them apart; else as they are, all of them."""
    tails = {uid: _tail(uid) for uid in uids}
    return tails if len(set(tails.values())) == len(tails) else {uid: uid for uid in tails}


def _tail(uid: str) -> str:
    return uid.partition("/")[2] or uid


def _unit(text: str) -> UnitKey:
    uid, _, version = text.rpartition("@")
    return UnitKey(uid, int(version))


def _version(row: sqlite3.Row, data: dict[str, Any]) -> VersionView:
    unit = (data["uid"], data["version"])
    return VersionView(row["seq"], *unit, row["step"], row["kind"], row["origin"], data["text"], tuple(data["parents"]))


def _request(row: sqlite3.Row) -> RequestView:
    request = DistilRequest.from_json(row["payload"])
    guided = tuple(hit.use.uid for hit in request.shown)
    task = request.task
    return RequestView(row["id"], row["state"], row["step"], task.name, task.goal, request.success, guided, row["reason"])


def _sizes(entries: Sequence[EntryView]) -> dict[str, int]:
    statuses = Counter(entry.status for entry in entries)
    goals = {entry.goal for entry in entries if entry.status == "active"}
    return {**{status: statuses[status] for status in ("active", "evicted", "merged")}, "goals": len(goals)}

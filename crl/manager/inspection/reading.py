"""Read-only views of a bank. A bank can be read while a run writes to it.

Steps are completed actor steps of the run that owns the bank. A bank may start with entries of
another run; the steps of that run's operations are unknown.

One reader sees one snapshot. With SQLite's write-ahead log, readers and the writer do not block
each other. The log grows while a reader is open, so read everything first and print afterwards.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from crl.errors import ConfigError
from crl.manager.keys import embedder_of
from crl.manager.records import DistilRequest, Entry, UnitKey
from crl.manager.storage.database import (
    as_store_errors,
    check_bank,
    check_rows,
    connect_to_read,
    wal_bytes,
)
from crl.manager.storage.tables import RESET_SEQ, read_entry, read_vectors
from crl.types import ExperienceStatus, Lift, lift_order

QueueState = Literal["pending", "leased", "done", "dead"]

WRITES_VERSION = "kind IN ('add', 'update', 'merge', 'import')"
"""SQL condition: the operation wrote a version of an entry."""

STEP_SQL = f"IIF(seq > {RESET_SEQ} AND kind != 'import', step, NULL)"
"""SQL expression: completed actor steps at an operation; NULL for imports and other runs."""

_UID_PART = "rtrim(value, '0123456789')"
"""SQL expression: the part `uid@` of the `uid@version` in a `value` of `json_each`."""

WIN_RATE_BINS = 5
"""Number of equal bins of [0, 1] in the distribution of win rates."""


@dataclass(slots=True)
class EntryView(Entry):
    """Entry as a bank stores it."""

    step: int | None = None
    """Completed actor steps when the version was written; None if another run wrote it."""

    def flat(self) -> dict[str, Any]:
        """Return the fields as one record without nesting, as `crl bank --json` prints it."""
        provenance, counters = self.provenance, self.counters
        return {
            "uid": self.uid,
            "version": self.version,
            "status": self.status,
            "task": self.task,
            "goal": self.goal,
            "variation": self.place.variation,
            "text": self.text,
            "parents": provenance.parents,
            "reward": provenance.reward,
            "step": self.step,
            "generation": provenance.generation,
            **{field.name: getattr(counters, field.name) for field in fields(counters)},
        }


@dataclass(frozen=True, slots=True)
class VersionView:
    """Version of an entry as recorded in the log."""

    seq: int
    """Sequence number in the log."""
    uid: str
    version: int
    step: int | None
    """Completed actor steps when the version was written; None if another run wrote it."""
    kind: str
    """Operation that wrote the version: add, update, merge or import."""
    by: str
    """Id of the request or of the merge that wrote the version; for an import the uid."""
    text: str
    parents: tuple[str, ...]
    """Versions that this version was made from, as `uid@version`."""


@dataclass(frozen=True, slots=True)
class UseView:
    """Credited episode that an entry guided."""

    step: int | None
    """Completed actor steps when the episode was credited; None if in another run."""
    episode: str
    """Id of the episode: run/step/group/member."""
    version: int
    """Version of the entry that guided the episode."""
    reward: float
    """r = 1 for a success, −1 for a failure."""


@dataclass(frozen=True, slots=True)
class LiftView:
    """Success in one group with an entry and without any experience."""

    step: int | None
    """Completed actor steps when the success rates were recorded; None if in another run."""
    group: str
    """Id of the group: run/step/group."""
    version: int
    """Version of the entry that guided the members."""
    guided: float
    """Success rate of the members that the entry guided."""
    free: float
    """Success rate of the free members."""

    @property
    def lift(self) -> Lift:
        return Lift(1, self.guided - self.free)


@dataclass(frozen=True, slots=True)
class RefinementView:
    """Answer of the extractor to a question of an agent (search_and_ask, CRL §3.2.2)."""

    id: str
    """Id of the generation."""
    step: int | None
    """Completed actor steps at the answer; None if in another run."""
    uid: str
    """Uid of the entry that was refined."""
    version: int
    """Version of the entry that was refined."""
    text: str | None
    """Text that the agent read; None if it read the unchanged entry."""

    @property
    def unit(self) -> UnitKey:
        """Key of the refinement's credit unit."""
        return UnitKey(self.id, 1)


@dataclass(frozen=True, slots=True)
class GenerationView:
    """Generation of the extractor."""

    id: str
    extractor: int
    """Policy version of the extractor."""
    prompt: tuple[int, ...]
    """Token ids of the prompt."""
    sampled: tuple[int, ...]
    """Token ids of the completion."""
    finish: str
    span: tuple[int, int]
    """Tokens [start, stop) of the unit in `sampled`."""
    trained: int
    """Number of times that the generation was trained on."""
    trained_at: int | None
    """Actor step that last trained on the generation; None if none did."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """Eviction of an entry."""

    step: int | None
    """Completed actor steps at the eviction; None if in another run."""
    by: str | None
    """Id of the request or of the merge that caused the eviction; None if neither did."""
    why: Literal["bounds", "votes", "discarded", "pruned"]
    """Reason of the eviction.

    * bounds: the bank exceeded its bounds. `by` is the request whose entries were written, or None
      if a run opened the bank with lower bounds.
    * votes: the answer to the request `by` voted the entry out.
    * discarded: the extractor discarded the entry in the merge `by`.
    * pruned: a user pruned the bank.
    """


@dataclass(frozen=True, slots=True)
class EffectView:
    """Credited episodes and lift of all versions of an entry within some steps."""

    uid: str
    """Uid of the entry, or id of an answer to a question."""
    won: int
    """Number of credited episodes that succeeded."""
    credited: int
    """Number of credited episodes."""
    lift: Lift | None
    """Lift; None without a group that also has free members."""


@dataclass(frozen=True, slots=True)
class KeyVectors:
    """Embeddings of the keys of active entries."""

    name: str | None
    """Name of the keys (`crl.manager.keys.KeyEmbedder.name`).

    None if there are no vectors yet, as in an imported bank that no run has opened.
    """
    vectors: Mapping[str, NDArray[np.float32]]
    """Vectors by uid: float32 [dim], unit norm."""

    def comparable(self, embedder: str, dim: int) -> bool:
        """Return whether the keys can be compared with vectors of `embedder` of size `dim`."""
        return embedder_of(self.name or "") == embedder and all(
            len(vector) == dim for vector in self.vectors.values()
        )


@dataclass(frozen=True, slots=True)
class RequestView:
    """Request to distil an episode that is pending, leased or dead."""

    id: str
    state: QueueState
    step: int
    task: str
    goal: str
    success: bool
    guided: tuple[str, ...]
    """Uids of the experiences that guided the episode."""
    reason: str | None
    """Reason why the request is dead or why its last attempt failed; None if no attempt failed."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """Combined counters of the entries with the same task, goal and text."""

    task: str
    goal: str
    text: str
    won: int
    """Number of credited episodes that succeeded."""
    credited: int
    """Number of credited episodes."""
    lift: Lift | None
    """Lift; None before the first group that also has free members."""

    @property
    def rate(self) -> float:
        """Success rate of the credited episodes; NaN without credited episodes."""
        return self.won / self.credited if self.credited else math.nan


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of two banks, A and B."""

    only_a: tuple[Lesson, ...]
    """Lessons of A that B does not have, in `lift_order`."""
    only_b: tuple[Lesson, ...]
    """Lessons of B that A does not have, in `lift_order`."""
    both: tuple[tuple[Lesson, Lesson], ...]
    """Pairs (lesson in A, lesson in B), sorted by the difference of lifts, then of rates.

    The largest difference is first.
    """

    @property
    def lessons(self) -> int:
        """Number of different lessons in the two banks."""
        return len(self.only_a) + len(self.only_b) + len(self.both)


def require_bank(path: Path) -> None:
    """Raise `ConfigError` if there is no bank at `path` that this version of crl can read."""
    check_bank(
        path,
        "bank",
        "Give a run directory or a bank.sqlite file of this version of crl",
    )


@contextmanager
def open_reader(path: Path) -> Iterator[BankReader]:
    """Open a reader of the bank at `path` and close it when the block ends.

    Raise `ConfigError` if there is no bank that this version of crl can read, and `StoreError` if
    the file is damaged.
    """
    require_bank(path)
    with as_store_errors(path), closing(connect_to_read(path)) as db:
        db.row_factory = sqlite3.Row
        db.execute("BEGIN")  # all following reads see the same state
        with check_rows(path):
            yield BankReader(path, db)


class BankReader:
    """Reader of one snapshot of a bank, created by `open_reader`.

    Every call queries the file again.
    """

    def __init__(self, path: Path, db: sqlite3.Connection) -> None:
        self.path, self._db = path, db

    def _rows(self, sql: str, *parameters: Any) -> list[sqlite3.Row]:
        return self._db.execute(sql, parameters).fetchall()

    def _counts(self, sql: str) -> dict[str, int]:
        return {name: number for name, number in self._rows(sql)}

    # ── entries ───────────────────────────────────────────────────────────────────────────────────

    def entries(self, status: ExperienceStatus | None = "active") -> list[EntryView]:
        """Return the entries with `status` in the order in which they were last written.

        None selects every status.
        """
        return self._entries("status = IFNULL(?, status)", status)

    def uids(self) -> list[str]:
        """Return the uids of all entries of every status."""
        return [row["uid"] for row in self._rows("SELECT uid FROM entries")]

    def find(self, name: str) -> EntryView:
        """Return the entry that `name` identifies.

        `name` is a uid, a uid without its run, or a unique prefix of either. A suffix `@version` is
        allowed if the entry has or had this version. An exact match takes precedence over a prefix.

        Raise `ConfigError` if no entry or more than one entry matches, or if the version does not
        exist.
        """
        uids = self.uids()
        short = short_uids(uids)
        names = dict.fromkeys((name, re.sub(r"@[0-9]+$", "", name)))  # a uid may have this ending
        exact = [[uid for uid in uids if text in (uid, _without_run(uid))] for text in names]
        prefixed = [
            [
                uid
                for uid in uids
                if text and (uid.startswith(text) or _without_run(uid).startswith(text))
            ]
            for text in names
        ]
        matches = next(filter(None, exact + prefixed), None)
        if not matches:
            raise ConfigError(
                "uid",
                name,
                "no experience of this bank has this uid",
                "Run crl bank ls to list the uids; add --status all to include evicted experiences",
            )
        if len(matches) > 1:
            listed = ", ".join(short[uid] for uid in sorted(matches)[:4]) + (
                ", …" if len(matches) > 4 else ""
            )
            raise ConfigError(
                "uid",
                name,
                f"the uids of {len(matches)} experiences start with it: {listed!r}",
                "Give a longer part of the uid",
            )
        entry = self._entries("uid = ?", matches[0])[0]
        if not (entry.uid.startswith(name) or _without_run(entry.uid).startswith(name)):
            version = name.rpartition("@")[2]
            if len(version) > 9 or not 1 <= int(version) <= entry.version:
                raise ConfigError(
                    "uid",
                    name,
                    f"the newest version of this experience is {entry.version}",
                    "Omit the version",
                )
        return entry

    def _entries(self, where: str, *parameters: Any) -> list[EntryView]:
        written = self._rows(
            f"SELECT data ->> 'uid', data ->> 'version', {STEP_SQL} FROM log WHERE {WRITES_VERSION}"
        )
        steps = {UnitKey(uid, version): step for uid, version, step in written}
        ((version,),) = self._rows("PRAGMA user_version")
        votes = "votes" if version > 2 else "0 AS votes"  # older schemas have no votes
        lift = "lift_groups, lift_mean, lift_m2" if version > 3 else "0 AS lift_groups"
        counters = f"retrieved, last_returned_step, credited, credit, {votes}, {lift}"
        variation = "variation" if version > 5 else "'' AS variation"
        reward = "reward" if version > 6 else "NULL AS reward"
        columns = (
            f"uid, version, status, task, goal, {variation}, text, parents, {reward}, generation, "
            f"start, stop, {counters}"
        )
        sql = (
            f"SELECT {columns} FROM entries JOIN units USING (uid, version) "
            f"WHERE {where} ORDER BY entries.rowid"
        )
        entries = [read_entry(row) for row in self._rows(sql, *parameters)]
        return [
            EntryView(
                e.uid, e.version, e.text, e.place, e.provenance, e.counters, e.status,
                step=steps.get(e.unit),
            )
            for e in entries
        ]  # fmt: skip

    def lineage(self, unit: UnitKey) -> list[VersionView]:
        """Return the version and all its ancestors, the newest first."""
        versions = {UnitKey(version.uid, version.version): version for version in self.versions()}
        found: dict[UnitKey, VersionView] = {}
        waiting = [unit]
        while waiting:
            key = waiting.pop()
            if key in versions and key not in found:
                found[key] = versions[key]
                waiting += [_parse_unit(parent) for parent in versions[key].parents]
        return sorted(found.values(), key=lambda version: -version.seq)

    def offspring(self, uid: str) -> list[VersionView]:
        """Return the versions of other entries that have a version of this entry as a parent."""
        inherits = f"EXISTS (SELECT 1 FROM json_each(data, '$.parents') WHERE {_UID_PART} = ?)"
        return [version for version in self._versions(inherits, f"{uid}@") if version.uid != uid]

    def versions(self) -> list[VersionView]:
        """Return all versions of all entries, in the order in which they were written."""
        return self._versions()

    def distilled_from(self, step: int, group: int, member: int) -> list[VersionView]:
        """Return the versions that were distilled from an episode of this run.

        `step`: completed actor steps before the episode, as in its id.
        """
        found = self._versions("origin LIKE ?", f"%/{step}/{group}/{member}")
        return [version for version in found if version.step is not None]

    def _versions(self, where: str = "TRUE", *parameters: Any) -> list[VersionView]:
        rows = self._rows(
            f"SELECT seq, {STEP_SQL} AS step, kind, origin, data FROM log "
            f"WHERE {WRITES_VERSION} AND {where} ORDER BY seq",
            *parameters,
        )
        return [_version(row, json.loads(row["data"])) for row in rows]

    def uses(self, uid: str) -> list[UseView]:
        """Return the credited episodes of all versions of an entry, in order.

        Episodes that rejected the entry are not included.
        """
        columns = f"{STEP_SQL}, origin, data ->> 'version', data ->> 'reward'"
        where = "kind = 'credit' AND data ->> 'uid' = ? AND data ->> 'reward' IS NOT NULL"
        rows = self._rows(f"SELECT {columns} FROM log WHERE {where} ORDER BY seq", uid)
        return [UseView(*row) for row in rows]

    def lifts(self, uid: str) -> list[LiftView]:
        """Return the success rates that were recorded for all versions of an entry, in order."""
        columns = f"{STEP_SQL}, origin, data ->> 'version', data ->> 'guided', data ->> 'free'"
        rows = self._rows(
            f"SELECT {columns} FROM log WHERE kind = 'lift' AND data ->> 'uid' = ? ORDER BY seq",
            uid,
        )
        return [LiftView(*row) for row in rows]

    def refinement(self, name: str) -> RefinementView | None:
        """Return the refinement with the id `name`; None if there is none."""
        return next(iter(self._refinements("origin = ?", name)), None)

    def refinements(self, uid: str) -> list[RefinementView]:
        """Return the refinements of all versions of an entry, in order."""
        return self._refinements("data ->> 'uid' = ?", uid)

    def _refinements(self, where: str, *parameters: Any) -> list[RefinementView]:
        columns = f"origin, {STEP_SQL}, data ->> 'uid', data ->> 'version', data ->> 'text'"
        rows = self._rows(
            f"SELECT {columns} FROM log WHERE kind = 'refine' AND {where} ORDER BY seq", *parameters
        )
        return [RefinementView(*row) for row in rows]

    def eviction(self, uid: str) -> Eviction | None:
        """Return the eviction of an entry; None if it was not evicted."""
        found = self._evictions("uid = ?", uid)
        return found[0][1] if found else None

    def evictions(self, first: int, last: int) -> list[tuple[str, Eviction]]:
        """Return (uid, eviction) of the evictions at the steps `first` to `last` of the run."""
        return self._evictions("step BETWEEN ? AND ?", first, last)

    def _evictions(self, where: str, *parameters: Any) -> list[tuple[str, Eviction]]:
        """Return (uid, eviction); the discards of merges come last."""
        # Banks of earlier versions have the reason "room" for bounds.
        sql = f"""
            SELECT uid, step, cause, why FROM (
                SELECT seq, origin AS uid, {STEP_SQL} AS step, data ->> 'for' AS cause,
                    CASE data ->> 'reason' WHEN 'votes' THEN 'votes' WHEN 'bounds' THEN 'bounds'
                    WHEN 'room' THEN 'bounds'
                    ELSE IIF(data ->> 'for' IS NULL, 'pruned', 'bounds') END AS why
                FROM log WHERE kind = 'evict'
                UNION ALL
                SELECT seq, substr({_UID_PART}, 1, length({_UID_PART}) - 1), {STEP_SQL}, origin,
                    'discarded'
                FROM log, json_each(data, '$.targets') WHERE kind = 'discard'
            ) WHERE {where} ORDER BY why = 'discarded', seq"""
        return [(row["uid"], Eviction(*row[1:])) for row in self._rows(sql, *parameters)]

    def effects(self, first: int, last: int) -> list[EffectView]:
        """Return the effects of entries at the steps `first` to `last` of the run.

        The order is that of `lift_order`.
        """
        steps = f"{STEP_SQL} BETWEEN ? AND ?"
        credited = self._rows(
            "SELECT data ->> 'uid', COUNT(*), SUM((data ->> 'reward') > 0) FROM log "
            f"WHERE kind = 'credit' AND data ->> 'reward' IS NOT NULL AND {steps} GROUP BY 1",
            first, last,
        )  # fmt: skip
        lifts: dict[str, list[Lift]] = {}
        for uid, guided, free in self._rows(
            "SELECT data ->> 'uid', data ->> 'guided', data ->> 'free' FROM log "
            f"WHERE kind = 'lift' AND {steps} ORDER BY seq",
            first, last,
        ):  # fmt: skip
            lifts.setdefault(uid, []).append(Lift(1, guided - free))
        found = [
            EffectView(uid, won, n, pooled_lift(lifts.get(uid, ()))) for uid, n, won in credited
        ]
        return sorted(found, key=lambda view: (lift_order(view.lift), view.credited - 2 * view.won))

    def operations(self, first: int, last: int) -> dict[str, int]:
        """Return the number of operations by kind at the steps `first` to `last` of the run."""
        sql = (
            f"SELECT kind, COUNT(*) FROM log WHERE {STEP_SQL} BETWEEN ? AND ? "
            "GROUP BY kind ORDER BY kind"
        )
        return {kind: number for kind, number in self._rows(sql, first, last)}

    def generation(self, unit: UnitKey) -> GenerationView | None:
        """Return the generation that wrote a version; None if it is not stored (any more)."""
        sql = (
            "SELECT * FROM units JOIN generations ON id = generation WHERE uid = ? AND version = ?"
        )
        for row in self._rows(sql, *unit):
            prompt, sampled = (
                tuple(np.frombuffer(row[name], "<i4").tolist()) for name in ("prompt", "sampled")
            )
            span = (row["start"], row["stop"])
            return GenerationView(
                row["id"],
                row["extractor"],
                prompt,
                sampled,
                row["finish"],
                span,
                row["c_train"],
                row["t_last"],
            )
        return None

    # ── search ────────────────────────────────────────────────────────────────────────────────────

    def keys(self) -> KeyVectors:
        """Return the keys of the active entries."""
        name = next(
            (row["value"] for row in self._rows("SELECT value FROM facts WHERE name = 'embedder'")),
            None,
        )
        rows = self._rows("SELECT uid, vector FROM entries WHERE status = 'active'") if name else []
        return KeyVectors(
            name,
            dict(
                zip(
                    (row["uid"] for row in rows),
                    read_vectors(row["vector"] for row in rows),
                    strict=True,
                )
            ),
        )

    # ── requests ──────────────────────────────────────────────────────────────────────────────────

    def requests(self, *states: QueueState) -> list[RequestView]:
        """Return the requests in one of `states`, in queue order; done requests are left out."""
        placeholders = ", ".join("?" * len(states))
        sql = (
            f"SELECT * FROM requests WHERE state IN ({placeholders}) AND payload IS NOT NULL "
            "ORDER BY step, team, member, id"
        )
        return [_request(row) for row in self._rows(sql, *states)]

    def queue(self) -> dict[str, int]:
        """Return the number of requests by state."""
        states: dict[str, int] = dict.fromkeys(("pending", "leased", "done", "dead"), 0)
        return states | self._counts("SELECT state, COUNT(*) FROM requests GROUP BY state")

    # ── metrics ───────────────────────────────────────────────────────────────────────────────────

    def step(self) -> int | None:
        """Return the completed actor steps at the last operation.

        None if no run made the operation, or if another run made it.
        """
        rows = self._rows(f"SELECT {STEP_SQL} FROM log ORDER BY seq DESC LIMIT 1")
        return rows[0][0] if rows else None

    def stats(self) -> dict[str, Any]:
        """Return the metrics of the whole bank.

        The operations in `log`, `ops` and `dropped` are those of the run that owns the bank.

        * bank: path of the file.
        * bytes: size of the file and of SQLite's write-ahead log beside it.
        * keys: name of the keys, see `KeyVectors.name`.
        * log: number of operations.
        * step: completed actor steps at the last operation; None if no run made it or if it was
          made by another run.
        * earlier: number of operations of other runs, if the bank started with their entries.
        * entries: by task, the number of entries of each status, and the number of goals that have
          an active entry.
        * used: number of active entries, and of those that were used; see `_use_counts`.
        * lift: number of active entries by the sign of their lift; see `_lift_counts`.
        * won: number of credited active entries by success rate; see `_win_rate_counts`.
        * ops: number of operations by kind.
        * dropped: number of dropped ops by reason.
        * queue: number of requests by state.
        * generations: number of stored generations.
        * ready: number of units with pending rewards.
        """
        entries = self.entries(None)
        active = [entry for entry in entries if entry.status == "active"]
        ((generations,),) = self._rows("SELECT COUNT(*) FROM generations")
        ((ready,),) = self._rows("SELECT COUNT(*) FROM units WHERE ready IS NOT NULL")
        ops = self._counts(
            f"SELECT kind, COUNT(*) FROM log WHERE seq > {RESET_SEQ} GROUP BY kind ORDER BY kind"
        )
        ((earlier,),) = self._rows(f"SELECT COUNT(*) FROM log WHERE seq <= {RESET_SEQ}")
        return {
            "bank": str(self.path),
            "bytes": self.path.stat().st_size + wal_bytes(self.path),
            "keys": self.keys().name,
            "log": sum(ops.values()),
            "step": self.step(),
            "earlier": earlier,
            "entries": {
                task: _entry_counts([entry for entry in entries if entry.task == task])
                for task in sorted({e.task for e in entries})
            },
            "used": _use_counts(active),
            "lift": _lift_counts(active),
            "won": _win_rate_counts(active),
            "ops": ops,
            "dropped": self._counts(
                "SELECT data ->> 'reason', SUM(data ->> 'count') FROM log "
                f"WHERE kind = 'drop' AND seq > {RESET_SEQ} GROUP BY 1"
            ),
            "queue": self.queue(),
            "generations": generations,
            "ready": ready,
        }


def compare_banks(a: Path, b: Path) -> Comparison:
    """Return the comparison of the active entries of two banks.

    Entries with the same task, goal and text are combined into one lesson. Raise errors as
    `open_reader` does. They name the bank that has the fault.
    """
    lessons = []
    for path in (a, b):
        with open_reader(path) as bank:
            lessons.append(_lessons(bank.entries()))
    of_a, of_b = lessons
    both = [(lesson, of_b[key]) for key, lesson in of_a.items() if key in of_b]
    both.sort(key=lambda pair: _difference_key(*pair), reverse=True)
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
    return dict(
        sorted(
            lessons.items(),
            key=lambda item: (lift_order(item[1].lift), item[1].credited - 2 * item[1].won),
        )
    )


def _lesson(task: str, goal: str, text: str, same: Sequence[EntryView]) -> Lesson:
    counters = [entry.counters for entry in same]
    return Lesson(
        task,
        goal,
        text,
        sum(c.won for c in counters),
        sum(c.credited for c in counters),
        pooled_lift(c.lift for c in counters),
    )


def pooled_lift(lifts: Iterable[Lift | None]) -> Lift | None:
    """Return the lift over the groups of all `lifts`; None if no lift is known."""
    known = [lift for lift in lifts if lift]
    return reduce(add, known) if known else None


def _difference_key(a: Lesson, b: Lesson) -> tuple[float, float]:
    """Return a sort key: the difference of two lessons in lift, then in rate.

    The difference in lift is reduced by the half width of its interval. It is −∞ if a lift is
    unknown. The difference in rate is −1 if a rate is unknown.
    """
    lift = (
        abs(a.lift.mean - b.lift.mean) - math.hypot(a.lift.half_width, b.lift.half_width)
        if a.lift and b.lift
        else -math.inf
    )
    return lift, abs(a.rate - b.rate) if a.credited and b.credited else -1.0


def _use_counts(active: Sequence[EntryView]) -> dict[str, int]:
    """Return the number of active entries, and how many of them were used.

    * retrieved: entries that were ever retrieved.
    * credited: entries that were ever credited.
    * voted: entries with a nonzero sum of votes.
    """
    counters = [entry.counters for entry in active]
    return {
        "active": len(counters),
        "retrieved": sum(c.retrieved > 0 for c in counters),
        "credited": sum(c.credited > 0 for c in counters),
        "voted": sum(c.votes != 0 for c in counters),
    }


def _win_rate_counts(active: Sequence[EntryView]) -> list[int]:
    """Return the numbers of credited entries by success rate.

    [0, 1] is divided into `WIN_RATE_BINS` equal bins.
    """
    bins = Counter(
        min(WIN_RATE_BINS - 1, int(WIN_RATE_BINS * counters.won / counters.credited))
        for counters in (entry.counters for entry in active)
        if counters.credited
    )
    return [bins[i] for i in range(WIN_RATE_BINS)]


def _lift_counts(active: Sequence[EntryView]) -> dict[str, int]:
    """Return the number of entries whose lift is above 0, below 0, around 0 or unknown.

    A lift is around 0 if its 95 % interval contains 0. Otherwise the whole interval is above or
    below 0.
    """
    counts: dict[str, int] = dict.fromkeys(("above", "below", "around", "unknown"), 0)
    for lift in (entry.counters.lift for entry in active):
        counts[("around", "above", "below")[lift.sign] if lift else "unknown"] += 1
    return counts


def short_uids(uids: Sequence[str]) -> dict[str, str]:
    """Return the short forms of uids, by uid.

    A short form omits the run's name. If two short forms are equal, all uids stay unchanged.
    """
    tails = {uid: _without_run(uid) for uid in uids}
    return tails if len(set(tails.values())) == len(tails) else {uid: uid for uid in tails}


def _without_run(uid: str) -> str:
    return uid.partition("/")[2] or uid


def _parse_unit(text: str) -> UnitKey:
    uid, _, version = text.rpartition("@")
    return UnitKey(uid, int(version))


def _version(row: sqlite3.Row, data: dict[str, Any]) -> VersionView:
    unit = (data["uid"], data["version"])
    return VersionView(
        row["seq"],
        *unit,
        row["step"],
        row["kind"],
        row["origin"],
        data["text"],
        tuple(data["parents"]),
    )


def _request(row: sqlite3.Row) -> RequestView:
    request = DistilRequest.from_json(row["payload"])
    guided = tuple(hit.use.uid for hit in request.shown)
    task = request.task
    return RequestView(
        row["id"],
        row["state"],
        row["step"],
        task.name,
        task.goal,
        request.success,
        guided,
        row["reason"],
    )


def _entry_counts(entries: Sequence[EntryView]) -> dict[str, int]:
    statuses = Counter(entry.status for entry in entries)
    goals = {entry.goal for entry in entries if entry.status == "active"}
    return {
        **{status: statuses[status] for status in ("active", "evicted", "merged")},
        "goals": len(goals),
    }

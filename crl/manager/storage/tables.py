"""Operations on a bank's tables, and conversion of rows to records.

Each function runs some statements within a transaction of `Store`. For operations that must not be
repeated, the log holds one row per origin (request, merge, episode or group), op and kind. `log`
reports whether the row is new.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from sqlite3 import Connection, Row

import numpy as np
from numpy.typing import NDArray

from crl.config.schema import EvictionOrder, Scope
from crl.manager.records import (
    ApplyRules,
    Credit,
    DistilRequest,
    Entry,
    Generation,
    GroupSuccess,
    Refined,
    Stamp,
    UnitKey,
    Vote,
    Write,
)
from crl.types import (
    MAX_OUTCOMES,
    Completion,
    Counters,
    ExperienceStatus,
    Lift,
    Place,
    Provenance,
    kept_counts,
    split_kept,
)

ACTIVE_ENTRIES = "SELECT * FROM entries JOIN units USING (uid, version) WHERE status = 'active'"
"""Query for the active entries with the counters of their units."""

ACTIVE_OUTCOMES = """
    SELECT uid, version, data ->> 'reward' AS outcome
    FROM log JOIN entries ON uid = data ->> 'uid' AND version = data ->> 'version'
    WHERE kind = 'credit' AND status = 'active' AND outcome IS NOT NULL ORDER BY seq"""
"""Query for r = ±1 of the credited episodes of the active entries, in the order of their credit."""

RESET_SEQ = "IFNULL((SELECT CAST(value AS INTEGER) FROM facts WHERE name = 'begun'), 0)"
"""SQL for the sequence number of the last operation of earlier runs, whose clocks differ.

The value is 0 if the bank was never reset by `Store.reset_for_new_run`.
"""

_WRITTEN_AT = f"(SELECT step FROM log WHERE seq = written AND seq > {RESET_SEQ})"
"""SQL for the completed actor steps when an entry was written; NULL if another run wrote it."""

EVICTION_ORDER: dict[EvictionOrder, str] = {
    "fifo": "written",
    # An entry that was never retrieved counts as retrieved when it was written.
    "lru": f"IFNULL(last_returned_step, {_WRITTEN_AT}), written",
    # The half with the highest scores stays. Of the other half, entries that were tried are evicted
    # first, because an untried entry may be better.
    "credit": """
        ROW_NUMBER() OVER (ORDER BY success_score(credited, credit) DESC, written DESC) \
<= (:keep + 1) / 2,
        credited = 0, success_score(credited, credit), written
    """,
}
"""ORDER BY of active entries, by eviction policy. The first entry is evicted first.

Retrievals since the last flush are not in the tables yet.
"""

SCOPE_COLUMNS: dict[Scope, tuple[str, ...]] = {
    "variation": ("task", "goal", "variation"),
    "goal": ("task", "goal"),
    "task": ("task",),
    "shared": (),
}
"""Columns of entries that guide the same episodes, by scope of the bank."""

EXTRA_EVICTION_DIVISOR = 100
"""Divisor for additional evictions.

If the bank is over its size, size // EXTRA_EVICTION_DIVISOR entries are evicted in addition to the
surplus. Evictions are then less frequent: the choice of the entries reads all active entries.
"""


# ── log and facts ─────────────────────────────────────────────────────────────────────────────────


def log(
    db: Connection, stamp: Stamp, kind: str, origin: str, op: int, data: Mapping[str, object]
) -> int | None:
    """Write a log row. Return its sequence number, or None if this op was logged before."""
    sql = (
        "INSERT OR IGNORE INTO log (step, extractor, kind, origin, op, data) "
        "VALUES (?, ?, ?, ?, ?, ?)"
    )
    cursor = db.execute(sql, (*stamp, kind, origin, op, json.dumps(data, ensure_ascii=False)))
    return cursor.lastrowid if cursor.rowcount else None


def last_seq(db: Connection) -> int:
    """Return the sequence number of the last log row; 0 if the log is empty."""
    return db.execute("SELECT IFNULL(MAX(seq), 0) FROM log").fetchone()[0]


def last_stamp(db: Connection) -> Stamp:
    """Return the stamp of the run's last operation; zeros before the first operation.

    Changes that are made outside a run use this stamp.
    """
    row = db.execute(
        f"SELECT step, extractor FROM log WHERE seq > {RESET_SEQ} ORDER BY seq DESC LIMIT 1"
    ).fetchone()
    return Stamp(*row) if row else Stamp(0, 0)


def fact(db: Connection, name: str) -> str | None:
    row = db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return row["value"] if row else None


def set_fact(db: Connection, name: str, value: str) -> None:
    db.execute(
        "INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        (name, value),
    )


# ── distilled answers ─────────────────────────────────────────────────────────────────────────────


def write_entry(db: Connection, request: DistilRequest, write: Write, stamp: Stamp) -> Entry:
    """Apply one add or update. Return the resulting entry."""
    if write.targets and current_rows(db, write.targets):
        (target,) = write.targets
        kind, unit = "update", UnitKey(target.uid, target.version + 1)
    else:
        kind, unit = "add", UnitKey(f"{request.id}#{write.op}", 1)
    parents = tuple(map(str, write.targets))
    provenance = Provenance(request.id, write.span, parents, request.reward)
    task = request.task
    entry = Entry(*unit, write.text, task.place, provenance)
    _write_version(db, kind, entry, write, stamp)
    return entry


def without_repetition(
    db: Connection, request: DistilRequest, write: Write, scope: Scope
) -> Write | None:
    """Return the write, changed so that no two entries for the same episodes have its text.

    If an active entry has the text, return an update of it if its episode had a lower reward than
    that of the request, otherwise None.
    """
    values = _origin(request, SCOPE_COLUMNS[scope]) | {"text": write.text}
    sql = f"SELECT uid, version, reward FROM entries WHERE status = 'active' {_where(values)}"
    known = db.execute(f"{sql} ORDER BY reward DESC LIMIT 1", values).fetchone()
    if known is None:
        return write
    uid, version, reward = known
    if request.reward is None or (reward is not None and reward >= request.reward):
        return None
    return replace(write, targets=(UnitKey(uid, version),))


def _where(columns: Iterable[str]) -> str:
    """Return the SQL condition, after another one, that columns have the values of their names."""
    return " ".join(f"AND {column} = :{column}" for column in columns)


def write_merge(db: Connection, name: str, write: Write, first: Row, stamp: Stamp) -> Entry:
    """Write and return the entry that replaces the write's targets.

    `name` is the id of the generation. `first` is the row of the first target.
    """
    provenance = Provenance(name, write.span, tuple(map(str, write.targets)))
    entry = Entry(f"{name}#{write.op}", 1, write.text, _read_place(first), provenance)
    _write_version(db, "merge", entry, write, stamp)
    return entry


def _write_version(db: Connection, kind: str, entry: Entry, write: Write, stamp: Stamp) -> None:
    provenance = entry.provenance
    data = {"uid": entry.uid, "version": entry.version, "text": entry.text, "task": entry.task,
            "goal": entry.goal, "span": provenance.span, "parents": provenance.parents}  # fmt: skip
    seq = log(db, stamp, kind, provenance.generation, write.op, data)
    db.execute("DELETE FROM entries WHERE uid = ?", (entry.uid,))
    _insert_entry(db, seq, entry, vector_bytes(write.vector))
    sql = "INSERT INTO units (uid, version, generation, start, stop) VALUES (?, ?, ?, ?, ?)"
    db.execute(sql, (*entry.unit, provenance.generation, *provenance.span))


def write_refinement(db: Connection, refined: Refined, stamp: Stamp) -> bool:
    """Log a refinement, and write its unit as retrieved once. Return False if it was logged before.

    No unit is written if the refinement has no text.
    """
    name, (start, stop) = refined.generation.id, refined.span
    data = {
        "uid": refined.source.uid,
        "version": refined.source.version,
        "text": refined.text,
        "span": refined.span,
    }
    if log(db, stamp, "refine", name, 0, data) is None:
        return False
    if refined.text is not None:
        columns = "uid, version, generation, start, stop, retrieved, last_returned_step"
        db.execute(
            f"INSERT INTO units ({columns}) VALUES (?, 1, ?, ?, ?, 1, ?)",
            (name, name, start, stop, stamp.step),
        )
    return True


def import_entry(db: Connection, entry: Entry, stamp: Stamp) -> None:
    """Add an imported entry without a vector."""
    provenance, counters = entry.provenance, entry.counters
    data = {"uid": entry.uid, "version": entry.version, "text": entry.text, "task": entry.task,
            "goal": entry.goal, "parents": provenance.parents}  # fmt: skip
    seq = log(db, stamp, "import", entry.uid, entry.version, data)
    _insert_entry(db, seq, entry, b"")
    columns = "uid, version, generation, start, stop, retrieved, credited, credit, votes"
    unit = (
        *entry.unit,
        provenance.generation,
        *provenance.span,
        counters.retrieved,
        counters.credited,
        counters.credit,
        counters.votes,
    )
    db.execute(f"INSERT INTO units ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", unit)
    if counters.lift:
        _set_lift(db, entry.unit, counters.lift)


def _insert_entry(db: Connection, seq: int | None, entry: Entry, vector: bytes) -> None:
    row = (
        seq,
        *entry.unit,
        entry.text,
        entry.task,
        entry.goal,
        json.dumps(entry.provenance.parents),
        entry.status,
        vector,
        entry.place.variation,
        entry.provenance.reward,
    )
    columns = "written, uid, version, text, task, goal, parents, status, vector, variation, reward"
    db.execute(f"INSERT INTO entries ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)


def current_rows(db: Connection, units: Sequence[UnitKey]) -> list[Row]:
    """Return the rows of the active entries whose current versions are `units`, in order.

    Return an empty list if one of the units is not the current version of an active entry.
    """
    sql = "SELECT * FROM entries WHERE uid = ? AND version = ? AND status = 'active'"
    found = [row for unit in units for row in db.execute(sql, unit)]
    return found if len(found) == len(units) else []


def retire(db: Connection, units: Sequence[UnitKey], status: ExperienceStatus) -> list[str]:
    """Set the status of the entries, so that they are no longer retrieved. Return their uids."""
    for unit in units:
        db.execute("UPDATE entries SET status = ? WHERE uid = ?", (status, unit.uid))
    return [unit.uid for unit in units]


def log_dropped(db: Connection, origin: str, dropped: Mapping[str, int], stamp: Stamp) -> None:
    """Log the refused ops of an answer, by reason."""
    for op, (reason, count) in enumerate(sorted(dropped.items())):
        log(db, stamp, "drop", origin, op, {"reason": reason, "count": count})


def store_if_trainable(
    db: Connection,
    generation: Generation,
    wrote: bool,
    malformed: bool,
    rules: ApplyRules,
    stamp: Stamp,
) -> None:
    """Store the generation if it can earn credit.

    It can earn credit if it wrote something, or if it is malformed and `malformed_reward` is set.
    """
    penalized = malformed and rules.malformed_reward is not None
    if penalized:
        _add_malformed_unit(db, generation, rules.malformed_reward, stamp)
    if wrote or penalized:
        _store_generation(db, generation)


def _add_malformed_unit(
    db: Connection, generation: Generation, reward: float | None, stamp: Stamp
) -> None:
    """Turn a generation without any op into a credit unit with version 0 that is ready at once.

    The unit's span is a single token, the first one after the generation's head. This is the first
    token that no usable answer has in this place. The tokens before it are shared with usable
    answers, and the tokens after it often look like a usable answer.
    """
    seq = log(db, stamp, "malformed", generation.id, 0, {"reward": reward})
    start = generation.head_tokens
    unit = (generation.id, 0, generation.id, start, start + 1, 1, reward, seq)
    columns = "uid, version, generation, start, stop, pending_count, pending_sum, ready"
    db.execute(f"INSERT INTO units ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", unit)


def count_vote(db: Connection, request: DistilRequest, vote: Vote, stamp: Stamp) -> bool:
    """Count a vote if its unit is current. Return whether the vote was counted.

    A unit is current if it is the current version of an active entry.
    """
    if not current_rows(db, [vote.unit]):
        return False
    log(
        db,
        stamp,
        "up" if vote.value > 0 else "down",
        request.id,
        vote.op,
        {"uid": vote.unit.uid, "version": vote.unit.version},
    )
    db.execute(
        "UPDATE units SET votes = votes + ? WHERE uid = ? AND version = ?", (vote.value, *vote.unit)
    )
    return True


def evict_by_votes(
    db: Connection, request: DistilRequest, votes: Sequence[Vote], min_down_votes: int, stamp: Stamp
) -> list[str]:
    """Evict the entries in `votes` with at least `min_down_votes` net down votes. Return uids."""
    sql = "SELECT 1 FROM units WHERE uid = ? AND version = ? AND votes <= ?"
    units = [
        vote.unit for vote in votes if db.execute(sql, (*vote.unit, -min_down_votes)).fetchone()
    ]
    return _evict(db, units, {"for": request.id, "reason": "votes"}, stamp)


def evict_for_request(
    db: Connection, request: DistilRequest, rules: ApplyRules, stamp: Stamp
) -> list[str]:
    """Evict the entries over the bounds of the request's goal and of the bank.

    Return their uids.
    """
    goal = _origin(request, _bounded_by(rules))
    return _evict_over_bounds(db, [goal], rules, {"for": request.id}, stamp)


def evict_to_bounds(db: Connection, rules: ApplyRules, stamp: Stamp) -> list[str]:
    """Evict the entries over the bounds of each goal and of the bank. Return their uids.

    The bank was made with other bounds.
    """
    columns = ", ".join(names := _bounded_by(rules))
    over_bound = (
        f"SELECT {columns} FROM entries WHERE status = 'active' "
        f"GROUP BY {columns} HAVING COUNT(*) > ?"
    )
    goals = (
        []
        if rules.max_per_goal is None
        else [
            dict(zip(names, row, strict=True))
            for row in db.execute(over_bound, (rules.max_per_goal,))
        ]
    )
    return _evict_over_bounds(db, goals, rules, {"reason": "bounds"}, stamp)


def _bounded_by(rules: ApplyRules) -> tuple[str, ...]:
    """Return the columns of entries that share the bound `max_per_goal`."""
    return SCOPE_COLUMNS["variation" if rules.scope == "variation" else "goal"]


def _origin(request: DistilRequest, columns: Iterable[str]) -> dict[str, str]:
    """Return the values of some columns of the entries that are written about a request."""
    values = request.task.place._asdict()
    return {name: values[name] for name in columns}


def _evict_over_bounds(
    db: Connection,
    goals: Iterable[Mapping[str, str]],
    rules: ApplyRules,
    data: Mapping[str, object],
    stamp: Stamp,
) -> list[str]:
    evicted = []
    if rules.max_per_goal is not None:
        for goal in goals:
            of_goal = _where(goal)
            surplus = _surplus(db, rules.evict, rules.max_per_goal, 0, of_goal, **goal)
            evicted += _evict(db, surplus, data, stamp)
    if rules.max_entries is not None:
        extra = rules.max_entries // EXTRA_EVICTION_DIVISOR
        evicted += _evict(db, _surplus(db, rules.evict, rules.max_entries, extra), data, stamp)
    return evicted


def _surplus(
    db: Connection, evict: EvictionOrder, keep: int, extra: int, where: str = "", **values: str
) -> list[UnitKey]:
    """Return the active entries to evict so that `keep` remain.

    If at least one entry must be evicted, `extra` additional entries are returned. `where` and
    `values` restrict the entries.
    """
    (active,) = db.execute(
        f"SELECT COUNT(*) FROM entries WHERE status = 'active' {where}", values
    ).fetchone()
    if active <= keep:
        return []
    sql = (
        "SELECT uid, version FROM entries JOIN units USING (uid, version) "
        f"WHERE status = 'active' {where}"
    )
    rows = db.execute(
        f"{sql} ORDER BY {EVICTION_ORDER[evict]} LIMIT :count",
        {**values, "keep": keep, "count": active - keep + extra},
    )
    return [UnitKey(*row) for row in rows]


def _evict(
    db: Connection, units: Sequence[UnitKey], data: Mapping[str, object], stamp: Stamp
) -> list[str]:
    """Evict the entries and log each eviction. Return their uids.

    The entries stay in the history.
    """
    for unit in units:
        log(db, stamp, "evict", unit.uid, unit.version, data)
    return retire(db, units, "evicted")


def _store_generation(db: Connection, generation: Generation) -> None:
    completion = generation.completion
    columns = (
        np.asarray(generation.prompt, "<i4").tobytes(),
        np.asarray(completion.ids, "<i4").tobytes(),
        np.asarray(completion.logprobs, "<f8").tobytes(),
        np.asarray(completion.versions, "<i4").tobytes(),
    )
    kept = (
        (b"".join(completion.kept), np.asarray(kept_counts(completion.kept), "<i4").tobytes())
        if any(completion.kept)
        else (None, None)
    )
    sql = (
        "INSERT INTO generations "
        "(id, extractor, prompt, sampled, logprobs, versions, finish, head, kept, kept_counts) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    )
    head = generation.head_tokens
    db.execute(sql, (generation.id, generation.extractor, *columns, completion.finish, head, *kept))


# ── credit ────────────────────────────────────────────────────────────────────────────────────────


def record_credit(db: Connection, stamp: Stamp, episode: str, op: int, credit: Credit) -> bool:
    """Credit one use in an episode. Return whether the use was credited.

    Return False if the bank does not know the unit, or if this use was credited before. In the log,
    `reward` is r = ±1. A rejected use has no `reward`. A use of an unknown unit is logged as stray.
    """
    unit, outcome = credit.unit, credit.outcome
    data = {"uid": unit.uid, "version": unit.version} | (
        {"reward": outcome} if outcome is not None else {}
    )
    data |= {"verdict": credit.verdict} if credit.verdict else {}
    known = db.execute("SELECT 1 FROM units WHERE uid = ? AND version = ?", unit).fetchone()
    seq = log(db, stamp, "credit" if known else "stray", episode, op, data)
    if seq is None or not known:
        return False
    if outcome is not None:
        db.execute(
            "UPDATE units SET credited = credited + 1, credit = credit + ? "
            "WHERE uid = ? AND version = ?",
            (outcome, *unit),
        )
    if credit.reward is None:
        return True
    sql = """
        UPDATE units SET pending_count = pending_count + 1, pending_sum = pending_sum + ?, \
ready = IFNULL(ready, ?)
        WHERE uid = ? AND version = ? AND generation IN (SELECT id FROM generations)
    """
    db.execute(sql, (credit.reward, seq, *unit))
    return True


def record_lift(db: Connection, stamp: Stamp, group: str, op: int, result: GroupSuccess) -> bool:
    """Add the result of one group for one unit to the unit's lift.

    Return False if the bank does not know the unit, or if this op of the group was recorded before.
    """
    sql = "SELECT lift_groups, lift_mean, lift_m2 FROM units WHERE uid = ? AND version = ?"
    row = db.execute(sql, result.unit).fetchone()
    data = {
        "uid": result.unit.uid,
        "version": result.unit.version,
        "guided": result.guided,
        "free": result.free,
    }
    if row is None or log(db, stamp, "lift", group, op, data) is None:
        return False
    before = read_lift(row)
    _set_lift(db, result.unit, before + result.lift if before else result.lift)
    return True


def _set_lift(db: Connection, unit: UnitKey, lift: Lift) -> None:
    sql = (
        "UPDATE units SET lift_groups = ?, lift_mean = ?, lift_m2 = ? WHERE uid = ? AND version = ?"
    )
    db.execute(sql, (lift.groups, lift.mean, lift.m2, *unit))


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────


def read_entry(row: Row) -> Entry:
    """Return the entry of a row with the columns of `entries` and `units`."""
    provenance = Provenance(
        row["generation"], (row["start"], row["stop"]), tuple(json.loads(row["parents"])),
        row["reward"],
    )  # fmt: skip
    counters = Counters(
        row["retrieved"], row["last_returned_step"], row["credited"], row["credit"],
        row["votes"], read_lift(row),
    )  # fmt: skip
    return Entry(
        row["uid"], row["version"], row["text"], _read_place(row), provenance, counters,
        row["status"],
    )  # fmt: skip


def _read_place(row: Row) -> Place:
    return Place(row["task"], row["goal"], row["variation"])


def set_outcomes(entries: Iterable[Entry], credits: Iterable[Row]) -> None:
    """Set the last outcomes of the entries from rows of `ACTIVE_OUTCOMES`."""
    outcomes: defaultdict[UnitKey, deque[float]] = defaultdict(partial(deque, maxlen=MAX_OUTCOMES))
    for uid, version, reward in credits:
        outcomes[UnitKey(uid, version)].append(reward)
    for entry in entries:
        if known := outcomes.get(entry.unit):
            entry.counters = replace(entry.counters, outcomes=tuple(known))


def read_lift(row: Row) -> Lift | None:
    return (
        Lift(row["lift_groups"], row["lift_mean"], row["lift_m2"]) if row["lift_groups"] else None
    )


def read_generation(row: Row) -> Generation:
    completion = Completion(
        tuple(np.frombuffer(row["sampled"], "<i4").tolist()),
        tuple(np.frombuffer(row["logprobs"], "<f8").tolist()),
        tuple(np.frombuffer(row["versions"], "<i4").tolist()),
        row["finish"],
        split_kept(row["kept"] or b"", np.frombuffer(row["kept_counts"] or b"", "<i4").tolist()),
    )
    prompt = tuple(np.frombuffer(row["prompt"], "<i4").tolist())
    return Generation(
        row["id"], row["extractor"], prompt, completion, row["head"], row["c_train"], row["t_last"]
    )


def vector_bytes(vector: np.ndarray) -> bytes:
    return np.asarray(vector, "<f4").tobytes()


def read_vectors(blobs: Iterable[bytes]) -> list[NDArray[np.float32]]:
    """Return the vectors in `blobs`.

    Raise `ValueError` if they are not float32 vectors of one dimension.
    """
    vectors = [np.frombuffer(blob, "<f4") for blob in blobs]
    if len(lengths := {len(vector) for vector in vectors}) > 1:
        raise ValueError(
            f"vectors with different dimensions: {', '.join(map(str, sorted(lengths)))}"
        )
    return vectors

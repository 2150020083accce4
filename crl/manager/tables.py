"""What operations do to a bank's tables, and what rows stand for: each function is some statements within a transaction of `Store`.

A log row of one origin (request, merge or episode) and op exists once: `log` says whether this is its first time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from sqlite3 import Connection, Row

import numpy as np

from crl.manager.records import ApplyRules, DistilRequest, Entry, Generation, Stamp, UnitKey, Write
from crl.manager.retrieval import surplus
from crl.types import Completion, ExperienceStatus

ENTRIES = "SELECT * FROM entries JOIN units USING (uid, version) WHERE status = 'active'"


# ── the log, facts ──────────────────────────────────────────────────────────────────────────────────────────────────


def log(db: Connection, stamp: Stamp, kind: str, origin: str, op: int, data: Mapping[str, object]) -> int | None:
    """The new row's sequence number; None when that origin did it before."""
    sql = "INSERT OR IGNORE INTO log (step, extractor, kind, origin, op, data) VALUES (?, ?, ?, ?, ?, ?)"
    cursor = db.execute(sql, (*stamp, kind, origin, op, json.dumps(data, ensure_ascii=False)))
    return cursor.lastrowid if cursor.rowcount else None


def last_seq(db: Connection) -> int:
    return db.execute("SELECT IFNULL(MAX(seq), 0) FROM log").fetchone()[0]


def last_stamp(db: Connection) -> Stamp:
    """For changes that no run makes; the log must not be empty."""
    return Stamp(*db.execute("SELECT step, extractor FROM log ORDER BY seq DESC LIMIT 1").fetchone())


def fact(db: Connection, name: str) -> str | None:
    row = db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return row["value"] if row else None


def set_fact(db: Connection, name: str, value: str) -> None:
    db.execute("INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value", (name, value))


# ── distilled answers ───────────────────────────────────────────────────────────────────────────────────────────────


def write_entry(db: Connection, request: DistilRequest, write: Write, stamp: Stamp) -> Entry:
    """Applies one add or update; the entry as it is then."""
    if write.targets and current(db, write.targets):
        (target,) = write.targets
        kind, unit = "update", UnitKey(target.uid, target.version + 1)
    else:
        kind, unit = "add", UnitKey(f"{request.id}#{write.op}", 1)
    parents = tuple(map(str, write.targets))
    entry = Entry(*unit, write.text, request.task.name, request.task.goal, request.id, write.span, parents)
    _put(db, kind, entry, write, stamp)
    return entry


def write_merge(db: Connection, name: str, write: Write, first: Row, stamp: Stamp) -> Entry:
    """The entry that takes the place of the write's targets. first: the first one's row."""
    entry = Entry(f"{name}#{write.op}", 1, write.text, first["task"], first["goal"], name, write.span, tuple(map(str, write.targets)))
    _put(db, "merge", entry, write, stamp)
    return entry


def _put(db: Connection, kind: str, entry: Entry, write: Write, stamp: Stamp) -> None:
    data = {"uid": entry.uid, "version": entry.version, "text": entry.text, "task": entry.task, "goal": entry.goal,
            "span": entry.span, "parents": entry.parents}  # fmt: skip
    log(db, stamp, kind, entry.generation, write.op, data)
    db.execute("DELETE FROM entries WHERE uid = ?", (entry.uid,))
    _insert_entry(db, entry, vector_bytes(write.vector))
    sql = "INSERT INTO units (uid, version, generation, start, stop) VALUES (?, ?, ?, ?, ?)"
    db.execute(sql, (*entry.unit, entry.generation, *entry.span))


def take_in(db: Connection, entry: Entry, stamp: Stamp) -> None:
    """Adds an entry from elsewhere, without a vector."""
    data = {"uid": entry.uid, "version": entry.version, "text": entry.text, "task": entry.task, "goal": entry.goal,
            "parents": entry.parents}  # fmt: skip
    log(db, stamp, "import", entry.uid, entry.version, data)
    _insert_entry(db, entry, b"")
    columns = "uid, version, generation, start, stop, retrieved, credited, credit"
    unit = (*entry.unit, entry.generation, *entry.span, entry.retrieved, entry.credited, entry.credit)
    db.execute(f"INSERT INTO units ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", unit)


def _insert_entry(db: Connection, entry: Entry, vector: bytes) -> None:
    row = (*entry.unit, entry.text, entry.task, entry.goal, json.dumps(entry.parents), entry.status, vector)
    db.execute("INSERT INTO entries (uid, version, text, task, goal, parents, status, vector) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)


def current(db: Connection, units: Sequence[UnitKey]) -> list[Row]:
    """The rows of active entries whose current versions these are, in order; empty when one of them is not."""
    sql = "SELECT * FROM entries WHERE uid = ? AND version = ? AND status = 'active'"
    found = [row for unit in units for row in db.execute(sql, unit)]
    return found if len(found) == len(units) else []


def retire(db: Connection, units: Sequence[UnitKey], status: ExperienceStatus) -> list[str]:
    """The entries guide nobody any more; their uids."""
    for unit in units:
        db.execute("UPDATE entries SET status = ? WHERE uid = ?", (status, unit.uid))
    return [unit.uid for unit in units]


def log_dropped(db: Connection, origin: str, dropped: Mapping[str, int], stamp: Stamp) -> None:
    """The refused ops of an answer, by reason."""
    for op, (reason, count) in enumerate(sorted(dropped.items())):
        log(db, stamp, "drop", origin, op, {"reason": reason, "count": count})


def learn_from(db: Connection, generation: Generation, wrote: bool, malformed: bool, rules: ApplyRules, stamp: Stamp) -> None:
    """Keeps the generation when it can earn credit, for what it wrote or for having said nothing usable."""
    punished = malformed and rules.malformed_reward is not None
    if punished:
        _punish(db, generation, rules.malformed_reward, stamp)
    if wrote or punished:
        _keep_generation(db, generation)


def _punish(db: Connection, generation: Generation, reward: float | None, stamp: Stamp) -> None:
    """A generation without any op is a unit of its own, version 0, and ready at once."""
    seq = log(db, stamp, "malformed", generation.id, 0, {"reward": reward})
    unit = (generation.id, 0, generation.id, 0, len(generation.completion.ids), 1, reward, seq)
    columns = "uid, version, generation, start, stop, pending_count, pending_sum, ready"
    db.execute(f"INSERT INTO units ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", unit)


def make_room(db: Connection, request: DistilRequest, rules: ApplyRules, stamp: Stamp) -> list[str]:
    """Makes room among the entries of the request's goal; an evicted entry stays in the history."""
    sql = f"{ENTRIES} AND task = ? AND goal = ? ORDER BY written"
    rows = db.execute(sql, (request.task.name, request.task.goal)).fetchall()
    gone = surplus([read_entry(row) for row in rows], rules.cap or 0, rules.choice)
    for entry in gone:
        log(db, stamp, "evict", entry.uid, entry.version, {"for": request.id})
    return retire(db, [entry.unit for entry in gone], "evicted")


def _keep_generation(db: Connection, generation: Generation) -> None:
    completion = generation.completion
    columns = (
        np.asarray(generation.prompt, "<i4").tobytes(),
        np.asarray(completion.ids, "<i4").tobytes(),
        np.asarray(completion.logprobs, "<f8").tobytes(),
        np.asarray(completion.versions, "<i4").tobytes(),
    )
    sql = "INSERT INTO generations (id, extractor, prompt, sampled, logprobs, versions, finish, head) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    db.execute(sql, (generation.id, generation.extractor, *columns, completion.finish, generation.head))


# ── credit ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def credit(db: Connection, stamp: Stamp, episode: str, op: int, unit: UnitKey, reward: float) -> bool:
    """False: the bank does not know the unit, or this use of the episode was credited before."""
    data = {"uid": unit.uid, "version": unit.version, "reward": reward}
    known = db.execute("SELECT 1 FROM units WHERE uid = ? AND version = ?", unit).fetchone()
    seq = log(db, stamp, "credit" if known else "stray", episode, op, data)
    if seq is None or not known:
        return False
    db.execute("UPDATE units SET credited = credited + 1, credit = credit + ? WHERE uid = ? AND version = ?", (reward, *unit))
    sql = """
        UPDATE units SET pending_count = pending_count + 1, pending_sum = pending_sum + ?, ready = IFNULL(ready, ?)
        WHERE uid = ? AND version = ? AND generation IN (SELECT id FROM generations)
    """
    db.execute(sql, (reward, seq, *unit))
    return True


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_entry(row: Row) -> Entry:
    return Entry(
        row["uid"], row["version"], row["text"], row["task"], row["goal"], row["generation"], (row["start"], row["stop"]),
        tuple(json.loads(row["parents"])), row["status"], row["retrieved"], row["last_returned_step"], row["credited"], row["credit"],
    )  # fmt: skip


def read_generation(row: Row) -> Generation:
    completion = Completion(
        tuple(np.frombuffer(row["sampled"], "<i4").tolist()),
        tuple(np.frombuffer(row["logprobs"], "<f8").tolist()),
        tuple(np.frombuffer(row["versions"], "<i4").tolist()),
        row["finish"],
    )
    prompt = tuple(np.frombuffer(row["prompt"], "<i4").tolist())
    return Generation(row["id"], row["extractor"], prompt, completion, row["head"], row["c_train"], row["t_last"])


def vector_bytes(vector: np.ndarray) -> bytes:
    return np.asarray(vector, "<f4").tobytes()

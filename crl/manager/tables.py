"""What operations do to a bank's tables, and what rows stand for: each function is some statements within a transaction of `Store`.

A log row of one origin (request or episode) and op exists once: `log` says whether this is its first time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from sqlite3 import Connection, Row

import numpy as np

from crl.manager.records import ApplyRules, Distilled, DistilRequest, Entry, Generation, Stamp, UnitKey, Write
from crl.manager.retrieval import surplus
from crl.types import Completion

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
    if write.target and _is_current(db, write.target):
        kind, unit = "update", UnitKey(write.target.uid, write.target.version + 1)
    else:
        kind, unit = "add", UnitKey(f"{request.id}#{write.op}", 1)
    parents = (str(write.target),) if write.target else ()
    entry = Entry(unit.uid, unit.version, write.text, request.task.name, request.task.goal, request.id, write.span, parents)
    data = {"uid": unit.uid, "version": unit.version, "text": entry.text, "task": entry.task, "goal": entry.goal,
            "span": entry.span, "parents": parents}  # fmt: skip
    log(db, stamp, kind, request.id, write.op, data)
    row = (*unit, entry.text, entry.task, entry.goal, json.dumps(parents), entry.status, vector_bytes(write.vector))
    db.execute("DELETE FROM entries WHERE uid = ?", (unit.uid,))
    db.execute("INSERT INTO entries (uid, version, text, task, goal, parents, status, vector) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    sql = "INSERT INTO units (uid, version, generation, start, stop) VALUES (?, ?, ?, ?, ?)"
    db.execute(sql, (*unit, entry.generation, *entry.span))
    return entry


def _is_current(db: Connection, unit: UnitKey) -> bool:
    sql = "SELECT 1 FROM entries WHERE uid = ? AND version = ? AND status = 'active'"
    return db.execute(sql, unit).fetchone() is not None


def take_in(db: Connection, entry: Entry, stamp: Stamp) -> None:
    """Adds an entry from elsewhere, without a vector."""
    data = {"uid": entry.uid, "version": entry.version, "text": entry.text, "task": entry.task, "goal": entry.goal,
            "parents": entry.parents}  # fmt: skip
    log(db, stamp, "import", entry.uid, entry.version, data)
    row = (*entry.unit, entry.text, entry.task, entry.goal, json.dumps(entry.parents), entry.status, b"")
    db.execute("INSERT INTO entries (uid, version, text, task, goal, parents, status, vector) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    columns = "uid, version, generation, start, stop, retrieved, credited, credit"
    unit = (*entry.unit, entry.generation, *entry.span, entry.retrieved, entry.credited, entry.credit)
    db.execute(f"INSERT INTO units ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", unit)


def count_the_rest(db: Connection, distilled: Distilled, stamp: Stamp) -> None:
    """Logs what changed nothing: `return` and the refused ops, by reason."""
    if distilled.returned:
        log(db, stamp, "return", distilled.request.id, 0, {"count": distilled.returned})
    for op, (reason, count) in enumerate(sorted(distilled.dropped.items())):
        log(db, stamp, "drop", distilled.request.id, op, {"reason": reason, "count": count})


def punish(db: Connection, generation: Generation, reward: float | None, stamp: Stamp) -> None:
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
        db.execute("UPDATE entries SET status = 'evicted' WHERE uid = ?", (entry.uid,))
    return [entry.uid for entry in gone]


def keep_generation(db: Connection, generation: Generation) -> None:
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

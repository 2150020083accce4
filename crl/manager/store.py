"""The bank on disk: requests, entries, generations, credit, and the log of operations that all of them follow from.

Every change writes its log rows and its tables in one transaction (`Database.transaction`). A log row of one origin (request or
episode) and op exists once, so what is repeated after a crash is a no-op: no acknowledged episode is lost, none is distilled
twice, no use is credited twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from sqlite3 import Row
from typing import Any

import aiosqlite
import numpy as np

from crl.manager.credit import Ready
from crl.manager.database import Database
from crl.manager.records import Applied, ApplyRules, Distilled, DistilRequest, Entry, Generation, PendingUnit, Stamp, UnitKey, Write
from crl.manager.retrieval import surplus
from crl.types import Completion, ExperienceUse

Connection = aiosqlite.Connection

ENTRIES = "SELECT * FROM entries JOIN units USING (uid, version) WHERE status = 'active'"


class Store:
    """Made by `open`. Its methods raise `StoreError`; a method that returns has made its change durable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    async def open(cls, path: Path) -> Store:
        """Opens or makes the bank at `path`. Requests that a dead process had leased are pending again. Raises `StoreError`."""
        store = cls(await Database.open(path))
        try:
            await store.release()
        except BaseException:
            await store.aclose()  # else its thread would keep the process alive
            raise
        return store

    async def aclose(self) -> None:
        await self._database.aclose()

    async def backup(self, path: Path) -> None:
        """A consistent copy of the bank in one file, made while it is in use. Raises `StoreError`, also when `path` exists."""
        await self._database.backup(path)

    async def begin_anew(self) -> None:
        """Forgets what belongs to the run that wrote the bank: its requests, its clock, and what its extractor could still be trained on.

        Entries keep their texts, lineage and credit, the log its rows; `counts` begin at 0.
        """

        async def work(db: Connection) -> None:
            await _run(db, "DELETE FROM requests")
            await _run(db, "DELETE FROM generations")
            await _run(db, "INSERT OR REPLACE INTO facts SELECT 'begun', IFNULL(MAX(seq), 0) FROM log")
            await _run(db, "UPDATE units SET pending_count = 0, pending_sum = 0, ready = NULL, last_returned_step = NULL")

        await self._database.transaction(work)

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def submit(self, request: DistilRequest, stamp: Stamp, bound: int | None = None) -> bool:
        """Acknowledges a request, or finds that it was acknowledged before. False: `bound` requests are open, nothing was stored."""

        async def work(db: Connection) -> bool:
            if list(await db.execute_fetchall("SELECT 1 FROM requests WHERE id = ?", (request.id,))):
                return True
            (row,) = await db.execute_fetchall("SELECT COUNT(*) FROM requests WHERE state IN ('pending', 'leased')")
            if bound is not None and row[0] >= bound:
                return False
            await _log(db, stamp, "submit", request.id, 0, {})
            values = (request.id, request.step, request.group, request.member, request.to_json())
            await _run(db, "INSERT INTO requests VALUES (?, ?, ?, ?, 'pending', NULL, ?)", values)
            return True

        return await self._database.transaction(work)

    async def release(self) -> None:
        """Leased requests are pending again: whoever leased them is gone."""
        await self._database.transaction(lambda db: _run(db, "UPDATE requests SET state = 'pending' WHERE state = 'leased'"))

    async def lease(self, limit: int | None = None) -> list[DistilRequest]:
        """Takes pending requests, at most `limit`, in (step, group, member) order."""

        async def work(db: Connection) -> list[DistilRequest]:
            sql = "SELECT id, payload FROM requests WHERE state = 'pending' ORDER BY step, team, member, id LIMIT ?"
            rows = list(await db.execute_fetchall(sql, (-1 if limit is None else limit,)))
            if rows:
                await db.executemany("UPDATE requests SET state = 'leased' WHERE id = ?", [(row["id"],) for row in rows])
            return [DistilRequest.from_json(row["payload"]) for row in rows]

        return await self._database.transaction(work)

    async def bury(self, request: DistilRequest, reason: str, stamp: Stamp) -> None:
        """The request cannot be distilled; it keeps its payload."""

        async def work(db: Connection) -> None:
            sql = "UPDATE requests SET state = 'dead', reason = ? WHERE id = ? AND state IN ('pending', 'leased')"
            if await _run(db, sql, (reason, request.id)):
                await _log(db, stamp, "dead", request.id, 0, {"reason": reason})

        await self._database.transaction(work)

    async def apply(self, distilled: Distilled, stamp: Stamp, rules: ApplyRules) -> Applied:
        """Writes what a request came to and marks it done, in one transaction; nothing when it is done or dead already.

        An update of a version that is no longer the current one becomes an add with that version as its parent.
        """

        async def work(db: Connection) -> Applied:
            request = distilled.request
            sql = "UPDATE requests SET state = 'done', payload = NULL WHERE id = ? AND state IN ('pending', 'leased')"
            if not await _run(db, sql, (request.id,)):
                return Applied()
            changed = [(await _write(db, request, write, stamp), write) for write in distilled.writes]
            await _count_the_rest(db, distilled, stamp)
            punished = distilled.malformed and rules.malformed_reward is not None
            if punished:
                await _punish(db, distilled.generation, rules.malformed_reward, stamp)
            if changed or punished:
                await _keep_generation(db, distilled.generation)
            evicted = await _evict(db, request, rules, stamp) if changed and rules.cap is not None else ()
            return Applied(tuple(changed), tuple(evicted))

        return await self._database.transaction(work)

    # ── entries ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def entries(self) -> list[tuple[Entry, np.ndarray]]:
        """The active entries in the order in which they were last written, with their vectors (float32 [dim])."""
        rows = await self._database.rows(f"{ENTRIES} ORDER BY entries.rowid")
        return [(_entry(row), np.frombuffer(row["vector"], "<f4")) for row in rows]

    async def set_vectors(self, embedder: str, vectors: Mapping[str, np.ndarray]) -> None:
        """Replaces vectors by uid and remembers what made them: an embedder, and its keys."""

        async def work(db: Connection) -> None:
            rows = [(_bytes(vector), uid) for uid, vector in vectors.items()]
            await db.executemany("UPDATE entries SET vector = ? WHERE uid = ?", rows)
            await _run(db, "INSERT OR REPLACE INTO facts VALUES ('embedder', ?)", (embedder,))

        await self._database.transaction(work)

    async def embedder(self) -> str | None:
        """What made the stored vectors; None in a new bank."""
        rows = await self._database.rows("SELECT value FROM facts WHERE name = 'embedder'")
        return rows[0]["value"] if rows else None

    async def retrieved(self, counts: Mapping[UnitKey, tuple[int, int | None]], stamp: Stamp) -> None:
        """Sets retrieval counts and the step of the last return, by unit."""

        async def work(db: Connection) -> None:
            for unit, (count, step) in counts.items():
                sql = "UPDATE units SET retrieved = ?, last_returned_step = ? WHERE uid = ? AND version = ?"
                await _run(db, sql, (count, step, *unit))
                await _log(db, stamp, "retrieve", unit.uid, unit.version, {"retrieved": count, "last_returned_step": step})

        await self._database.transaction(work)

    # ── credit ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def credit(self, episode: str, uses: Sequence[ExperienceUse], reward: float, stamp: Stamp) -> list[UnitKey]:
        """Adds `reward` to the unit of each use; returns those that this call credited. A repeat for an episode is a no-op.

        A use of what the bank does not know is logged as stray. What no generation is kept for counts for the entry alone.
        """

        async def work(db: Connection) -> list[UnitKey]:
            units = [UnitKey(use.uid, use.version) for use in uses]
            return [unit for op, unit in enumerate(units) if await _credit(db, stamp, episode, op, unit, reward)]

        return await self._database.transaction(work)

    async def ready(self) -> list[Ready]:
        """Units with pending reward, in order of becoming ready."""
        sql = "SELECT units.*, c_train, t_last FROM units JOIN generations ON id = generation WHERE ready IS NOT NULL ORDER BY ready"
        return [
            Ready(
                PendingUnit(
                    UnitKey(row["uid"], row["version"]), row["generation"], (row["start"], row["stop"]),
                    row["pending_count"], row["pending_sum"],
                ),
                row["c_train"],
                row["t_last"],
            )
            for row in await self._database.rows(sql)
        ]  # fmt: skip

    async def generations(self, ids: Iterable[str]) -> dict[str, Generation]:
        found = {}
        for name in dict.fromkeys(ids):
            for row in await self._database.rows("SELECT * FROM generations WHERE id = ?", (name,)):
                found[name] = _generation(row)
        return found

    async def mark_trained(self, trained: Sequence[PendingUnit], generations: Iterable[str], step: int, stamp: Stamp) -> None:
        """Takes the rewards that were trained on out of the pending ones and moves the counters of the generations.

        What came in since the batch was taken stays pending, and its unit is ready anew.
        """

        async def work(db: Connection) -> None:
            for name in dict.fromkeys(generations):
                await _log(db, stamp, "train", name, 0, {})
                await _run(db, "UPDATE generations SET c_train = c_train + 1, t_last = ? WHERE id = ?", (step, name))
            for pending in trained:
                data = {"count": pending.count, "total": pending.total}
                seq = await _log(db, stamp, "train", pending.unit.uid, pending.unit.version, data)
                sql = """
                    UPDATE units SET pending_count = pending_count - :count, pending_sum = pending_sum - :total,
                        ready = CASE WHEN pending_count > :count THEN :seq END WHERE uid = :uid AND version = :version
                """
                await _run(db, sql, {**data, "seq": seq, "uid": pending.unit.uid, "version": pending.unit.version})

        await self._database.transaction(work)

    async def prune(self, before: int) -> int:
        """Drops generations that can earn nothing any more; returns how many.

        That is: no unit of it is the current version of an active entry, has pending reward, or was returned at or after the
        actor step `before` (an episode that it guides may still be running).
        """
        sql = """
            DELETE FROM generations WHERE NOT EXISTS (
                SELECT 1 FROM units LEFT JOIN entries ON entries.uid = units.uid AND entries.version = units.version
                WHERE generation = generations.id
                    AND (pending_count > 0 OR entries.status = 'active' OR last_returned_step >= ?))
        """
        return await self._database.transaction(lambda db: _run(db, sql, (before,)))

    # ── counts ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def counts(self) -> dict[str, int]:
        """Figures by name: queue/STATE, ops/KIND, dropped/REASON, buffer/ready, generations, log/seq.

        Operations count since the bank was made, or begun anew.
        """
        since = "seq > IFNULL((SELECT CAST(value AS INTEGER) FROM facts WHERE name = 'begun'), 0)"
        queries = {
            "queue/": "SELECT state, COUNT(*) FROM requests GROUP BY state",
            "ops/": f"SELECT kind, COUNT(*) FROM log WHERE {since} GROUP BY kind",
            "dropped/": f"SELECT data ->> 'reason', SUM(data ->> 'count') FROM log WHERE kind = 'drop' AND {since} GROUP BY 1",
            "": """SELECT 'buffer/ready', COUNT(*) FROM units WHERE ready IS NOT NULL
                   UNION ALL SELECT 'generations', COUNT(*) FROM generations
                   UNION ALL SELECT 'log/seq', IFNULL(MAX(seq), 0) FROM log""",
        }
        found = {f"queue/{state}": 0 for state in ("pending", "leased", "done", "dead")}
        found |= {f"ops/{kind}": 0 for kind in ("add", "update", "return", "drop")}
        for prefix, sql in queries.items():
            found.update({prefix + name: number for name, number in await self._database.rows(sql)})
        return found


# ── the statements of one transaction ───────────────────────────────────────────────────────────────────────────────


async def _run(db: Connection, sql: str, parameters: Any = ()) -> int:
    """How many rows the statement changed."""
    return (await db.execute(sql, parameters)).rowcount


async def _log(db: Connection, stamp: Stamp, kind: str, origin: str, op: int, data: Mapping[str, Any]) -> int | None:
    """The new row's sequence number; None when that origin did it before."""
    sql = "INSERT OR IGNORE INTO log (step, extractor, kind, origin, op, data) VALUES (?, ?, ?, ?, ?, ?)"
    cursor = await db.execute(sql, (*stamp, kind, origin, op, json.dumps(data, ensure_ascii=False)))
    return cursor.lastrowid if cursor.rowcount else None


async def _write(db: Connection, request: DistilRequest, write: Write, stamp: Stamp) -> Entry:
    """Applies one add or update; the entry as it is then."""
    if write.target and await _is_current(db, write.target):
        kind, unit = "update", UnitKey(write.target.uid, write.target.version + 1)
    else:
        kind, unit = "add", UnitKey(f"{request.id}#{write.op}", 1)
    parents = (str(write.target),) if write.target else ()
    entry = Entry(unit.uid, unit.version, write.text, request.task.name, request.task.goal, request.id, write.span, parents)
    data = {"uid": unit.uid, "version": unit.version, "text": entry.text, "task": entry.task, "goal": entry.goal,
            "span": entry.span, "parents": parents}  # fmt: skip
    await _log(db, stamp, kind, request.id, write.op, data)
    row = (*unit, entry.text, entry.task, entry.goal, json.dumps(parents), entry.status, _bytes(write.vector))
    await _run(db, "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    sql = "INSERT INTO units (uid, version, generation, start, stop) VALUES (?, ?, ?, ?, ?)"
    await _run(db, sql, (*unit, entry.generation, *entry.span))
    return entry


async def _is_current(db: Connection, unit: UnitKey) -> bool:
    sql = "SELECT 1 FROM entries WHERE uid = ? AND version = ? AND status = 'active'"
    return bool(list(await db.execute_fetchall(sql, unit)))


async def _count_the_rest(db: Connection, distilled: Distilled, stamp: Stamp) -> None:
    """Logs what changed nothing: `return` and the refused ops, by reason."""
    if distilled.returned:
        await _log(db, stamp, "return", distilled.request.id, 0, {"count": distilled.returned})
    for op, (reason, count) in enumerate(sorted(distilled.dropped.items())):
        await _log(db, stamp, "drop", distilled.request.id, op, {"reason": reason, "count": count})


async def _punish(db: Connection, generation: Generation, reward: float | None, stamp: Stamp) -> None:
    """A generation without any op is a unit of its own, version 0, and ready at once."""
    seq = await _log(db, stamp, "malformed", generation.id, 0, {"reward": reward})
    unit = (generation.id, 0, generation.id, 0, len(generation.completion.ids), 1, reward, seq)
    columns = "uid, version, generation, start, stop, pending_count, pending_sum, ready"
    await _run(db, f"INSERT INTO units ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", unit)


async def _evict(db: Connection, request: DistilRequest, rules: ApplyRules, stamp: Stamp) -> list[str]:
    """Makes room among the entries of the request's goal; an evicted entry stays in the history."""
    sql = f"{ENTRIES} AND task = ? AND goal = ? ORDER BY entries.rowid"
    rows = await db.execute_fetchall(sql, (request.task.name, request.task.goal))
    gone = surplus([_entry(row) for row in rows], rules.cap or 0, rules.choice)
    for entry in gone:
        await _log(db, stamp, "evict", entry.uid, entry.version, {"for": request.id})
        await _run(db, "UPDATE entries SET status = 'evicted' WHERE uid = ?", (entry.uid,))
    return [entry.uid for entry in gone]


async def _keep_generation(db: Connection, generation: Generation) -> None:
    completion = generation.completion
    columns = (
        np.asarray(generation.prompt, "<i4").tobytes(),
        np.asarray(completion.ids, "<i4").tobytes(),
        np.asarray(completion.logprobs, "<f8").tobytes(),
        np.asarray(completion.versions, "<i4").tobytes(),
    )
    sql = "INSERT INTO generations (id, extractor, prompt, sampled, logprobs, versions, finish, head) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    await _run(db, sql, (generation.id, generation.extractor, *columns, completion.finish, generation.head))


async def _credit(db: Connection, stamp: Stamp, episode: str, op: int, unit: UnitKey, reward: float) -> bool:
    data = {"uid": unit.uid, "version": unit.version, "reward": reward}
    known = list(await db.execute_fetchall("SELECT 1 FROM units WHERE uid = ? AND version = ?", unit))
    seq = await _log(db, stamp, "credit" if known else "stray", episode, op, data)
    if seq is None or not known:
        return False
    await _run(db, "UPDATE units SET credited = credited + 1, credit = credit + ? WHERE uid = ? AND version = ?", (reward, *unit))
    sql = """
        UPDATE units SET pending_count = pending_count + 1, pending_sum = pending_sum + ?, ready = IFNULL(ready, ?)
        WHERE uid = ? AND version = ? AND generation IN (SELECT id FROM generations)
    """
    await _run(db, sql, (reward, seq, *unit))
    return True


def _entry(row: Row) -> Entry:
    return Entry(
        row["uid"], row["version"], row["text"], row["task"], row["goal"], row["generation"], (row["start"], row["stop"]),
        tuple(json.loads(row["parents"])), row["status"], row["retrieved"], row["last_returned_step"], row["credited"], row["credit"],
    )  # fmt: skip


def _generation(row: Row) -> Generation:
    completion = Completion(
        tuple(np.frombuffer(row["sampled"], "<i4").tolist()),
        tuple(np.frombuffer(row["logprobs"], "<f8").tolist()),
        tuple(np.frombuffer(row["versions"], "<i4").tolist()),
        row["finish"],
    )
    prompt = tuple(np.frombuffer(row["prompt"], "<i4").tolist())
    return Generation(row["id"], row["extractor"], prompt, completion, row["head"], row["c_train"], row["t_last"])


def _bytes(vector: np.ndarray) -> bytes:
    return np.asarray(vector, "<f4").tobytes()

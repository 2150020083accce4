"""The bank on disk: requests, entries, generations, credit, and the log of operations that brought them about.

Every change writes its log rows and its tables in one transaction (`Database.transaction`). A request, and a log row of one origin
(request, merge, episode or group) and op, exist once, so what is repeated after a crash is a no-op: no acknowledged episode is
lost, none is distilled twice, no use is credited twice, no group adds to a lift twice. `snapshot` marks a state of all of it that
`rollback` brings back.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from sqlite3 import Connection

import numpy as np

from crl.errors import StoreError
from crl.manager.credit import Ready
from crl.manager.database import Database, readable_rows
from crl.manager.records import (
    Applied,
    ApplyRules,
    Credit,
    Distilled,
    DistilRequest,
    Entry,
    Generation,
    GroupSuccess,
    Merged,
    PendingUnit,
    Refined,
    RolledBack,
    Stamp,
    UnitKey,
    Write,
)
from crl.manager.snapshots import forget_all, forget_all_but, go_back
from crl.manager.tables import (
    ENTRIES,
    count_vote,
    credit,
    current,
    fact,
    fit,
    last_seq,
    last_stamp,
    learn_from,
    log,
    log_dropped,
    make_room,
    read_entry,
    read_generation,
    read_vectors,
    record_lift,
    retire,
    set_fact,
    take_in,
    vector_bytes,
    vote_out,
    write_entry,
    write_merge,
    write_refinement,
)
from crl.manager.tally import Tally


class Store:
    """Made by `open`. Its methods raise `StoreError`; a method that returns has made its change durable."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tally = Tally()

    @classmethod
    async def open(cls, path: Path) -> Store:
        """Opens or makes the bank at `path`. Requests that a dead process had leased are pending again. Raises `StoreError`."""
        store = cls(await Database.open(path))
        try:
            await store.release()
        except BaseException:
            await store.aclose()
            raise
        return store

    async def aclose(self) -> None:
        await self._database.aclose()

    async def backup(self, path: Path) -> None:
        """A consistent copy of the bank in one file, made while it is in use. Raises `StoreError`, also when `path` exists."""
        await self._database.backup(path)

    async def begin_anew(self) -> None:
        """Forgets what belongs to the run that wrote the bank: its requests, its snapshots, its clock, and what its extractor could still
        be trained on.

        Entries keep their texts, lineage, credit and lift, the log its rows; `counts` begin at 0.
        """

        def work(db: Connection) -> None:
            forget_all(db)
            db.execute("DELETE FROM requests")
            db.execute("DELETE FROM generations")
            db.execute(
                "UPDATE units SET pending_count = 0, pending_sum = 0, ready = NULL, last_returned_step = NULL"
            )
            set_fact(db, "begun", str(last_seq(db)))
            self._tally.reset()

        await self._database.transaction(work)
        await self.compact()

    async def compact(self) -> None:
        """Makes the bank one file without unused pages. Raises `StoreError`, also while somebody reads it."""
        await self._database.compact()

    # ── snapshots ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def snapshot(self, stamp: Stamp, kept: Collection[int] | None = None) -> int:
        """The sequence number that `rollback` takes to bring back what the bank holds now.

        kept: of the snapshots before, those that somebody may go back to, None = all; the others are forgotten, for each of them
        costs a copy of every row that changed since.
        """

        def work(db: Connection) -> int:
            if kept is not None:
                forget_all_but(db, kept)
            seq = log(db, stamp, "snapshot", "", 0, {})
            assert seq is not None, "snapshots may repeat"
            db.execute("INSERT INTO snapshots VALUES (?)", (seq,))
            return seq

        return await self._database.transaction(work)

    async def rollback(self, seq: int) -> RolledBack:
        """The bank is what it was at the snapshot `seq`; requests that were leased then are pending.

        What has happened since is lost to it, so the whole bank is copied first, to a file beside it. Sequence numbers are not given
        out again. Raises `StoreError` for a number that is no snapshot of this bank, or no more since it went back behind it.
        """
        path = self._database.path

        def archive(db: Connection) -> Path | None:
            if not db.execute("SELECT 1 FROM snapshots WHERE seq = ?", (seq,)).fetchone():
                raise StoreError(
                    f"{path}: it has no snapshot {seq} to go back to. Keep the bank as it is, or restore a copy."
                )
            (last,) = db.execute("SELECT MAX(seq) FROM log").fetchone()
            return (
                path.with_name(f"{path.stem}-before-rollback-{last}{path.suffix}")
                if last != seq
                else None
            )

        def work(db: Connection) -> RolledBack:
            done = RolledBack(
                db.execute("SELECT step FROM log WHERE seq = ?", (seq,)).fetchone()["step"],
                archive(db),
            )
            go_back(db, seq)
            self._tally.reset()
            return done

        return await self._database.transaction_after_copy(work, archive)

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def submit(self, request: DistilRequest, stamp: Stamp, bound: int | None = None) -> bool:
        """Acknowledges a request, or finds that it was acknowledged before. False: `bound` requests are open, nothing was stored."""

        def work(db: Connection) -> bool:
            if bound is not None and _open_requests(db, bound) == bound:
                return (
                    db.execute("SELECT 1 FROM requests WHERE id = ?", (request.id,)).fetchone()
                    is not None
                )
            values = (request.id, request.step, request.group, request.member, request.to_json())
            columns = "id, step, team, member, payload, state"
            if db.execute(
                f"INSERT INTO requests ({columns}) VALUES (?, ?, ?, ?, ?, 'pending') ON CONFLICT DO NOTHING",
                values,
            ).rowcount:
                log(db, stamp, "submit", request.id, 0, {})
            return True

        return await self._database.transaction(work)

    async def release(self, ids: Collection[str] | None = None) -> None:
        """Of these requests, those that are leased are pending again; None = all of them, for whoever leased them is gone."""

        def work(db: Connection) -> None:
            sql = "UPDATE requests SET state = 'pending' WHERE state = 'leased'"
            db.execute(sql) if ids is None else db.executemany(
                f"{sql} AND id = ?", [(name,) for name in ids]
            )

        await self._database.transaction(work)

    async def lease(self, limit: int | None = None) -> list[DistilRequest]:
        """Takes pending requests, at most `limit`, in (step, group, member) order. They are the caller's until they are settled or
        released, or until the bank is opened again: there is one writer, and its leases end with it. A caller that is cancelled has
        leased nothing."""
        taken: list[str] = []

        def work(db: Connection) -> list[DistilRequest]:
            sql = "SELECT id, payload FROM requests WHERE state = 'pending' ORDER BY step, team, member, id LIMIT ?"
            rows = db.execute(sql, (-1 if limit is None else limit,)).fetchall()
            taken.extend(row["id"] for row in rows)
            db.executemany(
                "UPDATE requests SET state = 'leased' WHERE id = ?", [(name,) for name in taken]
            )
            with readable_rows(self._database.path):
                return [DistilRequest.from_json(row["payload"]) for row in rows]

        try:
            return await self._database.transaction(work)
        except asyncio.CancelledError:
            await self.release(taken)  # after `work`, which was not interrupted
            raise

    async def failed(self, request: DistilRequest, reason: str) -> int:
        """An attempt at the request came to nothing; the caller keeps it. Returns how many have so far, in earlier processes too."""

        def work(db: Connection) -> int:
            sql = "UPDATE requests SET attempts = attempts + 1, reason = ? WHERE id = ? RETURNING attempts"
            return db.execute(sql, (reason, request.id)).fetchone()[0]

        return await self._database.transaction(work)

    async def bury(self, request: DistilRequest, reason: str, stamp: Stamp) -> None:
        """The request cannot be distilled; it keeps its payload, and can be made pending again (`retry_dead`)."""

        def work(db: Connection) -> None:
            sql = "UPDATE requests SET state = 'dead', reason = ? WHERE id = ? AND state IN ('pending', 'leased')"
            if db.execute(sql, (reason, request.id)).rowcount:
                log(db, stamp, "dead", request.id, 0, {"reason": reason})

        await self._database.transaction(work)

    async def retry_dead(self, ids: Iterable[str] | None = None) -> list[str]:
        """Dead requests are pending again, as if they had never been tried; None = all of them. Returns their ids in queue order.

        Raises `StoreError` for an id that is not of a dead request; then nothing has changed.
        """

        def work(db: Connection) -> list[str]:
            dead = [
                row["id"]
                for row in db.execute(
                    "SELECT id FROM requests WHERE state = 'dead' ORDER BY step, team, member, id"
                )
            ]
            wanted = set(dead if ids is None else ids)
            if unknown := sorted(wanted.difference(dead)):
                names = ", ".join(unknown)
                raise StoreError(
                    f"{self._database.path}: no dead episodes: {names}. Nothing was changed; crl bank dead lists them."
                )
            revived = [name for name in dead if name in wanted]
            for name in revived:
                db.execute(
                    "UPDATE requests SET state = 'pending', attempts = 0, reason = NULL WHERE id = ?",
                    (name,),
                )
                log(db, last_stamp(db), "revive", name, 0, {})
            return revived

        return await self._database.transaction(work)

    async def apply(self, distilled: Distilled, stamp: Stamp, rules: ApplyRules) -> Applied:
        """Writes what a request came to and marks it done, in one transaction; nothing when it is done or dead already.

        An update of a version that is no longer the current one becomes an add with that version as its parent.
        """

        def work(db: Connection) -> Applied:
            request = distilled.request
            sql = "UPDATE requests SET state = 'done', payload = NULL, reason = NULL WHERE id = ? AND state IN ('pending', 'leased')"
            if not db.execute(sql, (request.id,)).rowcount:
                return Applied()
            changed = [
                (write_entry(db, request, write, stamp), write) for write in distilled.writes
            ]
            if distilled.returned:
                log(db, stamp, "return", request.id, 0, {"count": distilled.returned})
            votes = [vote for vote in distilled.votes if count_vote(db, request, vote, stamp)]
            more = {
                "near duplicate": distilled.duplicates,
                "stale target": len(distilled.votes) - len(votes),
            }
            log_dropped(
                db,
                request.id,
                {**distilled.dropped, **{reason: n for reason, n in more.items() if n}},
                stamp,
            )
            learn_from(db, distilled.generation, bool(changed), distilled.malformed, rules, stamp)
            evicted = (
                vote_out(db, request, votes, rules.vote_out, stamp)
                if rules.vote_out is not None
                else []
            )
            evicted += make_room(db, request, rules, stamp) if changed else []
            return Applied(tuple(changed), tuple(evicted), tuple(votes))

        return await self._database.transaction(work)

    async def merge(self, merged: Merged, stamp: Stamp, rules: ApplyRules) -> Applied:
        """Writes what the extractor said of a chunk, in one transaction; nothing when that was done before.

        An op with a target that is no longer the current version of an active entry is dropped. What is merged or discarded stays in
        the history; what a merge makes has its targets as parents, and the task and the goal of the first.
        """

        def work(db: Connection) -> Applied:
            name = merged.generation.id
            if log(db, stamp, "chunk", name, 0, {}) is None:
                return Applied()
            changed: list[tuple[Entry, Write]] = []
            gone: list[str] = []
            dropped = Counter(merged.dropped)
            for write in merged.merges:
                if parents := current(db, write.targets):
                    changed.append((write_merge(db, name, write, parents[0], stamp), write))
                    gone += retire(db, write.targets, "merged")
                else:
                    dropped["stale target"] += 1
            for op, targets in merged.discards:
                if current(db, targets):
                    log(db, stamp, "discard", name, op, {"targets": list(map(str, targets))})
                    gone += retire(db, targets, "evicted")
                else:
                    dropped["stale target"] += 1
            log_dropped(db, name, dropped, stamp)
            learn_from(db, merged.generation, bool(changed), merged.malformed, rules, stamp)
            return Applied(tuple(changed), tuple(gone))

        return await self._database.transaction(work)

    async def refine(self, refined: Refined, stamp: Stamp, rules: ApplyRules) -> None:
        """Keeps what a question came to, so that it can earn credit; nothing when that was done before."""

        def work(db: Connection) -> None:
            if write_refinement(db, refined, stamp):
                log_dropped(db, refined.generation.id, refined.dropped, stamp)
                learn_from(
                    db,
                    refined.generation,
                    refined.text is not None,
                    refined.malformed,
                    rules,
                    stamp,
                )

        await self._database.transaction(work)

    async def merges(self) -> int:
        """How many chunks were merged, ever."""
        return (await self._database.rows("SELECT COUNT(*) FROM log WHERE kind = 'chunk'"))[0][0]

    # ── entries ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def entries(self) -> list[tuple[Entry, np.ndarray]]:
        """The active entries in the order in which they were last written, with their vectors (float32 [dim])."""
        rows = await self._database.rows(f"{ENTRIES} ORDER BY written")
        with readable_rows(self._database.path):
            return list(
                zip(map(read_entry, rows), read_vectors(row["vector"] for row in rows), strict=True)
            )

    async def set_vectors(self, embedder: str, vectors: Mapping[str, np.ndarray]) -> None:
        """Replaces vectors by uid and remembers what made them: an embedder, and its keys."""

        def work(db: Connection) -> None:
            rows = [(vector_bytes(vector), uid) for uid, vector in vectors.items()]
            db.executemany("UPDATE entries SET vector = ? WHERE uid = ?", rows)
            set_fact(db, "embedder", embedder)

        await self._database.transaction(work)

    async def evict(self, units: Iterable[UnitKey]) -> int:
        """Those of these versions that are current and active guide nobody any more; how many. They stay in the history.

        For a bank that no run has open.
        """

        def work(db: Connection) -> int:
            gone = 0
            for unit in units:
                sql = "UPDATE entries SET status = 'evicted' WHERE uid = ? AND version = ? AND status = 'active'"
                if db.execute(sql, unit).rowcount:
                    log(db, last_stamp(db), "evict", unit.uid, unit.version, {})
                    gone += 1
            return gone

        return await self._database.transaction(work)

    async def fit(self, rules: ApplyRules) -> None:
        """Evicts what is over these bounds, in a bank that was made with others."""
        await self._database.transaction(lambda db: fit(db, rules, last_stamp(db)))

    async def take_in(self, entries: Sequence[Entry], stamp: Stamp) -> None:
        """Entries from elsewhere with their counters. What wrote them does not come along, nor do their vectors: the manager that
        opens the bank makes these."""

        def work(db: Connection) -> None:
            for entry in entries:
                take_in(db, entry, stamp)

        await self._database.transaction(work)

    async def embedder(self) -> str | None:
        """What made the stored vectors; None in a new bank."""
        return await self._database.read(lambda db: fact(db, "embedder"))

    async def retrieved(
        self, counts: Mapping[UnitKey, tuple[int, int | None]], stamp: Stamp
    ) -> None:
        """Sets retrieval counts and the step of the last return, by unit."""

        def work(db: Connection) -> None:
            for unit, (count, step) in counts.items():
                sql = "UPDATE units SET retrieved = ?, last_returned_step = ? WHERE uid = ? AND version = ?"
                db.execute(sql, (count, step, *unit))
                log(
                    db,
                    stamp,
                    "retrieve",
                    unit.uid,
                    unit.version,
                    {"retrieved": count, "last_returned_step": step},
                )

        await self._database.transaction(work)

    # ── credit ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def credit(self, episode: str, given: Sequence[Credit], stamp: Stamp) -> list[Credit]:
        """Credits the units of an episode; returns what this call credited. A repeat for an episode is a no-op. Of several credits of one
        unit, which was found more than once, the first counts.

        A use of what the bank does not know is logged as stray. What no generation is kept for counts for the entry alone.
        """

        def work(db: Connection) -> list[Credit]:
            units: dict[UnitKey, Credit] = {}
            for one in given:
                units.setdefault(one.unit, one)
            return [
                one for op, one in enumerate(units.values()) if credit(db, stamp, episode, op, one)
            ]

        return await self._database.transaction(work)

    async def record_lifts(
        self, found: Mapping[str, Sequence[GroupSuccess]], stamp: Stamp
    ) -> list[GroupSuccess]:
        """Record what groups, by their ids, say of units; return what this call recorded, in order.

        A repeat for a group is a no-op, and so is a unit that the bank does not know.
        """

        def work(db: Connection) -> list[GroupSuccess]:
            ops = [(group, op, one) for group, ones in found.items() for op, one in enumerate(ones)]
            return [one for group, op, one in ops if record_lift(db, stamp, group, op, one)]

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
        """Those that are kept, by id."""
        sql = "SELECT * FROM generations WHERE id IN (SELECT value FROM json_each(?))"
        rows = await self._database.rows(sql, (json.dumps(list(ids)),))
        with readable_rows(self._database.path):
            return {row["id"]: read_generation(row) for row in rows}

    async def mark_trained(
        self, trained: Sequence[PendingUnit], generations: Iterable[str], step: int, stamp: Stamp
    ) -> None:
        """Takes the rewards that were trained on out of the pending ones and moves the counters of the generations.

        What came in since the batch was taken stays pending, and its unit is ready anew.
        """

        def work(db: Connection) -> None:
            for name in dict.fromkeys(generations):
                log(db, stamp, "train", name, 0, {})
                db.execute(
                    "UPDATE generations SET c_train = c_train + 1, t_last = ? WHERE id = ?",
                    (step, name),
                )
            for pending in trained:
                data = {"count": pending.count, "total": pending.total}
                seq = log(db, stamp, "train", pending.unit.uid, pending.unit.version, data)
                sql = """
                    UPDATE units SET pending_count = pending_count - :count, pending_sum = pending_sum - :total,
                        ready = CASE WHEN pending_count > :count THEN :seq END WHERE uid = :uid AND version = :version
                """
                db.execute(
                    sql,
                    {**data, "seq": seq, "uid": pending.unit.uid, "version": pending.unit.version},
                )

        await self._database.transaction(work)

    async def drop_malformed(self, surplus: Sequence[PendingUnit], stamp: Stamp) -> None:
        """These generations without an op are not trained on."""

        def work(db: Connection) -> None:
            for pending in surplus:
                # Beside the ops that its answer was refused for, which are counted from 0.
                log(
                    db,
                    stamp,
                    "drop",
                    pending.generation,
                    -1,
                    {"reason": "too many malformed", "count": 1},
                )
                db.execute(
                    "UPDATE units SET pending_count = 0, pending_sum = 0, ready = NULL WHERE uid = ? AND version = ?",
                    pending.unit,
                )

        await self._database.transaction(work)

    async def spent(self, before: int) -> list[str]:
        """Generations that can earn nothing any more.

        That is: no unit of it is the current version of an active entry, has pending reward, or was returned at or after the
        actor step `before` (an episode that it guides may still be running).
        """
        return [
            row["id"]
            for row in await self._database.rows(
                f"SELECT id FROM generations WHERE {_SPENT}", (before,)
            )
        ]

    async def prune(self, names: Iterable[str], before: int) -> None:
        """Drops those of these generations that are spent still."""
        sql = f"DELETE FROM generations WHERE id IN (SELECT value FROM json_each(?)) AND {_SPENT}"
        values = (json.dumps(list(names)), before)
        await self._database.transaction(lambda db: db.execute(sql, values))

    # ── counts ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def counts(self) -> dict[str, int]:
        """Figures by name: queue/STATE, ops/KIND, dropped/REASON, buffer/ready, generations, log/seq.

        Operations count since the bank was made, or begun anew.
        """
        return await self._database.read(self._tally.read)


_SPENT = """
    NOT EXISTS (
        SELECT 1 FROM units LEFT JOIN entries ON entries.uid = units.uid AND entries.version = units.version
        WHERE generation = generations.id AND (pending_count > 0 OR entries.status = 'active' OR last_returned_step >= ?))
"""


def _open_requests(db: Connection, most: int) -> int:
    """Requests that wait or are in work; `most` stands for any greater number."""
    sql = (
        "SELECT COUNT(*) FROM (SELECT 1 FROM requests WHERE state IN ('pending', 'leased') LIMIT ?)"
    )
    return db.execute(sql, (most,)).fetchone()[0]

"""Bank on disk: requests, entries, generations, credit, and the log of operations behind them.

Each change writes its log rows and its tables in one transaction (`Database.transaction`). A
request exists only once. For operations that must not be repeated, the log holds one row per origin
(request, merge, episode or group), op and kind. A change that is repeated after a crash is
therefore a no-op: no acknowledged episode is lost, none is distilled twice, no use is credited
twice, and no group adds to a lift twice. `snapshot` marks a state of the whole bank that `rollback`
restores.
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
from crl.manager.credit import ReadyUnit
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
from crl.manager.storage.database import Database, check_rows
from crl.manager.storage.log_counter import LogCounter
from crl.manager.storage.snapshots import (
    delete_all_snapshots,
    delete_snapshots_except,
    restore_snapshot,
)
from crl.manager.storage.tables import (
    ACTIVE_ENTRIES,
    ACTIVE_OUTCOMES,
    count_vote,
    current_rows,
    evict_by_votes,
    evict_for_request,
    evict_to_bounds,
    fact,
    import_entry,
    last_seq,
    last_stamp,
    log,
    log_dropped,
    read_entry,
    read_generation,
    read_vectors,
    record_credit,
    record_lift,
    retire,
    set_fact,
    set_outcomes,
    store_if_trainable,
    vector_bytes,
    without_repetition,
    write_entry,
    write_merge,
    write_refinement,
)


class Store:
    """Bank on disk. Create it with `open`.

    The methods raise `StoreError`. A change is durable when its method returns.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._counter = LogCounter()

    @classmethod
    async def open(cls, path: Path) -> Store:
        """Open or create the bank at `path`. Requests leased by an ended process become pending.

        Raise `StoreError` if the bank cannot be opened.
        """
        store = cls(await Database.open(path))
        try:
            await store.release()
        except BaseException:
            await store.aclose()
            raise
        return store

    async def aclose(self) -> None:
        """Close the bank after the transactions in progress."""
        await self._database.aclose()

    async def backup(self, path: Path) -> None:
        """Write a consistent copy of the bank to the new file `path`. The bank may be in use.

        Raise `StoreError` if the copy fails or `path` exists.
        """
        await self._database.backup(path)

    async def reset_for_new_run(self) -> None:
        """Delete the data that belongs to the run that wrote the bank.

        This data is the run's requests, its snapshots, its clock, and everything that its extractor
        could still be trained on. Entries keep their texts, lineage, credit and lift. The log keeps
        its rows, but `counts` start at 0.
        """

        def work(db: Connection) -> None:
            delete_all_snapshots(db)
            db.execute("DELETE FROM requests")
            db.execute("DELETE FROM generations")
            db.execute(
                "UPDATE units SET pending_count = 0, pending_sum = 0, ready = NULL, "
                "last_returned_step = NULL"
            )
            set_fact(db, "begun", str(last_seq(db)))
            self._counter.reset()

        await self._database.transaction(work)
        await self.compact()

    async def compact(self) -> None:
        """Compact the bank into one file without unused pages.

        Raise `StoreError` if this fails, for example because another connection is reading the
        bank.
        """
        await self._database.compact()

    # ── snapshots ─────────────────────────────────────────────────────────────────────────────────

    async def snapshot(self, stamp: Stamp, kept: Collection[int] | None = None) -> int:
        """Record a snapshot of the current state. Return the sequence number that `rollback` takes.

        `kept` lists the earlier snapshots that are still needed (None: all). The others are
        deleted, because each snapshot costs a copy of every row that changed after it.
        """

        def work(db: Connection) -> int:
            if kept is not None:
                delete_snapshots_except(db, kept)
            seq = log(db, stamp, "snapshot", "", 0, {})
            assert seq is not None, "snapshots may repeat"
            db.execute("INSERT INTO snapshots VALUES (?)", (seq,))
            return seq

        return await self._database.transaction(work)

    async def rollback(self, seq: int) -> RolledBack:
        """Restore the bank to the snapshot `seq`. Requests that were leased then become pending.

        If the bank has changed since the snapshot, the whole bank is first copied to a file beside
        it. Later sequence numbers are used again. Raise `StoreError` if `seq` is not a snapshot of
        this bank. A snapshot that a rollback removed, or that was deleted, does not count.
        """
        path = self._database.path

        def archive(db: Connection) -> Path | None:
            if not db.execute("SELECT 1 FROM snapshots WHERE seq = ?", (seq,)).fetchone():
                raise StoreError(
                    f"{path}: the bank has no snapshot {seq}, so it cannot be rolled back. "
                    "Use the bank in its current state, or restore a copy of it."
                )
            (last,) = db.execute("SELECT MAX(seq) FROM log").fetchone()
            return (
                path.with_name(f"{path.stem}-before-rollback-{last}{path.suffix}")
                if last != seq
                else None
            )

        def work(db: Connection) -> RolledBack:
            rolled_back = RolledBack(
                db.execute("SELECT step FROM log WHERE seq = ?", (seq,)).fetchone()["step"],
                archive(db),
            )
            restore_snapshot(db, seq)
            self._counter.reset()
            return rolled_back

        return await self._database.transaction_after_copy(work, archive)

    # ── requests ──────────────────────────────────────────────────────────────────────────────────

    async def submit(
        self, request: DistilRequest, stamp: Stamp, max_open: int | None = None
    ) -> bool:
        """Store a request, unless it is stored already. Return whether it is stored.

        A repeated id changes nothing. Return False, and store nothing, if the id is new and at
        least `max_open` requests are open (pending or leased).
        """

        def work(db: Connection) -> bool:
            if max_open is not None and _open_requests(db, max_open) == max_open:
                return (
                    db.execute("SELECT 1 FROM requests WHERE id = ?", (request.id,)).fetchone()
                    is not None
                )
            episode = request.episode
            values = (request.id, episode.step, episode.group, episode.member, request.to_json())
            columns = "id, step, team, member, payload, state"
            if db.execute(
                f"INSERT INTO requests ({columns}) VALUES (?, ?, ?, ?, ?, 'pending') "
                "ON CONFLICT DO NOTHING",
                values,
            ).rowcount:
                log(db, stamp, "submit", request.id, 0, {})
            return True

        return await self._database.transaction(work)

    async def knows(self, id: str) -> bool:
        """Return whether a request with this id is stored, in any state."""

        def work(db: Connection) -> bool:
            return db.execute("SELECT 1 FROM requests WHERE id = ?", (id,)).fetchone() is not None

        return await self._database.read(work)

    async def release(self, ids: Collection[str] | None = None) -> None:
        """Make leased requests pending again: the requests `ids`, or all if `ids` is None.

        None is used when the process that leased the requests has ended.
        """

        def work(db: Connection) -> None:
            sql = "UPDATE requests SET state = 'pending' WHERE state = 'leased'"
            db.execute(sql) if ids is None else db.executemany(
                f"{sql} AND id = ?", [(name,) for name in ids]
            )

        await self._database.transaction(work)

    async def lease(self, limit: int | None = None) -> list[DistilRequest]:
        """Lease at most `limit` pending requests, in (step, group, member) order, and return them.

        The requests belong to the caller until they are settled or released, or until the bank is
        opened again. There is only one writer, and its leases end with it. A caller that is
        cancelled holds no lease.
        """
        leased: list[str] = []

        def work(db: Connection) -> list[DistilRequest]:
            sql = (
                "SELECT id, payload FROM requests WHERE state = 'pending' "
                "ORDER BY step, team, member, id LIMIT ?"
            )
            rows = db.execute(sql, (-1 if limit is None else limit,)).fetchall()
            leased.extend(row["id"] for row in rows)
            db.executemany(
                "UPDATE requests SET state = 'leased' WHERE id = ?", [(name,) for name in leased]
            )
            with check_rows(self._database.path):
                return [DistilRequest.from_json(row["payload"]) for row in rows]

        try:
            return await self._database.transaction(work)
        except asyncio.CancelledError:
            await self.release(leased)  # runs after `work`, which was not interrupted
            raise

    async def record_failure(self, request: DistilRequest, reason: str) -> int:
        """Record a failed attempt at a request. Return the number of failed attempts so far.

        The lease is kept. The number includes attempts in earlier processes.
        """

        def work(db: Connection) -> int:
            sql = (
                "UPDATE requests SET attempts = attempts + 1, reason = ? WHERE id = ? "
                "RETURNING attempts"
            )
            return db.execute(sql, (reason, request.id)).fetchone()[0]

        return await self._database.transaction(work)

    async def mark_dead(self, request: DistilRequest, reason: str, stamp: Stamp) -> None:
        """Mark a pending or leased request as dead, because it cannot be distilled.

        The request keeps its payload, so that `retry_dead` can make it pending again.
        """

        def work(db: Connection) -> None:
            sql = (
                "UPDATE requests SET state = 'dead', reason = ? "
                "WHERE id = ? AND state IN ('pending', 'leased')"
            )
            if db.execute(sql, (reason, request.id)).rowcount:
                log(db, stamp, "dead", request.id, 0, {"reason": reason})

        await self._database.transaction(work)

    async def retry_dead(self, ids: Iterable[str] | None = None) -> list[str]:
        """Make dead requests pending again. Return their ids in queue order.

        Their attempts are reset. `ids` selects the requests (None: all dead requests). Raise
        `StoreError`, and change nothing, if an id does not belong to a dead request.
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
                    f"{self._database.path}: no dead episodes have these ids: {names}. "
                    "Nothing was changed. List the dead episodes with crl bank dead."
                )
            revived = [name for name in dead if name in wanted]
            for name in revived:
                db.execute(
                    "UPDATE requests SET state = 'pending', attempts = 0, reason = NULL "
                    "WHERE id = ?",
                    (name,),
                )
                log(db, last_stamp(db), "revive", name, 0, {})
            return revived

        return await self._database.transaction(work)

    async def apply(self, distilled: Distilled, stamp: Stamp, rules: ApplyRules) -> Applied:
        """Write the result of a request and mark the request as done, in one transaction.

        Do nothing if the request is already done or dead. An update of a version that is no longer
        current becomes an add with that version as its parent.
        """

        def work(db: Connection) -> Applied:
            request = distilled.request
            sql = (
                "UPDATE requests SET state = 'done', payload = NULL, reason = NULL "
                "WHERE id = ? AND state IN ('pending', 'leased')"
            )
            if not db.execute(sql, (request.id,)).rowcount:
                return Applied()
            changed: list[tuple[Entry, Write]] = []
            for write in distilled.writes:
                if rules.distinct_texts and not write.targets:
                    write = without_repetition(db, request, write, rules.scope)
                if write is not None:
                    changed.append((write_entry(db, request, write, stamp), write))
            if distilled.returns:
                log(db, stamp, "return", request.id, 0, {"count": distilled.returns})
            votes = [vote for vote in distilled.votes if count_vote(db, request, vote, stamp)]
            other_drops = {
                "near duplicate": distilled.duplicates,
                "known text": len(distilled.writes) - len(changed),
                "stale target": len(distilled.votes) - len(votes),
            }
            log_dropped(
                db,
                request.id,
                {**distilled.dropped, **{reason: n for reason, n in other_drops.items() if n}},
                stamp,
            )
            store_if_trainable(
                db, distilled.generation, bool(changed), distilled.malformed, rules, stamp
            )
            evicted = (
                evict_by_votes(db, request, votes, rules.evict_votes, stamp)
                if rules.evict_votes is not None
                else []
            )
            evicted += evict_for_request(db, request, rules, stamp) if changed else []
            return Applied(tuple(changed), tuple(evicted), tuple(votes))

        return await self._database.transaction(work)

    async def merge(self, merged: Merged, stamp: Stamp, rules: ApplyRules) -> Applied:
        """Write the extractor's answer about a chunk, in one transaction.

        Do nothing if the answer was written before. An op is dropped if one of its targets is not
        the current version of an active entry. Merged and discarded entries stay in the history. A
        merged entry has the targets as its parents, and the task and the goal of the first target.
        """

        def work(db: Connection) -> Applied:
            name = merged.generation.id
            if log(db, stamp, "chunk", name, 0, {}) is None:
                return Applied()
            changed: list[tuple[Entry, Write]] = []
            removed: list[str] = []
            dropped = Counter(merged.dropped)
            for write in merged.merges:
                if parents := current_rows(db, write.targets):
                    changed.append((write_merge(db, name, write, parents[0], stamp), write))
                    removed += retire(db, write.targets, "merged")
                else:
                    dropped["stale target"] += 1
            for op, targets in merged.discards:
                if current_rows(db, targets):
                    log(db, stamp, "discard", name, op, {"targets": list(map(str, targets))})
                    removed += retire(db, targets, "evicted")
                else:
                    dropped["stale target"] += 1
            log_dropped(db, name, dropped, stamp)
            store_if_trainable(db, merged.generation, bool(changed), merged.malformed, rules, stamp)
            return Applied(tuple(changed), tuple(removed))

        return await self._database.transaction(work)

    async def refine(self, refined: Refined, stamp: Stamp, rules: ApplyRules) -> None:
        """Store the extractor's answer to a question, so that it can earn credit.

        Do nothing if the answer was stored before.
        """

        def work(db: Connection) -> None:
            if write_refinement(db, refined, stamp):
                log_dropped(db, refined.generation.id, refined.dropped, stamp)
                store_if_trainable(
                    db,
                    refined.generation,
                    refined.text is not None,
                    refined.malformed,
                    rules,
                    stamp,
                )

        await self._database.transaction(work)

    async def chunk_count(self) -> int:
        """Return the number of merge chunks in the log."""
        return (await self._database.rows("SELECT COUNT(*) FROM log WHERE kind = 'chunk'"))[0][0]

    # ── entries ───────────────────────────────────────────────────────────────────────────────────

    async def entries(self) -> list[tuple[Entry, np.ndarray]]:
        """Return the active entries with their vectors (float32 [dim]), the last written last."""
        rows = await self._database.rows(f"{ACTIVE_ENTRIES} ORDER BY written")
        credits = await self._database.rows(ACTIVE_OUTCOMES)
        with check_rows(self._database.path):
            entries = [read_entry(row) for row in rows]
            set_outcomes(entries, credits)
            return list(zip(entries, read_vectors(row["vector"] for row in rows), strict=True))

    async def set_vectors(self, embedder: str, vectors: Mapping[str, np.ndarray]) -> None:
        """Replace vectors by uid, and record the name of the embedder and keys that made them."""

        def work(db: Connection) -> None:
            rows = [(vector_bytes(vector), uid) for uid, vector in vectors.items()]
            db.executemany("UPDATE entries SET vector = ? WHERE uid = ?", rows)
            set_fact(db, "embedder", embedder)

        await self._database.transaction(work)

    async def evict(self, units: Iterable[UnitKey]) -> int:
        """Evict the given versions that are current and active. Return their number.

        Evicted entries are no longer retrieved. They stay in the history. Call this method only for
        a bank that no run has open.
        """

        def work(db: Connection) -> int:
            evicted = 0
            for unit in units:
                sql = (
                    "UPDATE entries SET status = 'evicted' "
                    "WHERE uid = ? AND version = ? AND status = 'active'"
                )
                if db.execute(sql, unit).rowcount:
                    log(db, last_stamp(db), "evict", unit.uid, unit.version, {})
                    evicted += 1
            return evicted

        return await self._database.transaction(work)

    async def evict_to_bounds(self, rules: ApplyRules) -> None:
        """Evict entries over the bounds of `rules`, in a bank that was made with other bounds."""
        await self._database.transaction(lambda db: evict_to_bounds(db, rules, last_stamp(db)))

    async def import_entries(self, entries: Sequence[Entry], stamp: Stamp) -> None:
        """Add imported entries with their counters.

        The generations that wrote the entries are not imported, and neither are the vectors. The
        manager that opens the bank makes the vectors.
        """

        def work(db: Connection) -> None:
            for entry in entries:
                import_entry(db, entry, stamp)

        await self._database.transaction(work)

    async def embedder(self) -> str | None:
        """Return the name of the embedder and keys that made the vectors. None: no vectors yet."""
        return await self._database.read(lambda db: fact(db, "embedder"))

    async def set_retrieval_counts(
        self, counts: Mapping[UnitKey, tuple[int, int | None]], stamp: Stamp
    ) -> None:
        """Set the number of retrievals and the step of the last one, by unit."""

        def work(db: Connection) -> None:
            for unit, (count, step) in counts.items():
                sql = (
                    "UPDATE units SET retrieved = ?, last_returned_step = ? "
                    "WHERE uid = ? AND version = ?"
                )
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

    # ── credit ────────────────────────────────────────────────────────────────────────────────────

    async def credit(self, episode: str, credits: Sequence[Credit], stamp: Stamp) -> list[Credit]:
        """Credit the units of an episode. Return the credits that this call recorded.

        A repeated call for an episode is a no-op. If a unit was found more than once, its first
        credit counts. A use of a unit that the bank does not know is logged as stray. If the unit's
        generation is not stored, the credit changes only the entry's record.
        """

        def work(db: Connection) -> list[Credit]:
            units: dict[UnitKey, Credit] = {}
            for credit in credits:
                units.setdefault(credit.unit, credit)
            return [
                credit
                for op, credit in enumerate(units.values())
                if record_credit(db, stamp, episode, op, credit)
            ]

        return await self._database.transaction(work)

    async def record_lifts(
        self, results: Mapping[str, Sequence[GroupSuccess]], stamp: Stamp
    ) -> list[GroupSuccess]:
        """Record the results of groups for units. Return the recorded results, in order.

        `results` maps the id of a group to its results. A repeated call for a group is a no-op. A
        unit that the bank does not know is skipped.
        """

        def work(db: Connection) -> list[GroupSuccess]:
            return [
                result
                for group, group_results in results.items()
                for op, result in enumerate(group_results)
                if record_lift(db, stamp, group, op, result)
            ]

        return await self._database.transaction(work)

    async def ready_units(self) -> list[ReadyUnit]:
        """Return the units with pending reward, in the order in which they became ready."""
        sql = (
            "SELECT units.*, c_train, t_last FROM units JOIN generations ON id = generation "
            "WHERE ready IS NOT NULL ORDER BY ready"
        )
        return [
            ReadyUnit(
                PendingUnit(
                    UnitKey(row["uid"], row["version"]), row["generation"],
                    (row["start"], row["stop"]), row["pending_count"], row["pending_sum"],
                ),
                row["c_train"],
                row["t_last"],
            )
            for row in await self._database.rows(sql)
        ]  # fmt: skip

    async def generations(self, ids: Iterable[str]) -> dict[str, Generation]:
        """Return the stored generations among `ids`, by id."""
        sql = "SELECT * FROM generations WHERE id IN (SELECT value FROM json_each(?))"
        rows = await self._database.rows(sql, (json.dumps(list(ids)),))
        with check_rows(self._database.path):
            return {row["id"]: read_generation(row) for row in rows}

    async def mark_trained(
        self, trained: Sequence[PendingUnit], generations: Iterable[str], step: int, stamp: Stamp
    ) -> None:
        """Subtract the rewards that were trained on, and advance the counters of the generations.

        Rewards that arrived after the batch was taken stay pending, and their unit becomes ready
        again.
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
                    UPDATE units SET pending_count = pending_count - :count, \
pending_sum = pending_sum - :total,
                        ready = CASE WHEN pending_count > :count THEN :seq END \
WHERE uid = :uid AND version = :version
                """
                db.execute(
                    sql,
                    {**data, "seq": seq, "uid": pending.unit.uid, "version": pending.unit.version},
                )

        await self._database.transaction(work)

    async def drop_malformed(self, surplus: Sequence[PendingUnit], stamp: Stamp) -> None:
        """Drop the pending rewards of malformed generations, so that they are not trained on."""

        def work(db: Connection) -> None:
            for pending in surplus:
                # Op −1, because the refused ops of the same answer are numbered from 0.
                log(
                    db,
                    stamp,
                    "drop",
                    pending.generation,
                    -1,
                    {"reason": "too many malformed", "count": 1},
                )
                db.execute(
                    "UPDATE units SET pending_count = 0, pending_sum = 0, ready = NULL "
                    "WHERE uid = ? AND version = ?",
                    pending.unit,
                )

        await self._database.transaction(work)

    async def spent_generations(self, before: int) -> list[str]:
        """Return the ids of generations that can no longer earn credit.

        A generation is spent if none of its units meets one of these conditions:

        * It is the current version of an active entry.
        * It has pending reward.
        * It was retrieved at or after the actor step `before`. It may still guide a running
          episode.
        """
        return [
            row["id"]
            for row in await self._database.rows(
                f"SELECT id FROM generations WHERE {_SPENT}", (before,)
            )
        ]

    async def delete_generations(self, ids: Iterable[str], before: int) -> None:
        """Delete the generations in `ids` that are still spent (see `spent_generations`)."""
        sql = f"DELETE FROM generations WHERE id IN (SELECT value FROM json_each(?)) AND {_SPENT}"
        values = (json.dumps(list(ids)), before)
        await self._database.transaction(lambda db: db.execute(sql, values))

    # ── metrics ───────────────────────────────────────────────────────────────────────────────────

    async def counts(self) -> dict[str, int]:
        """Return metrics by name.

        The names are queue/STATE, ops/KIND, dropped/REASON, buffer/ready, generations and log/seq.
        Operations are counted since the bank was created or last reset by `reset_for_new_run`.
        """
        return await self._database.read(self._counter.read)


_SPENT = """
    NOT EXISTS (
        SELECT 1 FROM units LEFT JOIN entries \
ON entries.uid = units.uid AND entries.version = units.version
        WHERE generation = generations.id AND \
(pending_count > 0 OR entries.status = 'active' OR last_returned_step >= ?))
"""
"""SQL condition for a spent generation (see `Store.spent_generations`).

Its parameter is `before`.
"""


def _open_requests(db: Connection, limit: int) -> int:
    """Return the number of pending and leased requests, limited to `limit`."""
    sql = (
        "SELECT COUNT(*) FROM (SELECT 1 FROM requests WHERE state IN ('pending', 'leased') LIMIT ?)"
    )
    return db.execute(sql, (limit,)).fetchone()[0]

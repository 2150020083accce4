"""Durability of the bank on disk.

Covered are the rollback to a snapshot, files of older and newer versions, full disks, other writers
and killed processes.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl.errors import StoreError
from crl.manager.inspection.reading import open_reader
from crl.manager.records import (
    ApplyRules,
    Credit,
    Distilled,
    DistilRequest,
    Generation,
    GroupSuccess,
    Merged,
    Refined,
    Stamp,
    UnitKey,
    Vote,
    Write,
)
from crl.manager.storage.database import SCHEMA_VERSION, connect_to_read
from crl.manager.storage.snapshots import TABLES
from crl.manager.storage.store import Store
from crl.types import Completion, Lift, Verdict
from support.kept_sets import kept_set
from support.managers import (
    bank_of_version_1,
    bank_of_version_2,
    bank_of_version_3,
    bank_of_version_4,
    bank_of_version_5,
    bank_of_version_6,
    hit,
    request,
    task,
)
from support.paths import python_environment

AT = Stamp(4, 2)


def contents(path: Path) -> dict[str, list[Any]]:
    """Return the rows of every table. A leased request is shown as a pending one."""
    with closing(sqlite3.connect(path)) as db:
        tables = [
            name
            for (name,) in db.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name != 'sqlite_sequence'"
            )
        ]
        found = {name: sorted(map(repr, db.execute(f"SELECT * FROM {name}"))) for name in tables}
    return found | {"requests": [row.replace("'leased'", "'pending'") for row in found["requests"]]}


# ── rollback ──────────────────────────────────────────────────────────────────────────────────────

Step = tuple[str, int]
KINDS = (
    "submit lease release return bad fail mark_dead revive credit judge lift refine search train "
    "prune embed merge vote"
)
HISTORIES = st.lists(
    st.tuples(st.sampled_from((KINDS + 3 * " add update snapshot").split()), st.integers(0, 2)),
    min_size=5,
    max_size=40,
)
RULES = ApplyRules(malformed_reward=-1.0, max_per_goal=3, max_entries=4, evict="lru", evict_votes=2)


def distilled(of: DistilRequest, kind: str) -> Distilled:
    def write(op: int, text: str, *targets: UnitKey) -> Write:
        return Write(
            op, text, (op, op + 1), np.arange(3, dtype=np.float32) + of.episode.member, targets
        )

    generation = Generation(
        of.id, 2, (1, 2), Completion((3, 4, 0), (-0.1, -0.2, -0.3), (2, 2, 2), "stop"), 0
    )
    writes = {
        "add": (write(0, "Go \x00west's."), write(1, "Go east.")),
        "update": (write(0, "Go north.", UnitKey("run/0/0/0#0", 1)),),
    }
    dropped = {"no op in the answer": 1} if kind == "bad" else {}
    votes = (
        tuple(Vote(op, UnitKey(f"run/0/0/{op}#0", 1), -1) for op in range(3))
        if kind == "vote"
        else ()
    )
    return Distilled(of, generation, writes.get(kind, ()), int(kind == "return"), dropped, votes)


def merged(name: str, chunk: Sequence[UnitKey], n: int) -> Merged:
    """Return the outcome of a merge: the first two entries of the chunk become one.

    The third entry is discarded. With n = 1 the answer has no operations. With n = 2 one more
    target is stale.
    """
    generation = Generation(
        name, 2, (1, 2), Completion((3, 4, 0), (-0.1, -0.2, -0.3), (2, 2, 2), "stop"), 0
    )
    targets = (*chunk[:2], UnitKey("run/0/0/0#0", 99)) if n == 2 else tuple(chunk[:2])
    merges = (
        (Write(0, "Go about.", (0, 1), np.ones(3, np.float32), targets),)
        if len(targets) > 1 and n != 1
        else ()
    )
    discards = ((1, tuple(chunk[2:3])),) if len(chunk) > 2 and n != 1 else ()
    return Merged(generation, merges, discards, {"not JSON": 1}, malformed=not (merges or discards))


def refined(n: int) -> Refined:
    """Return a refinement.

    With n = 0 it has a new text. With n = 1 the retrieved text stays unchanged. With n = 2 the
    answer is malformed.
    """
    generation = Generation(
        f"question {n}", 2, (1, 2), Completion((3, 4, 0), (-0.1, -0.2, -0.3), (2, 2, 2), "stop"), 0
    )
    text, dropped = ("Two rooms west.", {}) if n == 0 else (None, {"not JSON": 1} if n == 2 else {})
    return Refined(
        generation,
        hit(f"run/0/0/{n}#0").use,
        text,
        (0, 2) if text else (0, 0),
        dropped,
        malformed=n == 2,
    )


async def apply_step(store: Store, step: Step) -> None:
    """Apply one step of a history. The effect depends only on the step and on the bank."""
    kind, n = step
    name, unit = request(member=n), UnitKey(f"run/0/0/{n}#0", 1)
    if kind in ("add", "update", "return", "bad", "fail", "mark_dead"):
        await store.submit(name, AT)
    match kind:
        case "submit":
            await store.submit(name, AT)
        case "lease":
            await store.lease(n)
        case "release":
            await store.release()
        case "add" | "update" | "return" | "bad":
            await store.apply(distilled(name, kind), AT, RULES)
        case "vote":
            voter = request(1 + await votes(store), member=n)
            await store.submit(voter, AT)
            await store.apply(distilled(voter, kind), AT, RULES)
        case "fail":
            for leased in await store.lease(1):
                await store.record_failure(leased, "busy")
        case "mark_dead":
            await store.mark_dead(name, "too long", AT)
        case "revive":
            await store.retry_dead()
        case "credit":
            await store.credit(f"episode {n}", [Credit.from_use(hit(unit.uid).use, True)], AT)
        case "judge":
            use = hit(unit.uid, generation=f"question {n}").use
            judged = (
                replace(use, verdict=get_args(Verdict)[n]),
                replace(use, how="ask", verdict="refine"),
            )
            await store.credit(f"judged {n}", [Credit.from_use(use, n > 0) for use in judged], AT)
        case "lift":
            units = [UnitKey(f"run/0/0/{member}#0", 1) for member in range(n + 1)]
            await store.record_lifts(
                {f"run/4/{n}": [GroupSuccess(unit, 1.0, n / 3) for unit in units]}, AT
            )
        case "refine":
            await store.refine(refined(n), AT, RULES)
        case "search":
            await store.set_retrieval_counts({unit: (n + 1, n)}, AT)
        case "train":
            ready = [unit.pending for unit in await store.ready_units()][:n]
            await store.mark_trained(ready, {pending.generation for pending in ready}, n, AT)
        case "prune":
            await store.delete_generations(await store.spent_generations(n), n)
        case "merge":
            await store.merge(
                merged(
                    f"merge/{await store.chunk_count()}",
                    [entry.unit for entry, _ in await store.entries()],
                    n,
                ),
                AT,
                RULES,
            )
        case "embed":
            await store.set_vectors(f"embedder {n}", {unit.uid: np.full(3, n, np.float32)})


async def votes(store: Store) -> int:
    return (await store.counts())["ops/down"]


async def apply_history(
    store: Store, path: Path, history: Sequence[Step]
) -> dict[int, dict[str, list[Any]]]:
    """Apply the history and return the bank's contents at each snapshot, by sequence number.

    One more snapshot is taken at the end.
    """
    states = {}
    for step in [*history, ("release", 0), ("snapshot", 0)]:
        if step[0] == "snapshot":
            seq = await store.snapshot(AT)
            states[seq] = contents(path)
        else:
            await apply_step(store, step)
    return states


@settings(max_examples=60, deadline=None)
@given(before=HISTORIES, after=HISTORIES, chosen=st.integers(0, 100))
def test_the_bank_can_be_rolled_back_to_any_snapshot_and_continue(
    before: list[Step], after: list[Step], chosen: int
) -> None:
    async def both(folder: Path) -> None:
        path = folder / "bank.sqlite"
        store = await Store.open(path)
        store._database.connection.execute(
            "PRAGMA synchronous = OFF"
        )  # no power failure in this test
        states = await apply_history(store, path, before)
        end = max(states)
        undone = await apply_history(store, path, after)
        states |= undone
        last, reached = max(states), contents(path)

        there = await store.rollback(end)
        assert contents(path) == states[end]
        if there.archive:
            assert contents(there.archive) == reached, "nothing is lost"
        again = await apply_history(store, path, after)
        assert again == undone, "undone changes can be repeated, with the same sequence numbers"
        assert contents(path) == reached
        assert await store.counts() == await fresh_counts(store)

        past = [seq for seq in states if seq <= end]
        target = past[chosen % len(past)]
        assert (await store.rollback(target)).step == AT.step
        assert contents(path) == states[target]
        assert await store.counts() == await fresh_counts(store)
        for deleted in {last, *again} - {target}:
            with pytest.raises(StoreError, match=f"the bank has no snapshot {deleted}, so"):
                await store.rollback(deleted)
        await store.aclose()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(both(Path(folder)))


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(HISTORIES, min_size=2, max_size=3),
    kept=st.sets(st.integers(0, 40)),
    chosen=st.integers(0, 40),
)
def test_deleting_snapshots_does_not_change_the_others(
    parts: list[list[Step]], kept: set[int], chosen: int
) -> None:
    """Take one new snapshot after each part, and delete older snapshots.

    Keep an older snapshot only if its position among all snapshots so far is in `kept`.
    """

    async def play(folder: Path) -> None:
        path = folder / "bank.sqlite"
        store = await Store.open(path)
        store._database.connection.execute(
            "PRAGMA synchronous = OFF"
        )  # no power failure in this test
        states: dict[int, dict[str, list[Any]]] = {}
        all_of_them: list[int] = []
        for part in parts:
            states |= (found := await apply_history(store, path, part))
            all_of_them += found
            left = {seq for place, seq in enumerate(all_of_them) if place in kept} & states.keys()
            last = await store.snapshot(AT, left)
            all_of_them.append(last)
            states = {seq: states[seq] for seq in left} | {last: contents(path)}
        images = {
            row[0]
            for table in TABLES
            for row in await store._database.rows(f"SELECT snapshot FROM {table}_before")
        }
        assert images <= states.keys(), "deleted snapshots leave no images"
        for deleted in set(all_of_them) - states.keys():
            with pytest.raises(StoreError, match=f"the bank has no snapshot {deleted}, so"):
                await store.rollback(deleted)
        target = sorted(states)[chosen % len(states)]
        await store.rollback(target)
        assert without_images(contents(path)) == without_images(states[target])
        await store.aclose()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder)))


def without_images(state: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {table: state[table] for table in ("log", *TABLES)}


async def fresh_counts(store: Store) -> dict[str, int]:
    """Return the counts of a new `Store` on the same database, which has no cached counts."""
    return await Store(store._database).counts()


async def test_done_requests_are_counted_from_the_log(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "bank.sqlite")
    for step in [("submit", n) for n in range(4)] + [
        ("add", 0),
        ("bad", 1),
        ("mark_dead", 2),
        ("lease", 1),
    ]:
        await apply_step(store, step)
    queue = {"queue/pending": 0, "queue/leased": 1, "queue/done": 2, "queue/dead": 1}
    assert (await store.counts()).items() >= {
        **queue,
        "ops/submit": 4,
        "ops/add": 2,
        "dropped/no op in the answer": 1,
    }.items()
    await store.reset_for_new_run()
    assert not {
        name: number
        for name, number in (await store.counts()).items()
        if number and name != "log/seq"
    }
    assert await store.submit(request(member=3), AT), "a deleted request can be submitted again"
    metrics = {"queue/pending": 1, "queue/done": 0, "ops/submit": 1, "ops/add": 0}
    assert (await store.counts()).items() >= metrics.items()
    assert await store.counts() == await fresh_counts(store)
    await store.aclose()


async def test_a_reset_bank_cannot_be_rolled_back(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "bank.sqlite")
    await apply_step(store, ("submit", 0))
    seq = await store.snapshot(AT)
    await store.reset_for_new_run()
    with pytest.raises(StoreError, match=f"no snapshot {seq}"):
        await store.rollback(seq)
    assert contents(tmp_path / "bank.sqlite")["requests_before"] == []
    assert not [name for name in os.listdir(tmp_path) if "rollback" in name], (
        "no archive is written"
    )
    await store.aclose()


async def test_a_reset_bank_is_compacted(tmp_path: Path) -> None:
    path = tmp_path / "bank.sqlite"
    store = await Store.open(path)
    for member in range(100):
        await store.submit(request(member=member, note="x" * 4000), AT)
    await store.snapshot(AT)
    for leased in await store.lease():
        await store.mark_dead(leased, "too long", AT)
    assert len(contents(path)["requests_before"]) == 100
    await store.reset_for_new_run()
    assert path.stat().st_size < 200_000, "the requests and their images alone were 800 kB"
    assert path.with_name("bank.sqlite-wal").stat().st_size == 0
    await store.aclose()


async def test_a_bank_with_an_open_reader_cannot_be_compacted(tmp_path: Path) -> None:
    path = tmp_path / "bank.sqlite"
    store = await Store.open(path)
    store._database.connection.execute("PRAGMA busy_timeout = 0")
    await store.submit(request(), AT)
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM log").fetchall()
        with pytest.raises(
            StoreError,
            match=r"bank\.sqlite: another connection is reading the bank, so it cannot be "
            r"compacted into one file\. Close that connection and try again\.",
        ):
            await store.compact()
    await store.compact()
    await store.aclose()


async def test_a_reader_at_the_end_of_a_run_leaves_no_log(tmp_path: Path) -> None:
    """The file is complete when the run ends, and the next reader removes the empty log."""
    path = tmp_path / "bank.sqlite"
    store = await Store.open(path)
    await store.submit(request(), AT)
    with closing(connect_to_read(path)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT COUNT(*) FROM requests").fetchall() == [(1,)]
        closing_store = asyncio.create_task(store.aclose())
        await asyncio.sleep(0.2)
        assert not closing_store.done(), "it waits for the end of the read"
        reader.execute("COMMIT")
        await closing_store
        assert path.with_name("bank.sqlite-wal").stat().st_size == 0
    with open_reader(path) as bank:
        assert len(bank.requests("pending")) == 1
    assert os.listdir(tmp_path) == ["bank.sqlite"]


async def test_a_rollback_without_changes_makes_no_copy(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "bank.sqlite")
    await apply_step(store, ("submit", 0))
    seq = await store.snapshot(Stamp(7, 0))
    await store.lease()
    assert await store.rollback(seq) == (done := await store.rollback(seq))
    assert (done.step, done.archive, len(await store.lease())) == (7, None, 1)
    await store.aclose()


# ── dead requests ─────────────────────────────────────────────────────────────────────────────────


async def test_dead_requests_keep_their_payload_and_can_be_retried(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "bank.sqlite")
    requests = [request(member=member) for member in range(4)]
    for dead in requests:
        await store.submit(dead, AT)
        assert [await store.record_failure(dead, "busy") for _ in range(2)] == [1, 2]
        if dead.episode.member:
            await store.mark_dead(dead, "too often busy", AT)
    with pytest.raises(
        StoreError,
        match=r"no dead episodes have these ids: nobody, run/0/0/0\. Nothing was changed\. "
        r"List the dead episodes with crl bank dead\.",
    ):
        await store.retry_dead(["run/0/0/1", "run/0/0/0", "nobody"])
    assert (await store.counts())["queue/dead"] == 3
    assert await store.retry_dead(["run/0/0/2"]) == ["run/0/0/2"]
    rows = await store._database.rows("SELECT state, attempts, reason FROM requests ORDER BY id")
    assert list(map(tuple, rows)) == [
        ("pending", 2, "busy"), ("dead", 2, "too often busy"),
        ("pending", 0, None), ("dead", 2, "too often busy"),
    ]  # fmt: skip
    assert await store.retry_dead() == ["run/0/0/1", "run/0/0/3"]
    assert await store.lease() == requests
    await store.mark_dead(requests[1], "again", AT)
    assert (await store.counts()).items() >= {
        "ops/dead": 4,
        "ops/revive": 3,
        "queue/dead": 1,
    }.items()
    await store.aclose()


# ── banks of older versions ───────────────────────────────────────────────────────────────────────


def schema(path: Path) -> dict[str, Any]:
    with closing(sqlite3.connect(path)) as db:
        tables = [
            name
            for (name,) in db.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
            )
        ]
        columns = {
            name: db.execute("SELECT * FROM pragma_table_info(?)", (name,)).fetchall()
            for name in tables
        }
        others = "SELECT name, sql FROM sqlite_master WHERE type != 'table' AND sql IS NOT NULL"
        return columns | {name: " ".join(sql.split()) for name, sql in db.execute(others)}


async def test_a_bank_of_version_1_is_upgraded(tmp_path: Path) -> None:
    path = bank_of_version_1(tmp_path / "old.sqlite")
    await (await Store.open(tmp_path / "new.sqlite")).aclose()
    with closing(sqlite3.connect(path)) as db:
        log = db.execute("SELECT * FROM log").fetchall()
    store = await Store.open(path)
    assert [(entry.uid, entry.version, entry.text) for entry, _ in await store.entries()] == [
        ("run/0/0/0#2", 1, "Mind the trap."),
        ("run/0/0/0#0", 2, "Go southwest."),
        ("run/0/0/2#0", 1, "Go southeast."),
    ]  # fmt: skip
    metrics = {
        "queue/pending": 2,
        "queue/leased": 0,
        "queue/done": 4,
        "queue/dead": 1,
        "ops/add": 4,
        "ops/evict": 1,
        "buffer/ready": 2,
    }
    assert (await store.counts()).items() >= metrics.items()
    seq = await store.snapshot(AT)
    before = contents(path)
    for step in [("submit", 7), ("revive", 0), ("search", 0), ("prune", 99)]:
        await apply_step(store, step)
    await store.apply(distilled(request(1), "add"), AT, RULES)
    await store.rollback(seq)
    assert contents(path) == before
    assert [leased.id for leased in await store.lease()] == ["run/1/0/0", "run/1/0/1"]
    await store.aclose()
    assert schema(path) == schema(tmp_path / "new.sqlite")
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT * FROM log WHERE seq < ?", (seq,)).fetchall() == log
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


async def test_a_bank_of_version_2_is_upgraded_with_its_snapshots(tmp_path: Path) -> None:
    path = bank_of_version_2(tmp_path / "old.sqlite")
    await (await Store.open(tmp_path / "new.sqlite")).aclose()
    store = await Store.open(path)
    assert schema(path) == schema(tmp_path / "new.sqlite")
    units = {str(unit.pending.unit): unit.pending for unit in await store.ready_units()}
    assert (units["run/0/0/0#0@1"].count, units["run/0/0/0#0@1"].total) == (2, 0.0), (
        "pending credit is preserved"
    )
    assert [(entry.uid, entry.counters.votes) for entry, _ in await store.entries()] == [
        ("run/0/0/0#2", 0), ("run/0/0/0#0", 0), ("run/1/0/0#0", 0),
    ]  # fmt: skip
    await apply_step(store, ("vote", 0))
    seq = await store.snapshot(AT)
    before = contents(path)
    for step in [("vote", 0), ("vote", 2), ("credit", 0)]:
        await apply_step(store, step)
    await store.rollback(seq)
    assert contents(path) == before

    await store.rollback(13)  # made by the previous version
    assert [
        (entry.uid, entry.counters.retrieved, entry.counters.votes)
        for entry, _ in await store.entries()
    ] == [("run/0/0/0#1", 0, 0), ("run/0/0/0#2", 0, 0), ("run/0/0/0#0", 0, 0)]
    assert {str(unit.pending.unit): unit.pending.count for unit in await store.ready_units()} == {
        "run/0/0/0#0@1": 1,
        "run/0/0/3@0": 1,
    }
    await store.aclose()


async def test_a_bank_of_version_3_is_upgraded_with_its_snapshots_and_has_no_lift(
    tmp_path: Path,
) -> None:
    path = bank_of_version_3(tmp_path / "old.sqlite")
    await (await Store.open(tmp_path / "new.sqlite")).aclose()
    store = await Store.open(path)
    assert schema(path) == schema(tmp_path / "new.sqlite")

    async def records() -> dict[str, tuple[int, int, Lift | None]]:
        return {
            str(entry.unit): (entry.counters.credited, entry.counters.votes, entry.counters.lift)
            for entry, _ in await store.entries()
        }

    others = {"run/0/0/0#2@1": (0, 0, None), "run/1/0/0#0@1": (0, 0, None)}
    assert await records() == {**others, "run/0/0/0#0@2": (1, 1, None)}
    unit = UnitKey("run/0/0/0#0", 2)
    await store.record_lifts({"run/5/1": [GroupSuccess(unit, 1.0, 0.5)]}, AT)
    seq = await store.snapshot(AT)
    before = contents(path)
    await store.record_lifts(
        {"run/5/1": [GroupSuccess(unit, 1.0, 0.5)], "run/5/2": [GroupSuccess(unit, 1.0, 1.0)]}, AT
    )
    assert await records() == {**others, "run/0/0/0#0@2": (1, 1, Lift(2, 0.25, 0.125))}
    await store.rollback(seq)
    assert contents(path) == before

    await store.rollback(22)  # made by the previous version
    assert await records() == {**others, "run/0/0/0#0@2": (0, 1, None)}
    await store.record_lifts({"run/5/1": [GroupSuccess(unit, 1.0, 0.5)]}, AT)
    assert await records() == {**others, "run/0/0/0#0@2": (0, 1, Lift(1, 0.5))}
    await store.aclose()


async def test_a_bank_of_version_4_is_upgraded_with_its_snapshots_and_has_no_kept_sets(
    tmp_path: Path,
) -> None:
    path = bank_of_version_4(tmp_path / "old.sqlite")
    await (await Store.open(tmp_path / "new.sqlite")).aclose()
    store = await Store.open(path)
    assert schema(path) == schema(tmp_path / "new.sqlite")

    async def trainings() -> dict[str, int]:
        names = [f"run/{name}" for name in ("0/0/0", "0/0/1", "1/0/0", "9/0/0")]
        found = await store.generations(names)
        assert not any(any(found[name].completion.kept) for name in names[:3])
        return {name: generation.c_train for name, generation in found.items()}

    others = {"run/0/0/0": 0, "run/1/0/0": 0}
    assert await trainings() == {**others, "run/0/0/1": 1}
    new = distilled(request(9), "add")
    kept = (kept_set(2, 3), kept_set(4), b"")
    completion = replace(new.generation.completion, kept=kept)
    new = replace(new, generation=replace(new.generation, completion=completion))
    await store.submit(new.request, AT)
    await store.apply(new, AT, RULES)
    assert (await store.generations(["run/9/0/0"]))["run/9/0/0"] == new.generation
    await store.rollback(25)  # made by the previous version
    assert await trainings() == {**others, "run/0/0/1": 0}
    await store.aclose()


async def test_a_bank_of_version_5_is_upgraded_with_its_snapshots_and_has_no_variations(
    tmp_path: Path,
) -> None:
    path = bank_of_version_5(tmp_path / "old.sqlite")
    await (await Store.open(tmp_path / "new.sqlite")).aclose()
    store = await Store.open(path)
    assert schema(path) == schema(tmp_path / "new.sqlite")

    async def variations() -> dict[str, str]:
        columns = "uid || '@' || version, variation"
        sql = f"SELECT {columns} FROM entries WHERE status = 'active'"
        return dict(map(tuple, await store._database.rows(sql)))

    old = {"run/0/0/0#2@1": "", "run/0/0/0#0@2": "", "run/1/0/0#0@1": ""}
    assert await variations() == old
    game = replace(task(), params={"variation": 4})
    new = distilled(request(9, of=game), "add")
    await store.submit(new.request, AT)
    await store.apply(new, AT, RULES)
    assert (await variations())["run/9/0/0#1@1"] == "4"
    await store.rollback(25)  # made by a previous version
    assert await variations() == old
    await store.aclose()


async def test_a_bank_of_version_6_is_upgraded_with_its_snapshots_and_has_no_rewards(
    tmp_path: Path,
) -> None:
    path = bank_of_version_6(tmp_path / "old.sqlite")
    await (await Store.open(tmp_path / "new.sqlite")).aclose()
    store = await Store.open(path)
    assert schema(path) == schema(tmp_path / "new.sqlite")

    async def rewards() -> dict[str, float | None]:
        return {str(e.unit): e.provenance.reward for e, _ in await store.entries()}

    old = {"run/0/0/0#2@1": None, "run/0/0/0#0@2": None, "run/1/0/0#0@1": None}
    assert await rewards() == old
    seq = await store.snapshot(AT)
    for number, reward in ((8, 0.25), (9, None)):
        new = distilled(replace(request(number), reward=reward), "add")
        await store.submit(new.request, AT)
        await store.apply(new, AT, RULES)
    new_rewards = {"run/8/0/0#1@1": 0.25, "run/9/0/0#1@1": None}
    assert {name: (await rewards())[name] for name in new_rewards} == new_rewards
    await store.rollback(seq)
    assert await rewards() == old
    await store.rollback(25)  # made by a previous version
    assert await rewards() == old
    await store.aclose()


async def test_requests_deleted_by_the_upgrade_do_not_count_as_done(tmp_path: Path) -> None:
    path = bank_of_version_1(tmp_path / "bank.sqlite")
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM requests WHERE state IN ('pending', 'leased')")
    store = await Store.open(path)
    assert (await store.counts()).items() >= {
        "queue/done": 4,
        "ops/submit": 7,
        "ops/forget": 2,
    }.items()
    await store.aclose()


async def test_a_reset_bank_of_version_1_counts_from_its_reset(tmp_path: Path) -> None:
    path = bank_of_version_1(tmp_path / "bank.sqlite")
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO facts SELECT 'begun', MAX(seq) FROM log")
        db.execute("DELETE FROM requests")
    store = await Store.open(path)
    await store.submit(request(9), AT)
    assert (await store.counts()).items() >= {
        "queue/done": 0,
        "queue/pending": 1,
        "ops/submit": 1,
        "ops/add": 0,
    }.items()
    assert "ops/forget" not in await store.counts()
    await store.aclose()


async def test_an_upgrade_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = bank_of_version_1(tmp_path / "bank.sqlite")
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE snapshots (mine)")
    before = contents(path), schema(path)
    with pytest.raises(StoreError, match="table snapshots already exists"):
        await Store.open(path)
    assert (contents(path), schema(path)) == before
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)


# ── faults ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_full_disk_loses_no_acknowledged_request(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "bank.sqlite")
    pages = store._database.connection.execute("PRAGMA page_count").fetchone()[0]
    store._database.connection.execute(f"PRAGMA max_page_count = {pages + 20}")
    outcomes = []
    for group in range(20):
        gathered = (
            store.submit(request(0, group, member, note="x" * 500), AT) for member in range(8)
        )
        outcomes += await asyncio.gather(*gathered, return_exceptions=True)
    messages = {str(outcome) for outcome in outcomes if outcome is not True}
    assert messages == {
        f"{tmp_path / 'bank.sqlite'}: database or disk is full. Free some disk space. "
        "All acknowledged changes are saved."
    }  # fmt: skip
    acknowledged = [
        f"run/0/{i // 8}/{i % 8}" for i, outcome in enumerate(outcomes) if outcome is True
    ]
    assert 0 < len(acknowledged) < len(outcomes)
    store._database.connection.execute("PRAGMA max_page_count = 100000")
    assert await store.submit(request(9), AT)
    await store.aclose()
    again = await Store.open(tmp_path / "bank.sqlite")
    assert [leased.id for leased in await again.lease()] == [*acknowledged, "run/9/0/0"]
    assert (await again.counts())["ops/submit"] == len(acknowledged) + 1, (
        "refused requests are not logged"
    )
    await again.aclose()


WRITE_UNTIL_FAILURE = """
import asyncio, resource, sys
from pathlib import Path
from support.managers import request
from crl.errors import StoreError
from crl.manager.records import Stamp
from crl.manager.storage.store import Store

async def main(path):
    store = await Store.open(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
    for member in range(1000):
        try:
            await store.submit(request(member=member, note="x" * 2000), Stamp(0, 0))
        except StoreError as error:
            print(member, error)
            break
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await store.submit(request(1), Stamp(0, 0))
    await store.aclose()

asyncio.run(main(Path(sys.argv[1])))
"""


def start_python(code: str, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command,
        env=python_environment(),
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        **options,
    )


async def test_a_file_size_limit_loses_no_acknowledged_request(
    tmp_path: Path,
) -> None:
    path = tmp_path / "bank.sqlite"
    output, _ = start_python(WRITE_UNTIL_FAILURE, path).communicate(timeout=120)
    acknowledged, message = output.strip().split(" ", 1)
    assert int(acknowledged) > 10
    remedy = (
        "Check whether the disk is full, over its quota or disconnected. "
        "All acknowledged changes are saved."
    )
    assert message == f"{path}: disk I/O error. {remedy}"
    store = await Store.open(path)
    assert [leased.id for leased in await store.lease()] == [
        f"run/0/0/{member}" for member in range(int(acknowledged))
    ] + ["run/1/0/0"]
    await store.aclose()


@pytest.mark.skipif(
    not Path("/proc/self").is_dir(),
    reason="needs /proc, where nobody may make a file, not even root",
)
async def test_an_unwritable_directory_is_an_error() -> None:
    with pytest.raises(
        StoreError,
        match=r"^/proc/self/bank\.sqlite: .*\. Its directory must exist and be writable\.$",
    ):
        await Store.open(Path("/proc/self/bank.sqlite"))


HOLD_BANK_OPEN = """
import asyncio, sys
from pathlib import Path
from support.managers import request
from crl.manager.records import Stamp
from crl.manager.storage.store import Store

async def main(path):
    store = await Store.open(path)
    await store.submit(request(), Stamp(0, 0))
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(main(Path(sys.argv[1])))
"""


async def test_the_error_of_a_second_writer_names_the_first_one(tmp_path: Path) -> None:
    path = tmp_path / "bank.sqlite"
    holder = start_python(HOLD_BANK_OPEN, path)
    try:
        assert holder.stdout
        assert holder.stdout.readline() == "open\n"
        for _ in range(2):
            with pytest.raises(
                StoreError,
                match=rf"bank\.sqlite: process {holder.pid} on .* is writing to the bank\. "
                r"End that process first",
            ):
                await Store.open(path)
        assert contents(path)["log"], "reading is possible"
    finally:
        holder.kill()
        holder.communicate()
    store = await Store.open(path)  # the claim ended with the process
    with pytest.raises(StoreError, match=f"process {os.getpid()} on"):
        await Store.open(path)
    assert [leased.id for leased in await store.lease()] == ["run/0/0/0"]
    await store.aclose()
    assert os.listdir(tmp_path) == ["bank.sqlite"]


EXIT_WITHOUT_CLOSING = """
import asyncio, sys
from pathlib import Path
from support.managers import request
from crl.manager.records import Stamp
from crl.manager.storage.store import Store

async def main(path):
    store = await Store.open(path)
    await store.submit(request(), Stamp(0, 0))
    raise SystemExit(7)

asyncio.run(main(Path(sys.argv[1])))
"""


async def test_an_unclosed_bank_does_not_keep_its_process_alive(tmp_path: Path) -> None:
    careless = start_python(EXIT_WITHOUT_CLOSING, tmp_path / "bank.sqlite")
    careless.communicate(timeout=60)
    assert careless.returncode == 7
    store = await Store.open(tmp_path / "bank.sqlite")
    assert [leased.id for leased in await store.lease()] == ["run/0/0/0"]
    await store.aclose()


# ── killed processes ──────────────────────────────────────────────────────────────────────────────


MEMORY = Path("/dev/shm")


def run_kill_test(mode: str, *numbers: int) -> dict[str, Any]:
    """Run `support.killed_managers` and return its report.

    The banks are in memory where /dev/shm exists, because SIGKILL does not undo any write.
    """
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        command = [
            sys.executable,
            "-m",
            "support.killed_managers",
            folder,
            mode,
            *map(str, numbers),
        ]
        done = subprocess.run(
            command, env=python_environment(), capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


BY_CAP, BY_SIZE, BY_VOTES = (
    {"for": "run/1/0/0"},
    {"for": "run/1/1/0"},
    {"for": "run/1/3/1", "reason": "votes"},
)
EVICTED = {
    "fifo": {"run/0/0/0#1": BY_CAP, "run/0/0/0#2": BY_SIZE, "run/1/0/0#1": BY_VOTES},
    "lru": {"run/0/0/0#2": BY_CAP, "run/0/0/0#0": BY_SIZE, "run/1/0/0#1": BY_VOTES},
    "credit": {"run/0/0/0#0": BY_CAP, "run/0/0/0#1": BY_SIZE, "run/1/0/0#1": BY_VOTES},
}
"""Entries from before the checkpoint that each eviction rule evicts, with the reason."""

DONE = {
    "submit", "dead", "drop", "malformed", "add", "update", "up", "down", "evict", "refine",
    "credit", "lift", "retrieve", "train", "chunk", "merge", "discard",
}  # fmt: skip
STATES = ["done"] * 2 + ["dead"] * 2 + ["done"] * 8 + ["dead"] + ["done"] * 2


def check_nothing_lost(report: dict[str, Any]) -> None:
    assert report["different"] == []
    assert [rule for rule, _ in report["contents"]] == [*EVICTED, "credit"]
    for rule, tables in report["contents"]:
        assert [ast.literal_eval(row)[1] for row in tables["requests"]] == STATES
        log = [ast.literal_eval(row) for row in tables["log"]]
        assert {kind for _, kind, *_ in log} == DONE, "every kind of operation is done"
        evicted = {origin: json.loads(data) for _, kind, origin, _, data in log if kind == "evict"}
        assert EVICTED[rule] == {
            uid: data for uid, data in evicted.items() if data["for"].startswith("run/1/")
        }
        reasons = {json.loads(data).get(key) for *_, data in log for key in ("reason", "verdict")}
        assert reasons >= {"near duplicate", "stale target", "accept", "refine", "reject"}


def test_kills_before_some_statements_lose_and_repeat_nothing() -> None:
    report = run_kill_test("statements", 50)
    check_nothing_lost(report)
    assert report["killed"] > 80


def test_kills_at_random_times_lose_and_repeat_nothing() -> None:
    report = run_kill_test("random", 200, 1)
    check_nothing_lost(report)
    assert report["killed"] >= 200


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_kills_lose_and_repeat_nothing(seed: int) -> None:
    check_nothing_lost(run_kill_test("random", 1000, seed))


@pytest.mark.soak
def test_kills_before_each_statement_lose_and_repeat_nothing() -> None:
    """Check that each statement is reached under one of the three eviction rules."""
    check_nothing_lost(run_kill_test("statements", len(EVICTED)))

"""Bank on disk: opening and rejected files, transactions, requests, copies."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from crl.errors import StoreError
from crl.manager.records import DistilRequest, Stamp, UnitKey
from crl.manager.storage.database import SCHEMA_VERSION, Database, copy_database
from crl.manager.storage.log_counter import NEW_OPERATIONS
from crl.manager.storage.store import Store
from crl.manager.storage.tables import ACTIVE_ENTRIES
from crl.types import Split, TrackRecord
from support.managers import hit, request, task

AT = Stamp(4, 2)


def sql(path: Path, statement: str) -> list[tuple]:
    with sqlite3.connect(path) as db:
        return list(db.execute(statement))


# ── opening ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_new_bank_has_this_schema_and_a_write_ahead_log(tmp_path):
    path = tmp_path / "bank.sqlite"
    store = await Store.open(path)
    assert (await store.counts())["log/seq"] == 0
    assert [row[0] for row in await store._database.rows("PRAGMA synchronous")] == [2]  # FULL
    await store.aclose()
    assert sql(path, "PRAGMA user_version") == [(SCHEMA_VERSION,)]
    assert sql(path, "PRAGMA journal_mode") == [("wal",)]


async def refused(path: Path) -> str:
    with pytest.raises(StoreError) as caught:
        await Store.open(path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    return text


async def test_a_bank_of_a_newer_crl_is_refused_unchanged(tmp_path):
    path = tmp_path / "bank.sqlite"
    await (await Store.open(path)).aclose()
    sql(path, f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    assert f"newer than this crl's {SCHEMA_VERSION}. Upgrade crl." in await refused(path)
    assert sql(path, "PRAGMA user_version") == [(SCHEMA_VERSION + 1,)]


async def test_another_programs_database_is_refused_unchanged(tmp_path):
    path = tmp_path / "other.sqlite"
    sql(path, "CREATE TABLE songs (title)")
    before = path.read_bytes()
    assert "not a bank of crl" in await refused(path)
    assert path.read_bytes() == before


async def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "bank.sqlite"
    path.write_text(
        "This was a bank once, and now it is prose that goes on for quite a while." * 99
    )
    assert "they are not part of the copy) or choose another path" in await refused(path)


async def test_a_damaged_page_is_an_error_with_a_remedy(tmp_path):
    path = tmp_path / "bank.sqlite"
    store = await Store.open(path)
    for member in range(200):
        await store.submit(request(member=member), AT)
    await store.aclose()
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    before = set(threading.enumerate())
    assert "The file is damaged" in await refused(path)
    for thread in (
        set(threading.enumerate()) - before
    ):  # a thread of SQLite would keep the process alive
        thread.join(60)
        assert not thread.is_alive()


async def test_a_missing_directory_is_an_error(tmp_path):
    assert "must exist and be writable" in await refused(tmp_path / "absent" / "bank.sqlite")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
async def test_a_read_only_bank_is_refused(tmp_path):
    path = tmp_path / "bank.sqlite"
    await (await Store.open(path)).aclose()
    path.chmod(0o400)
    tmp_path.chmod(0o500)
    try:
        await refused(path)
    finally:
        tmp_path.chmod(0o700)


async def test_a_failed_write_is_an_error_and_loses_nothing(tmp_path):
    store = await Store.open(tmp_path / "bank.sqlite")
    await store.submit(request(), AT)
    store._database.connection.execute("PRAGMA query_only = 1")
    with pytest.raises(
        StoreError,
        match=r"bank\.sqlite: attempt to write a readonly database\. Make the file .* writable",
    ):
        await store.submit(request(member=1), AT)
    store._database.connection.execute("PRAGMA query_only = 0")
    assert [r.id for r in await store.lease()] == ["run/0/0/0"]
    await store.aclose()


# ── transactions ──────────────────────────────────────────────────────────────────────────────────


async def test_a_failed_transaction_writes_nothing(tmp_path):
    database = await Database.open(tmp_path / "bank.sqlite")

    def half(db) -> None:
        db.execute("INSERT INTO facts VALUES ('a', 'b')")
        raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        await database.transaction(half)
    assert await database.rows("SELECT * FROM facts") == []
    await database.aclose()


async def test_a_cancelled_caller_does_not_interrupt_a_transaction(tmp_path):
    database = await Database.open(tmp_path / "bank.sqlite")
    begun, go_on = threading.Event(), threading.Event()

    def slow(db) -> None:
        db.execute("INSERT INTO facts VALUES ('a', 'b')")
        begun.set()
        go_on.wait(10)
        db.execute("INSERT INTO facts VALUES ('c', 'd')")

    caller = asyncio.create_task(database.transaction(slow))
    await asyncio.to_thread(begun.wait, 10)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go_on.set()
    await database.aclose()  # waits for the transaction
    assert sql(database.path, "SELECT name FROM facts") == [("a",), ("c",)]


# ── requests ──────────────────────────────────────────────────────────────────────────────────────


SHOWN = replace(hit("run/0/0/0#1", 2, goal="Leave."), record=TrackRecord(4, 3, 0.25))


async def test_a_leased_request_equals_the_submitted_one(tmp_path):
    store = await Store.open(tmp_path / "bank.sqlite")
    submitted = request(
        3, 17, 2, note="ünïcode \u2028 🙂", shown=(SHOWN,), success=False, truncated=True
    )
    assert await store.submit(submitted, AT)
    assert await store.lease() == [submitted]
    assert DistilRequest.from_json(submitted.to_json()) == submitted
    assert submitted.id == "run/3/17/2"
    await store.aclose()


async def test_submitting_again_changes_nothing(tmp_path):
    store = await Store.open(tmp_path / "bank.sqlite")
    assert await store.submit(request(), AT)
    assert await store.submit(request(note="another text"), AT)
    assert await store.lease() == [request()]
    assert await store.submit(request(), AT)
    assert await store.lease() == []
    await store.aclose()
    assert sql(tmp_path / "bank.sqlite", "SELECT kind, origin FROM log") == [
        ("submit", "run/0/0/0")
    ]


async def test_requests_are_leased_in_order_of_step_group_and_member(tmp_path):
    store = await Store.open(tmp_path / "bank.sqlite")
    for address in [(1, 0, 0), (0, 10, 1), (0, 9, 2), (0, 10, 0)]:
        await store.submit(request(*address), AT)
    assert [r.id for r in await store.lease(3)] == ["run/0/9/2", "run/0/10/0", "run/0/10/1"]
    assert [r.id for r in await store.lease(3)] == ["run/1/0/0"]
    await store.aclose()


async def test_leases_of_an_ended_process_are_released(tmp_path):
    store = await Store.open(tmp_path / "bank.sqlite")
    await store.submit(request(), AT)
    await store.lease()
    await store.aclose()
    again = await Store.open(tmp_path / "bank.sqlite")
    assert await again.lease() == [request()]
    await again.aclose()


async def test_a_full_queue_accepts_only_known_requests(tmp_path):
    store = await Store.open(tmp_path / "bank.sqlite")
    assert await store.submit(request(), AT, max_open=1)
    assert not await store.submit(request(member=1), AT, max_open=1)
    assert await store.submit(request(), AT, max_open=1)
    await store.lease()
    assert not await store.submit(
        request(member=1), AT, max_open=1
    )  # a leased request is still open
    await store.mark_dead(request(), "no", AT)
    assert await store.submit(request(member=1), AT, max_open=1)
    await store.aclose()


async def test_a_dead_request_keeps_its_payload_and_reason(tmp_path):
    store = await Store.open(tmp_path / "bank.sqlite")
    await store.submit(request(), AT)
    await store.mark_dead(request(), "too long", AT)
    await store.mark_dead(request(), "again", AT)
    await store.aclose()
    rows = sql(tmp_path / "bank.sqlite", "SELECT state, reason, payload IS NULL FROM requests")
    assert rows == [("dead", "too long", 0)]


async def test_a_stored_hit_without_goal_and_record_can_be_read():
    submitted = request(shown=(hit("run/0/0/0#1"),))
    written = submitted.to_json()
    for name, value in (("goal", '""'), ("record", '{"credited": 0, "won": 0, "lift": null}')):
        assert written != (written := written.replace(f', "{name}": {value}', ""))
    assert DistilRequest.from_json(written) == submitted


@pytest.mark.parametrize(("old", "split"), [("known", "seen"), ("new", "unseen")])
def test_a_stored_request_with_the_old_name_of_its_split_can_be_read(
    old: str, split: Split
) -> None:
    submitted = request(of=replace(task(), split=split))
    written = submitted.to_json().replace(f'"split": "{split}"', f'"split": "{old}"')
    assert written != submitted.to_json()
    assert DistilRequest.from_json(written) == submitted


# ── copies ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_copy_during_writes_is_consistent(tmp_path):
    store = await Store.open(tmp_path / "bank.sqlite")
    await asyncio.gather(
        *(store.submit(request(member=m), AT) for m in range(20)),
        store.backup(tmp_path / "copy.sqlite"),
    )
    assert sql(tmp_path / "copy.sqlite", "PRAGMA integrity_check") == [("ok",)]
    copied = sql(
        tmp_path / "copy.sqlite",
        "SELECT (SELECT COUNT(*) FROM requests), (SELECT COUNT(*) FROM log)",
    )
    assert copied[0][0] == copied[0][1] <= 20
    assert len(await store.lease()) == 20
    await store.aclose()
    copy = await Store.open(tmp_path / "copy.sqlite")
    assert len(await copy.lease()) == copied[0][0]
    await copy.aclose()


async def test_a_leftover_write_ahead_log_is_not_part_of_a_copy(tmp_path):
    store, other = (
        await Store.open(tmp_path / "bank.sqlite"),
        await Store.open(tmp_path / "copy.sqlite"),
    )
    await store.submit(request(), AT)
    await other.submit(request(member=7), AT)
    left = (tmp_path / "copy.sqlite-wal").read_bytes()
    await other.aclose()
    (tmp_path / "copy.sqlite").unlink()
    (tmp_path / "copy.sqlite-wal").write_bytes(left)
    await store.backup(tmp_path / "copy.sqlite")
    await store.aclose()
    assert sql(tmp_path / "copy.sqlite", "SELECT id FROM requests") == [("run/0/0/0",)]


async def test_a_copy_overwrites_nothing_and_leaves_no_files(tmp_path):
    store = await Store.open(tmp_path / "bank.sqlite")
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(
        StoreError,
        match=r"mine: the file already exists and is not overwritten\. Choose another path\.",
    ):
        await store.backup(tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "mine"
    with pytest.raises(StoreError, match="must exist and be writable"):
        await store.backup(tmp_path / "nowhere" / "copy.sqlite")
    beside = [f"bank.sqlite{end}" for end in ("", "-shm", "-wal", "-writer")]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*beside, "mine"]
    await store.aclose()


@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_a_cancelled_copy_is_removed(turns: int, tmp_path):
    store = await Store.open(tmp_path / "bank.sqlite")
    copying = asyncio.create_task(store.backup(tmp_path / "copy.sqlite"))
    for _ in range(turns):
        await asyncio.sleep(0)
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert not (tmp_path / "copy.sqlite").exists()
    await store.aclose()


async def test_without_its_archive_a_rollback_fails_and_changes_nothing(tmp_path):
    store = await Store.open(tmp_path / "bank.sqlite")
    seq = await store.snapshot(AT)
    await store.submit(request(), AT)
    last = (await store.counts())["log/seq"]
    (tmp_path / f"bank-before-rollback-{last}.sqlite.part").mkdir()
    with pytest.raises(
        StoreError,
        match=r"bank\.sqlite: .*rollback-\d+\.sqlite\.part'\. "
        r"All acknowledged changes are saved\.",
    ) as caught:
        await store.rollback(seq)
    assert isinstance(caught.value.__cause__, OSError)
    assert (await store.counts())["queue/pending"] == 1
    await store.aclose()


async def test_retrieval_counts_are_logged(tmp_path):
    store = await Store.open(tmp_path / "bank.sqlite")
    await store.set_retrieval_counts({UnitKey("nobody", 1): (1, 2)}, AT)
    await store.aclose()
    assert sql(tmp_path / "bank.sqlite", "SELECT step, extractor, kind, origin, op FROM log") == [
        (4, 2, "retrieve", "nobody", 1)
    ]


async def test_copying_a_closed_bank_leaves_no_files_beside_it(tmp_path):
    store = await Store.open(tmp_path / "bank.sqlite")
    await store.submit(request(), AT)
    # A copy of an open bank includes the write-ahead log.
    await copy_database(tmp_path / "bank.sqlite", tmp_path / "open.sqlite")
    await store.aclose()
    (tmp_path / "away").mkdir()
    before = (tmp_path / "bank.sqlite").read_bytes()
    await copy_database(tmp_path / "bank.sqlite", tmp_path / "away" / "closed.sqlite")
    for copy in ("open.sqlite", "away/closed.sqlite"):
        assert sql(tmp_path / copy, "SELECT id FROM requests") == [("run/0/0/0",)]
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith("bank")} == {
        "bank.sqlite"
    }
    assert (tmp_path / "bank.sqlite").read_bytes() == before


async def test_queries_of_every_answer_use_an_index(tmp_path):
    """Check that the statements that run for every answer use an index instead of a scan.

    The log and the number of evicted entries only grow.
    """
    store = await Store.open(tmp_path / "bank.sqlite")
    for statement in (
        f"{ACTIVE_ENTRIES} AND task = 'room' AND goal = 'x' ORDER BY written",
        NEW_OPERATIONS.replace("?", "9"),
        "SELECT state, COUNT(*) FROM requests WHERE state IN ('pending', 'leased', 'dead') "
        "GROUP BY state",
    ):
        plan = [
            row["detail"] for row in await store._database.rows(f"EXPLAIN QUERY PLAN {statement}")
        ]
        assert plan[0].startswith("SEARCH"), plan
    await store.aclose()

"""Transactions that share one commit. Each behaves as if it had a commit for itself."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from crl.errors import StoreError
from crl.manager.storage.database import MAX_WORKS_PER_COMMIT, Database, copy_database

Work = Callable[[sqlite3.Connection], Any]


def insert_fact(name: str, order: list[str] | None = None) -> Work:
    def work(db: sqlite3.Connection) -> str:
        if order is not None:
            order.append(name)
        db.execute("INSERT INTO facts VALUES (?, 'x')", (name,))
        return name

    return work


def failing_insert(name: str, error: Exception) -> Work:
    """Return a work that writes a row and then raises `error`."""

    def work(db: sqlite3.Connection) -> None:
        insert_fact(name)(db)
        raise error

    return work


def names(path: Path) -> list[str]:
    with sqlite3.connect(path) as db:
        return [name for (name,) in db.execute("SELECT name FROM facts ORDER BY name")]


class CountingConnection:
    """Connection that counts statements by their first word and makes chosen statements fail."""

    def __init__(self, database: Database) -> None:
        self.counts: dict[str, int] = {}
        self.failing: dict[str, Exception] = {}
        self._connection, database.connection = database.connection, cast(sqlite3.Connection, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        word = sql.split()[0]
        self.counts[word] = self.counts.get(word, 0) + 1
        if error := self.failing.get(word):
            raise error
        return self._connection.execute(sql, *args)


@pytest.fixture
async def database(tmp_path: Path):
    made = await Database.open(tmp_path / "bank.sqlite")
    yield made
    await made.aclose()


async def run_concurrently(database: Database, *works: Work) -> list[Any]:
    async with asyncio.timeout(60):
        return await asyncio.gather(
            *(database.transaction(work) for work in works), return_exceptions=True
        )


async def test_waiting_works_share_a_commit_in_order(
    database: Database,
) -> None:
    statements, order = CountingConnection(database), []
    wanted = [f"{i:03d}" for i in range(MAX_WORKS_PER_COMMIT + 10)]
    assert (
        await run_concurrently(database, *(insert_fact(name, order) for name in wanted)) == wanted
    ), "each caller gets the result of its own work"
    assert order == wanted
    assert statements.counts["COMMIT"] == 2, "one full commit and one for the rest"
    assert names(database.path) == wanted


async def test_a_single_work_is_one_commit(database: Database) -> None:
    statements = CountingConnection(database)
    for name in "abc":
        await database.transaction(insert_fact(name))
        assert names(database.path)[-1] == name, "durable when it returns"
    assert statements.counts["COMMIT"] == 3


async def test_a_failed_work_does_not_affect_others_in_its_commit(database: Database) -> None:
    statements = CountingConnection(database)
    bug = KeyError("a bug")
    first, second, third, fourth = await run_concurrently(
        database, insert_fact("a"), failing_insert("b", bug), insert_fact("a"), insert_fact("c")
    )
    assert (first, second, fourth) == ("a", bug, "c")
    assert isinstance(third, StoreError), "duplicate key"
    assert "bank.sqlite: UNIQUE constraint failed" in str(third)
    assert names(database.path) == ["a", "c"]
    assert statements.counts["COMMIT"] == 1


async def test_works_see_earlier_writes_except_those_of_failed_works(
    database: Database,
) -> None:
    def count(db: sqlite3.Connection) -> int:
        return db.execute("SELECT COUNT(*) FROM facts").fetchone()[0]

    assert (
        await run_concurrently(
            database, insert_fact("a"), count, failing_insert("b", ValueError("no")), count
        )
    )[1::2] == [1, 1]


@pytest.mark.parametrize("word", ["BEGIN", "COMMIT"])
async def test_a_failed_commit_undoes_the_whole_batch(word: str, database: Database) -> None:
    statements = CountingConnection(database)
    statements.failing[word] = sqlite3.OperationalError("disk I/O error")
    outcomes = await run_concurrently(
        database, insert_fact("a"), failing_insert("b", ValueError("no")), insert_fact("c")
    )
    assert [type(outcome) for outcome in outcomes] == [StoreError] * 3, (
        "every caller gets the error"
    )
    assert {str(outcome) for outcome in outcomes} == {
        f"{database.path}: disk I/O error. All acknowledged changes are saved.",
    }  # fmt: skip
    assert names(database.path) == []
    statements.failing.clear()
    assert await run_concurrently(database, insert_fact("a"), insert_fact("c")) == ["a", "c"], (
        "later works succeed"
    )
    assert names(database.path) == ["a", "c"]


async def test_a_text_that_is_not_utf_8_is_damage(database: Database) -> None:
    def read(db: sqlite3.Connection) -> object:
        return db.execute("SELECT CAST(X'61FF' AS TEXT) AS text").fetchone()

    with pytest.raises(StoreError, match=r"column 'text'.* The file is damaged: restore a copy"):
        await database.read(read)


async def test_the_batch_after_a_failed_one_succeeds(database: Database) -> None:
    statements = CountingConnection(database)
    statements.failing["COMMIT"] = sqlite3.OperationalError("disk I/O error")

    def heal(db: sqlite3.Connection) -> None:
        statements.failing.clear()

    works = [insert_fact(f"{i:03d}") for i in range(MAX_WORKS_PER_COMMIT)]
    outcomes = await run_concurrently(database, *works, heal, insert_fact("later"))
    assert {type(outcome) for outcome in outcomes[:MAX_WORKS_PER_COMMIT]} == {StoreError}
    assert outcomes[MAX_WORKS_PER_COMMIT:] == [None, "later"]
    assert names(database.path) == ["later"]


async def test_works_of_cancelled_callers_are_committed(database: Database) -> None:
    """Check that the work of a cancelled caller is committed with its group, begun or not."""
    callers = [
        asyncio.create_task(database.transaction(work))
        for work in (
            insert_fact("a"),
            insert_fact("b"),
            failing_insert("c", ValueError("no")),
            insert_fact("d"),
        )
    ]
    await asyncio.sleep(0)
    for caller in callers[1:3]:
        caller.cancel()
    outcomes = await asyncio.gather(*callers, return_exceptions=True)
    assert (outcomes[0], outcomes[3]) == ("a", "d")
    assert [type(outcome) for outcome in outcomes[1:3]] == [asyncio.CancelledError] * 2
    await database.transaction(insert_fact("e"))
    assert names(database.path) == ["a", "b", "d", "e"]


async def test_closing_completes_waiting_works(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "bank.sqlite")
    wanted = [f"{i:03d}" for i in range(MAX_WORKS_PER_COMMIT + 5)]
    works = [asyncio.create_task(database.transaction(insert_fact(name))) for name in wanted]
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await database.aclose()
        assert await asyncio.gather(*works) == wanted
    assert names(tmp_path / "bank.sqlite") == wanted


async def test_a_copy_contains_whole_commits(database: Database, tmp_path: Path) -> None:
    works = [insert_fact(f"{i:03d}") for i in range(3 * MAX_WORKS_PER_COMMIT)]
    await asyncio.gather(
        run_concurrently(database, *works), database.backup(tmp_path / "copy.sqlite")
    )
    assert len(names(tmp_path / "copy.sqlite")) % MAX_WORKS_PER_COMMIT == 0
    assert len(names(database.path)) == 3 * MAX_WORKS_PER_COMMIT


# ── cancellation ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("turns", [0, 1, 2, 5, 20])
async def test_a_cancelled_caller_leaves_no_open_connection(
    turns: int, database: Database, tmp_path: Path
) -> None:
    """Cancel at every moment.

    The thread of a connection that is still open would call into a loop that may be closed.
    """
    threads = set(threading.enumerate())
    for work in (
        Database.open(tmp_path / "other.sqlite"),
        copy_database(database.path, tmp_path / f"copy-{turns}.sqlite"),
    ):
        caller = asyncio.create_task(work)
        for _ in range(turns + 1):
            await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait({caller})
        if not caller.cancelled():
            continue  # the work ended before the cancellation
        for thread in set(threading.enumerate()) - threads:  # each new thread was asked to end
            thread.join(60)
            assert not thread.is_alive()
        assert not (tmp_path / f"copy-{turns}.sqlite").exists()


@pytest.mark.parametrize(
    "work",
    [
        "Database.open(folder / 'bank.sqlite')",
        "copy_database(folder / 'source.sqlite', folder / 'copy.sqlite')",
    ],
)
def test_ctrl_c_during_a_connect_raises_keyboard_interrupt(work: str, tmp_path: Path) -> None:
    """Check that Ctrl-C during a blocking call cancels the next await."""
    code = f"""
import asyncio, os, signal, time
from pathlib import Path
from crl.manager.storage.database import Database, copy_database
folder = Path({str(tmp_path)!r})
async def main():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)
    await {work}
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted")
"""
    sqlite3.connect(tmp_path / "source.sqlite").close()
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert (result.stdout, result.stderr) == ("interrupted\n", "")


async def test_calls_on_a_closed_bank_raise_immediately(tmp_path):
    database = await Database.open(tmp_path / "bank.sqlite")
    await database.aclose()
    async with asyncio.timeout(60):
        for call in (
            database.transaction(lambda db: None),
            database.rows("SELECT 1"),
            database.backup(tmp_path / "copy.sqlite"),
        ):
            with pytest.raises(StoreError, match="the bank is closed"):
                await call
    assert not (tmp_path / "copy.sqlite").exists()

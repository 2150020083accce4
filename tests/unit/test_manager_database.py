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
from crl.manager.database import GROUP, Database, copy_database

Work = Callable[[sqlite3.Connection], Any]


def fact(name: str, order: list[str] | None = None) -> Work:
    def work(db: sqlite3.Connection) -> str:
        if order is not None:
            order.append(name)
        db.execute("INSERT INTO facts VALUES (?, 'x')", (name,))
        return name

    return work


def bad(name: str, error: Exception) -> Work:
    """Return a work that writes a row and then raises `error`."""

    def work(db: sqlite3.Connection) -> None:
        fact(name)(db)
        raise error

    return work


def names(path: Path) -> list[str]:
    with sqlite3.connect(path) as db:
        return [name for (name,) in db.execute("SELECT name FROM facts ORDER BY name")]


class Statements:
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


async def gathered(database: Database, *works: Work) -> list[Any]:
    async with asyncio.timeout(60):
        return await asyncio.gather(
            *(database.transaction(work) for work in works), return_exceptions=True
        )


async def test_works_that_wait_together_share_a_commit_and_keep_their_order(
    database: Database,
) -> None:
    statements, order = Statements(database), []
    wanted = [f"{i:03d}" for i in range(GROUP + 10)]
    assert await gathered(database, *(fact(name, order) for name in wanted)) == wanted, (
        "each caller gets what its own work returned"
    )
    assert order == wanted
    assert statements.counts["COMMIT"] == 2, "as many as fit into one, and the rest"
    assert names(database.path) == wanted


async def test_a_work_alone_is_a_commit(database: Database) -> None:
    statements = Statements(database)
    for name in "abc":
        await database.transaction(fact(name))
        assert names(database.path)[-1] == name, "durable when it returns"
    assert statements.counts["COMMIT"] == 3


async def test_a_work_that_fails_does_not_touch_its_neighbours(database: Database) -> None:
    statements = Statements(database)
    bug = KeyError("a bug")
    first, second, third, fourth = await gathered(
        database, fact("a"), bad("b", bug), fact("a"), fact("c")
    )
    assert (first, second, fourth) == ("a", bug, "c")
    assert isinstance(third, StoreError), "a key that is there already"
    assert "bank.sqlite: UNIQUE constraint failed" in str(third)
    assert names(database.path) == ["a", "c"]
    assert statements.counts["COMMIT"] == 1


async def test_a_later_work_sees_what_an_earlier_one_wrote_and_nothing_of_a_failed_one(
    database: Database,
) -> None:
    def count(db: sqlite3.Connection) -> int:
        return db.execute("SELECT COUNT(*) FROM facts").fetchone()[0]

    assert (await gathered(database, fact("a"), count, bad("b", ValueError("no")), count))[
        1::2
    ] == [1, 1]


@pytest.mark.parametrize("word", ["BEGIN", "COMMIT"])
async def test_without_its_commit_nothing_of_a_group_happened(
    word: str, database: Database
) -> None:
    statements = Statements(database)
    statements.failing[word] = sqlite3.OperationalError("disk I/O error")
    outcomes = await gathered(database, fact("a"), bad("b", ValueError("no")), fact("c"))
    assert [type(outcome) for outcome in outcomes] == [StoreError] * 3, (
        "nobody is told that it worked"
    )
    assert {str(outcome) for outcome in outcomes} == {
        f"{database.path}: disk I/O error. What was acknowledged before is safe.",
    }  # fmt: skip
    assert names(database.path) == []
    statements.failing.clear()
    assert await gathered(database, fact("a"), fact("c")) == ["a", "c"], "and it goes on"
    assert names(database.path) == ["a", "c"]


async def test_a_group_that_fails_does_not_take_the_next_one_with_it(database: Database) -> None:
    statements = Statements(database)
    statements.failing["COMMIT"] = sqlite3.OperationalError("disk I/O error")

    def heal(db: sqlite3.Connection) -> None:
        statements.failing.clear()

    works = [fact(f"{i:03d}") for i in range(GROUP)]
    outcomes = await gathered(database, *works, heal, fact("later"))
    assert {type(outcome) for outcome in outcomes[:GROUP]} == {StoreError}
    assert outcomes[GROUP:] == [None, "later"]
    assert names(database.path) == ["later"]


async def test_a_caller_that_gives_up_takes_nothing_back(database: Database) -> None:
    """The work of a cancelled caller is committed with its group, whether it had begun or not."""
    callers = [
        asyncio.create_task(database.transaction(work))
        for work in (fact("a"), fact("b"), bad("c", ValueError("no")), fact("d"))
    ]
    await asyncio.sleep(0)
    for caller in callers[1:3]:
        caller.cancel()
    outcomes = await asyncio.gather(*callers, return_exceptions=True)
    assert (outcomes[0], outcomes[3]) == ("a", "d")
    assert [type(outcome) for outcome in outcomes[1:3]] == [asyncio.CancelledError] * 2
    await database.transaction(fact("e"))
    assert names(database.path) == ["a", "b", "d", "e"]


async def test_closing_waits_for_the_works_that_wait(tmp_path: Path) -> None:
    database = await Database.open(tmp_path / "bank.sqlite")
    wanted = [f"{i:03d}" for i in range(GROUP + 5)]
    works = [asyncio.create_task(database.transaction(fact(name))) for name in wanted]
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await database.aclose()
        assert await asyncio.gather(*works) == wanted
    assert names(tmp_path / "bank.sqlite") == wanted


async def test_a_copy_holds_whole_groups(database: Database, tmp_path: Path) -> None:
    works = [fact(f"{i:03d}") for i in range(3 * GROUP)]
    await asyncio.gather(gathered(database, *works), database.backup(tmp_path / "copy.sqlite"))
    assert len(names(tmp_path / "copy.sqlite")) % GROUP == 0
    assert len(names(database.path)) == 3 * GROUP


# ── cancellation ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("turns", [0, 1, 2, 5, 20])
async def test_a_caller_that_is_cancelled_leaves_no_connection_behind(
    turns: int, database: Database, tmp_path: Path
) -> None:
    """This holds at every moment of cancellation.

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
def test_ctrl_c_while_it_connects_is_just_that(work: str, tmp_path: Path) -> None:
    """Ctrl-C during a blocking call cancels the next await."""
    code = f"""
import asyncio, os, signal, time
from pathlib import Path
from crl.manager.database import Database, copy_database
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


async def test_a_closed_bank_says_so_and_keeps_nobody_waiting(tmp_path):
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

"""Bank files with another name, left open, or with content that no crl wrote.

Each case gives one clear error.
"""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crl.cli.main import app
from crl.errors import ConfigError, StoreError
from crl.manager.inspection.reading import open_reader
from crl.manager.records import Stamp
from crl.manager.storage.database import check_bank
from crl.manager.storage.store import Store
from support.bank_commands import bank, copy_of, lines, open_bank
from support.managers import request, search

# ── other names ───────────────────────────────────────────────────────────────────────────────────


async def test_a_symlink_stands_for_its_target(tmp_path: Path) -> None:
    path, link = tmp_path / "bank.sqlite", tmp_path / "elsewhere" / "link.sqlite"
    link.parent.mkdir()
    link.symlink_to(path)
    manager = await open_bank(path)
    await manager.submit(request(note="west"))
    await manager.drain()
    with pytest.raises(
        StoreError, match=f"link.sqlite: process {os.getpid()} on .* is writing to the bank"
    ):
        await Store.open(link)
    assert bank("prune", link, "--max-entries", "1", "--yes").exit_code == 1
    with open_reader(link) as reader:
        assert [entry.text for entry in reader.entries()] == ["Go west.", "Mind the trap."], (
            "includes the write-ahead log"
        )
    copy = tmp_path / "copy.sqlite"
    await manager.start_from(link, copy)
    await manager.aclose()
    assert len(lines("export", copy)) == len(lines("export", link)) == 3
    store = await Store.open(link)
    with pytest.raises(StoreError, match="is writing to the bank"):
        await Store.open(path)
    await store.aclose()
    assert os.listdir(link.parent) == ["link.sqlite"]


async def test_a_bank_with_two_hard_links_is_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "bank.sqlite", tmp_path / "other.sqlite"
    await (await Store.open(path)).aclose()
    os.link(path, other)
    for name in (path, other):
        with pytest.raises(
            StoreError,
            match=(
                rf"{name.name}: the file has 2 hard links.*Copy the file and "
                r"use the copy\.$"
            ),
        ):
            await Store.open(name)
        with pytest.raises(ConfigError, match=r"the file has 2 hard links"), open_reader(name):
            pass
    other.unlink()
    await (await Store.open(path)).aclose()


# ── closing ───────────────────────────────────────────────────────────────────────────────────────


async def test_closing_twice_is_allowed(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "bank.sqlite")
    await store.aclose()
    await store.aclose()
    again = await Store.open(tmp_path / "bank.sqlite")
    await asyncio.gather(again.aclose(), again.aclose())
    assert os.listdir(tmp_path) == ["bank.sqlite"]


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancelled_close_completes(tmp_path: Path, turns: int) -> None:
    """Check that a cancelled `aclose` completes, even while it waits for a commit.

    Otherwise, the bank could not be opened again.
    """
    store = await Store.open(tmp_path / "bank.sqlite")
    submitting = [
        asyncio.create_task(store.submit(request(member=member), Stamp(0, 0)))
        for member in range(100)
    ]
    await asyncio.sleep(0)
    closing_it = asyncio.create_task(store.aclose())
    for _ in range(turns):
        await asyncio.sleep(0)
    closing_it.cancel()
    await asyncio.wait({closing_it})
    if turns:  # closing had begun
        assert await asyncio.gather(*submitting) == [True] * 100
    await store.aclose()
    assert os.listdir(tmp_path) == ["bank.sqlite"]


# ── content that no crl wrote ─────────────────────────────────────────────────────────────────────


def changed_copy(bank_run: Path, folder: Path, *statements: str) -> Path:
    """Return the path of a copy of the run's bank after these statements."""
    path = copy_of(bank_run, folder)
    with closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()
    return path


def train_from(path: Path, folder: Path) -> tuple[int, str]:
    """Return exit code and stderr of a run that starts from the bank."""
    sizes = (
        "rollout.groups=2",
        "rollout.group_size=4",
        "tasks.room.eval.seen=0",
        "tasks.room.eval.unseen=0",
        "tasks.room.eval.online_places=0",
    )
    sets = [
        word
        for setting in (*sizes, "eval.probe_every=0", f"bank.init={path}")
        for word in ("--set", setting)
    ]
    result = CliRunner().invoke(
        app,
        [
            "train",
            "--tasks",
            "room",
            "--run-dir",
            str(folder / "new"),
            "--steps",
            "1",
            "--plain",
            *sets,
        ],
    )
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(
        result.exception
    )
    return result.exit_code, result.stderr


DAMAGED = (
    "The file is damaged: restore a copy (first delete the -wal and -shm files next to it; "
    "they are not part of the copy) or choose another path."
)


@pytest.mark.parametrize("version", [0, -1])
async def test_an_invalid_schema_version_is_refused(
    bank_run: Path, tmp_path: Path, version: int
) -> None:
    path = changed_copy(bank_run, tmp_path, f"PRAGMA user_version = {version}")
    with pytest.raises(
        StoreError,
        match=(
            rf"copy.sqlite: the bank's schema version {version} is not valid\. "
            rf"{re.escape(DAMAGED)}$"
        ),
    ):
        await Store.open(path)
    result = bank("ls", path)
    reason = f"its schema version {version} is not valid, so the file is damaged"
    assert (result.exit_code, reason in result.stderr) == (2, True), result.output


def test_a_run_does_not_start_from_an_invalid_schema_version(
    bank_run: Path, tmp_path: Path
) -> None:
    code, stderr = train_from(changed_copy(bank_run, tmp_path, "PRAGMA user_version = 0"), tmp_path)
    assert (code, stderr.count("\n")) == (2, 1), stderr
    assert "its schema version 0 is not valid" in stderr


VECTORS = {
    "of another length": (
        "UPDATE entries SET vector = substr(vector, 1, 8) WHERE text = 'Go southwest.'"
    ),
    "of no whole number": "UPDATE entries SET vector = X'000000'",
    "that are text": "UPDATE entries SET vector = 'north'",
}


@pytest.mark.parametrize("statement", VECTORS.values(), ids=VECTORS)
def test_invalid_vectors_are_refused(bank_run: Path, tmp_path: Path, statement: str) -> None:
    path = changed_copy(bank_run, tmp_path, statement)
    code, stderr = train_from(path, tmp_path)
    assert (code, stderr.count("\n")) == (1, 1), stderr
    for error in (stderr, bank("search", path, "west").stderr):
        assert error.startswith("error: ")
        assert (
            "bank.sqlite: the bank has unreadable rows (" in error
            or "copy.sqlite: the bank has unreadable rows (" in error
        )
        assert DAMAGED in error


async def reopen_and_search(path: Path) -> None:
    manager = await open_bank(path)
    assert await manager.search([search("Go southwest.")]) != [None]
    await manager.aclose()


def test_vectors_of_another_dimension_are_computed_again(bank_run: Path, tmp_path: Path) -> None:
    """Check that vectors of another dimension are computed again.

    An embedder may have changed and still have the same name.
    """
    path = changed_copy(bank_run, tmp_path, "UPDATE entries SET vector = substr(vector, 1, 8)")
    assert (
        "the vectors of the bank cannot be compared with those of the search's embedder"
        in bank("search", path, "west").stderr
    )
    asyncio.run(reopen_and_search(path))
    assert bank("search", path, "west").exit_code == 0


@pytest.mark.parametrize(("table", "exit_code"), [("units", 1), ("entries", 2), ("log", 1)])
def test_a_missing_table_is_refused(
    bank_run: Path, tmp_path: Path, table: str, exit_code: int
) -> None:
    """Read only the entries in the checks before a run. The other tables are read at its start."""
    path = changed_copy(bank_run, tmp_path, f"DROP TABLE {table}")
    code, stderr = train_from(path, tmp_path)
    assert (code, stderr.count("\n")) == (exit_code, 1), stderr
    assert f"no such table: {table}" in stderr
    for error in (
        bank("stats", path).stderr,
        bank("prune", path, "--max-entries", "1", "--yes").stderr,
    ):
        assert f"no such table: {table}. {DAMAGED}" in error


def test_a_frozen_run_does_not_start_from_a_bank_without_its_tables(
    bank_run: Path, tmp_path: Path
) -> None:
    path = changed_copy(bank_run, tmp_path, "DROP TABLE entries")
    with pytest.raises(
        ConfigError, match=r"the file is damaged \(no such table: entries\)\. Choose\.$"
    ):
        check_bank(path, "bank.init", "Choose", require_entries=True)


async def test_malformed_rows_are_refused(bank_run: Path, tmp_path: Path) -> None:
    path = changed_copy(
        bank_run,
        tmp_path,
        "UPDATE requests SET payload = '[]' WHERE payload IS NOT NULL",
        "UPDATE generations SET logprobs = X'00'",
    )
    store = await Store.open(path)
    for reading_them in (store.lease(), store.generations(["run/0/0/0"])):
        with pytest.raises(
            StoreError,
            match=rf"copy.sqlite: the bank has unreadable rows \(.*\. {re.escape(DAMAGED)}$",
        ):
            await reading_them
    await store.aclose()

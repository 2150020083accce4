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
from banks import bank, copy_of, finished_run, lines, opened
from extractors import request, search
from typer.testing import CliRunner

from crl.cli.main import app
from crl.errors import ConfigError, StoreError
from crl.manager.database import check_bank
from crl.manager.reading import reading
from crl.manager.records import Stamp
from crl.manager.store import Store

# ── other names ───────────────────────────────────────────────────────────────────────────────────


async def test_a_symlink_is_the_bank_that_it_leads_to(tmp_path: Path) -> None:
    path, link = tmp_path / "bank.sqlite", tmp_path / "elsewhere" / "link.sqlite"
    link.parent.mkdir()
    link.symlink_to(path)
    made = await opened(path)
    await made.submit(request(note="west"))
    await made.drain()
    with pytest.raises(
        StoreError, match=f"link.sqlite: process {os.getpid()} on .* is writing to it"
    ):
        await Store.open(link)
    assert bank("prune", link, "--max-entries", "1", "--yes").exit_code == 1
    with reading(link) as reader:
        assert [entry.text for entry in reader.entries()] == ["Go west.", "Mind the trap."], (
            "what is in the log beside the file too"
        )
    copy = tmp_path / "copy.sqlite"
    await made.start_from(link, copy)
    await made.aclose()
    assert len(lines("export", copy)) == len(lines("export", link)) == 3
    store = await Store.open(link)
    with pytest.raises(StoreError, match="is writing to it"):
        await Store.open(path)
    await store.aclose()
    assert os.listdir(link.parent) == ["link.sqlite"]


async def test_a_bank_with_two_names_is_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "bank.sqlite", tmp_path / "other.sqlite"
    await (await Store.open(path)).aclose()
    os.link(path, other)
    for name in (path, other):
        with pytest.raises(
            StoreError,
            match=(
                rf"{name.name}: it has 2 names \(hard links\).*Copy the file, "
                r"and use the copy\.$"
            ),
        ):
            await Store.open(name)
        with pytest.raises(ConfigError, match=r"it has 2 names \(hard links\)"), reading(name):
            pass
    other.unlink()
    await (await Store.open(path)).aclose()


# ── closing ───────────────────────────────────────────────────────────────────────────────────────


async def test_closing_twice_is_closing(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "bank.sqlite")
    await store.aclose()
    await store.aclose()
    again = await Store.open(tmp_path / "bank.sqlite")
    await asyncio.gather(again.aclose(), again.aclose())
    assert os.listdir(tmp_path) == ["bank.sqlite"]


@pytest.mark.parametrize("turns", range(6))
async def test_a_closing_that_is_cancelled_closes(tmp_path: Path, turns: int) -> None:
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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run. No test changes it."""
    return finished_run(tmp_path_factory.mktemp("runs") / "mine")


def changed(run: Path, folder: Path, *statements: str) -> Path:
    """Return the path of a copy of the run's bank after these statements."""
    path = copy_of(run, folder)
    with closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()
    return path


def trained(path: Path, folder: Path) -> tuple[int, str]:
    """Return exit code and stderr of a run that starts from the bank."""
    sizes = (
        "rollout.groups=2",
        "rollout.group_size=4",
        "tasks.room.eval.known=0",
        "tasks.room.eval.new=0",
        "tasks.room.eval.online=0",
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
    "The file is damaged: restore a copy (and first remove the -wal and -shm files beside it, "
    "which are not the copy's) or choose "
    "another path."
)


@pytest.mark.parametrize("version", [0, -1])
async def test_a_version_that_no_crl_writes(run: Path, tmp_path: Path, version: int) -> None:
    path = changed(run, tmp_path, f"PRAGMA user_version = {version}")
    with pytest.raises(
        StoreError,
        match=(
            rf"copy.sqlite: the bank has schema version {version}, which no crl writes\. "
            rf"{re.escape(DAMAGED)}$"
        ),
    ):
        await Store.open(path)
    result = bank("ls", path)
    reason = f"its schema version {version} is one that no crl writes: the file is damaged"
    assert (result.exit_code, reason in result.stderr) == (2, True), result.output


def test_a_run_does_not_start_from_a_version_that_no_crl_writes(run: Path, tmp_path: Path) -> None:
    code, said = trained(changed(run, tmp_path, "PRAGMA user_version = 0"), tmp_path)
    assert (code, said.count("\n")) == (2, 1), said
    assert "its schema version 0 is one that no crl writes" in said


VECTORS = {
    "of another length": (
        "UPDATE entries SET vector = substr(vector, 1, 8) WHERE text = 'Go southwest.'"
    ),
    "of no whole number": "UPDATE entries SET vector = X'000000'",
    "that are text": "UPDATE entries SET vector = 'north'",
}


@pytest.mark.parametrize("statement", VECTORS.values(), ids=VECTORS)
def test_vectors_that_no_embedder_made(run: Path, tmp_path: Path, statement: str) -> None:
    path = changed(run, tmp_path, statement)
    code, said = trained(path, tmp_path)
    assert (code, said.count("\n")) == (1, 1), said
    for error in (said, bank("search", path, "west").stderr):
        assert error.startswith("error: ")
        assert (
            "bank.sqlite: it cannot be read (" in error
            or "copy.sqlite: it cannot be read (" in error
        )
        assert DAMAGED in error


async def reopened(path: Path) -> None:
    made = await opened(path)
    assert await made.search([search("Go southwest.")]) != [None]
    await made.aclose()


def test_vectors_of_another_dimension_are_made_again(run: Path, tmp_path: Path) -> None:
    """Check that vectors of another dimension are computed again.

    An embedder may have changed and still have the same name.
    """
    path = changed(run, tmp_path, "UPDATE entries SET vector = substr(vector, 1, 8)")
    assert (
        "the bank's vectors are not of the embedder that search has"
        in bank("search", path, "west").stderr
    )
    asyncio.run(reopened(path))
    assert bank("search", path, "west").exit_code == 0


@pytest.mark.parametrize("table", ["units", "entries", "log"])
def test_a_table_that_is_gone(run: Path, tmp_path: Path, table: str) -> None:
    path = changed(run, tmp_path, f"DROP TABLE {table}")
    code, said = trained(path, tmp_path)
    assert (code, said.count("\n")) == (1, 1), said
    for error in (
        said,
        bank("stats", path).stderr,
        bank("prune", path, "--max-entries", "1", "--yes").stderr,
    ):
        assert f"no such table: {table}. {DAMAGED}" in error


def test_a_frozen_run_does_not_start_from_a_bank_without_its_tables(
    run: Path, tmp_path: Path
) -> None:
    path = changed(run, tmp_path, "DROP TABLE entries")
    with pytest.raises(ConfigError, match=r"it is damaged \(no such table: entries\)\. Choose\.$"):
        check_bank(path, "bank.init", "Choose", guiding=True)


async def test_rows_that_no_crl_wrote(run: Path, tmp_path: Path) -> None:
    path = changed(
        run,
        tmp_path,
        "UPDATE requests SET payload = '[]' WHERE payload IS NOT NULL",
        "UPDATE generations SET logprobs = X'00'",
    )
    store = await Store.open(path)
    for reading_them in (store.lease(), store.generations(["run/0/0/0"])):
        with pytest.raises(
            StoreError, match=rf"copy.sqlite: it cannot be read \(.*\. {re.escape(DAMAGED)}$"
        ):
            await reading_them
    await store.aclose()

"""Errors that users see for a full disk, a read-only directory or a damaged file.

Each error is one line that says what to do. No data is lost. Full and read-only file systems are
real file systems, mounted in a separate namespace.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl.manager.storage.store import Store
from support.bank_commands import bank, error_line, uids
from support.paths import python_environment

CRL = [sys.executable, "-c", "from crl.cli.main import main; main()"]


@functools.cache
def can_mount() -> bool:
    unshare = shutil.which("unshare")
    return (
        unshare is not None
        and subprocess.run(
            [unshare, "-rm", "mount", "-t", "tmpfs", "x", "/mnt"], capture_output=True
        ).returncode
        == 0
    )


needs_mounts = pytest.mark.skipif(
    not can_mount(), reason="needs unshare, and to be allowed a mount namespace"
)


def run_in_mount(
    mount: str, folder: Path, command: Sequence[str | Path], then: str = "true"
) -> subprocess.CompletedProcess[str]:
    """Run the command in a namespace in which `mount` was executed first.

    `then` is a shell line that runs afterwards in the same namespace. `{}` stands for `folder` in
    both.
    """
    script = f'set -e; {mount}; code=0; "$@" || code=$?; {then}; exit $code'.replace(
        "{}", str(folder)
    )
    call = ["unshare", "-rm", "bash", "-c", script, "bash", *map(str, command)]
    return subprocess.run(
        call, env=python_environment(), capture_output=True, text=True, timeout=120, check=False
    )


FULL = "mount -t tmpfs -o size={size} crl {}"
READ_ONLY = "mount --bind {} {}; mount -o remount,bind,ro {}"

COMMANDS = """
import json, sys
from support.bank_commands import bank
results = [bank(*command) for command in json.loads(sys.argv[1])]
print(json.dumps([[result.exit_code, result.stdout, result.stderr] for result in results]))
"""


def bank_commands(
    mount: str, folder: Path, *wanted: Sequence[str | Path], then: str = "true"
) -> list[tuple[int, str, str]]:
    """Return exit code, stdout and stderr of each `crl bank` command."""
    listed = json.dumps([list(map(str, command)) for command in wanted])
    done = run_in_mount(mount, folder, [sys.executable, "-c", COMMANDS, listed], then=then)
    assert done.returncode == 0, done.stderr
    return [tuple(result) for result in json.loads(done.stdout)]


@pytest.fixture
def copy(bank_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bank_run, tmp_path / "copy"))


# ── a full disk ───────────────────────────────────────────────────────────────────────────────────

FILL_DISK = """
import asyncio, os, sys
from pathlib import Path
from support.managers import request
from crl.errors import StoreError
from crl.manager.records import Stamp
from crl.manager.storage.store import Store

async def main(path):
    store = await Store.open(path)
    for member in range(1000):
        try:
            await store.submit(request(member=member, note="x" * 2000), Stamp(0, 0))
        except StoreError as error:
            print(member, error, flush=True)
            break
    os._exit(0)  # killed, and nothing closed

asyncio.run(main(Path(sys.argv[1])))
"""


@needs_mounts
async def test_a_full_disk_loses_no_acknowledged_request(tmp_path: Path) -> None:
    (folder := tmp_path / "full").mkdir()
    (safe := tmp_path / "safe").mkdir()
    full = FULL.replace("{size}", "400k")
    done = run_in_mount(
        full,
        folder,
        [sys.executable, "-c", FILL_DISK, folder / "bank.sqlite"],
        then=f"cp {{}}/bank.sqlite* {safe}",
    )
    assert done.returncode == 0, done.stderr
    acknowledged, message = done.stdout.strip().split(" ", 1)
    assert message == (
        f"{folder}/bank.sqlite: database or disk is full. Free some disk space. "
        "All acknowledged changes are saved."
    )
    assert int(acknowledged) > 5
    store = await Store.open(safe / "bank.sqlite")
    assert [one.id for one in await store.lease()] == [
        f"run/0/0/{member}" for member in range(int(acknowledged))
    ]
    await store.aclose()


@needs_mounts
def test_an_import_to_a_full_disk_leaves_no_files(bank_run: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "full").mkdir()
    lessons = tmp_path / "lessons.jsonl"
    lessons.write_text(bank("export", bank_run).stdout, "utf-8")
    left = tmp_path / "left"
    full = FULL.replace("{size}", "100k")
    ((code, _, stderr),) = bank_commands(
        full, folder, ["import", folder / "new.sqlite", lessons], then=f"ls -A {{}} > {left}"
    )
    assert code == 1
    assert "database or disk is full. Free some disk space" in stderr
    assert stderr.count("\n") == 1
    assert left.read_text() == ""


@needs_mounts
def test_a_command_on_a_full_disk_changes_nothing(copy: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "full").mkdir()
    full = (
        f"{FULL.replace('{size}', '400k')}; cp {copy}/* {{}}; "
        f"cat /dev/zero > {{}}/filler 2> /dev/null || true"
    )
    changes = [["dead", folder, "--retry"], ["prune", folder, "--max-entries", "1", "--yes"]]
    for code, _, stderr in bank_commands(
        full, folder, *changes, then=f"rm {{}}/filler; cp {{}}/* {copy}"
    ):
        assert (code, stderr) == (
            1,
            f"error: {folder}/bank.sqlite: No space left on device. Free some disk space.\n",
        )
    assert len(uids(copy)) == 5
    assert bank("dead", copy).stdout.count("run/0/0/3") == 1
    assert sorted(path.name for path in copy.iterdir()) == ["bank.sqlite", "config.json"], (
        "SQLite's files were removed"
    )


# ── a read-only directory ─────────────────────────────────────────────────────────────────────────


@needs_mounts
def test_a_read_only_bank_can_be_read_but_not_changed(copy: Path) -> None:
    looking = [
        ["ls", copy],
        ["stats", copy],
        ["export", copy],
        ["show", copy, "0/0/0#0"],
        ["search", copy, "west"],
    ]
    changing = [["dead", copy, "--retry"], ["prune", copy, "--max-entries", "1", "--yes"]]
    (lessons := copy.parent / "lessons.jsonl").write_text(bank("export", copy).stdout, "utf-8")
    *found, retried, pruned, imported = bank_commands(
        READ_ONLY, copy, *looking, *changing, ["import", copy / "new.sqlite", lessons]
    )
    assert found == [(0, bank(*command).stdout, "") for command in looking]
    refusal = (
        f"error: {copy}/bank.sqlite: Read-only file system. "
        "Its directory must exist and be writable.\n"
    )
    assert retried == pruned == (1, "", refusal)
    assert imported[0] == 2
    assert (
        f"{copy}/new.sqlite': cannot be created (Read-only file system). Choose a directory"
        in imported[2]
    )
    assert len(list(copy.iterdir())) == 2


WRITE_AND_EXIT = """
import os, sqlite3, sys
db = sqlite3.connect(sys.argv[1])
db.execute("UPDATE entries SET text = 'Go north.' WHERE uid = 'run/0/0/0#0'")
db.commit()
os._exit(0)  # killed, and nothing closed
"""


@needs_mounts
def test_a_read_only_bank_of_a_killed_run(copy: Path) -> None:
    """Check commands on the bank of a killed run in a read-only directory.

    The last writes are in the bank's write-ahead log. A reader that cannot create SQLite's index of
    the log cannot read the log.
    """
    subprocess.run([sys.executable, "-c", WRITE_AND_EXIT, copy / "bank.sqlite"], check=True)
    looking = [["ls", copy], ["stats", copy], ["export", copy]]
    whole = bank_commands(READ_ONLY, copy, *looking)
    assert {code for code, *_ in whole} == {0}
    assert "Go north." in whole[0][1]
    (copy / "bank.sqlite-shm").unlink()
    stderr = (
        f"error: bank = '{copy}/bank.sqlite': the bank was not closed, so its last changes are "
        "only in bank.sqlite-wal; they can be read only if both files and their directory are "
        "writable. Copy both files to a writable directory and use the copy.\n"
    )
    assert bank_commands(READ_ONLY, copy, *looking) == [(2, "", stderr)] * 3
    assert "Go north." in bank("ls", copy).stdout


# ── banks of other users ──────────────────────────────────────────────────────────────────────────

AS_NOBODY = "if not os.geteuid(): os.setgroups([]), os.setgid(65534), os.setuid(65534)"
"""Code that gives up the rights of root.

It must run after all imports, because only root may be able to read the modules.
"""

READ_BANK = f"""
import json, os, sys
from pathlib import Path
from crl.config import load
from crl.errors import ConfigError
from crl.manager.inspection.reading import open_reader
{AS_NOBODY}
path = Path(sys.argv[1])
try:
    with open_reader(path) as bank:
        print(json.dumps([[entry.text for entry in bank.entries()],\
 sorted(os.listdir(path.parent))]))
except ConfigError as error:
    print(json.dumps(str(error)))
"""


def test_a_reader_without_write_permission_creates_no_files(bank_run: Path) -> None:
    """Check a reader that may write the bank's directory but not the bank.

    The reader could not remove files that it creates there, and the owner could not use them.
    """

    def looked() -> Any:
        return json.loads(
            subprocess.run(
                [sys.executable, "-c", READ_BANK, path],
                env=python_environment(),
                check=True,
                capture_output=True,
            ).stdout
        )

    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        path = Path(shutil.copy(bank_run / "bank.sqlite", folder))
        path.chmod(0o644)
        subprocess.run([sys.executable, "-c", WRITE_AND_EXIT, path], check=True)
        log, index = (path.with_name(f"bank.sqlite-{name}") for name in ("wal", "shm"))
        for file in (path, log, index):
            file.chmod(0o444)
        texts, files = looked()
        assert ("Go north." in texts, files) == (
            True,
            ["bank.sqlite", "bank.sqlite-shm", "bank.sqlite-wal"],
        )
        index.unlink()
        assert (
            "its last changes are only in bank.sqlite-wal; they can be read only if both files "
            "and their directory are writable"
        ) in looked()
        log.unlink()
        texts, files = looked()
        assert ("Go north." in texts, files) == (False, ["bank.sqlite"])
        assert os.listdir(folder) == ["bank.sqlite"]


RUN_COMMANDS = f"""
import json, os, sys
from support.bank_commands import bank, error_line
known, *paths = sys.argv[1:]
COMMANDS = [["ls"], ["stats"], ["export"], ["dead", "--retry"],\
 ["prune", "--max-entries", "9", "--yes"]]
for name, *options in COMMANDS:
    bank(name, known, *options), bank(name, "none", *options)
{AS_NOBODY}
print(json.dumps([[error_line(name, path, *options) for name, *options in COMMANDS]\
 for path in paths]))
"""


def test_unreadable_files_are_named_with_the_reason(copy: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        closed, locked, barred = (
            Path(place, "closed.sqlite"),
            Path(place, "locked"),
            Path(place, "barred"),
        )
        shutil.copy(copy / "bank.sqlite", closed)
        shutil.copytree(copy, locked)
        shutil.copytree(copy, barred)
        for path in (closed, locked, barred / "bank.sqlite"):
            path.chmod(0)
        wanted = {
            path: "Permission denied" for path in (closed, locked, locked / "bank.sqlite", barred)
        }
        wanted |= {
            closed.with_name("x" * 300): "File name too long",
            closed / "bank.sqlite": "Not a directory",
        }
        stderr = json.loads(
            subprocess.check_output(
                [sys.executable, "-c", RUN_COMMANDS, copy, *wanted], env=python_environment()
            )
        )
        locked.chmod(0o700)
    remedy = "Give a run directory or a bank.sqlite file of this version of crl."
    for (path, reason), errors in zip(wanted.items(), stderr, strict=True):
        file = path / "bank.sqlite" if path in (locked, barred) else path
        assert errors == [
            f"error: bank = '{file}': it cannot be read ({reason}). {remedy}\n"
        ] * len(errors)
    assert "'/dev/null': it is not a regular file" in error_line("ls", "/dev/null")
    (lessons := tmp_path / "lessons.jsonl").write_text(bank("export", copy).stdout, "utf-8")
    assert "cannot be created (File name too long)" in error_line(
        "import", tmp_path / ("x" * 300), lessons
    )


# ── a run ─────────────────────────────────────────────────────────────────────────────────────────


def train(
    mount: str, folder: Path, method: str, then: str = "true"
) -> subprocess.CompletedProcess[str]:
    """Run `crl train`. The run directory is `mine` in `folder`."""
    sizes = (
        "rollout.groups=2",
        "rollout.group_size=4",
        "tasks.room.eval.seen=1",
        "tasks.room.eval.unseen=1",
        "tasks.room.eval.online_places=0",
    )
    sets = [word for setting in (*sizes, "eval.probe_every=0") for word in ("--set", setting)]
    options = [
        "--tasks",
        "room",
        "--run-dir",
        folder / "mine",
        "--steps",
        "30",
        "--method",
        method,
        "--plain",
    ]
    return run_in_mount(mount, folder, [*CRL, "train", *options, *sets], then)


@needs_mounts
def test_no_run_starts_in_a_read_only_directory(tmp_path: Path) -> None:
    done = train(READ_ONLY, tmp_path, "complementary")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: run_dir = ")
    assert "Read-only file system" in done.stderr


DISK_ERRORS = {
    "bank": (
        "/mine/bank.sqlite: database or disk is full. Free some disk space. "
        "All acknowledged changes are saved."
    ),
    "others": (
        "/mine: No space left on device. Free some disk space. "
        "All existing checkpoints are complete."
    ),
}
"""Messages about a full disk, by the files for which there is no space."""


@needs_mounts
@pytest.mark.parametrize(
    ("method", "size", "files"),
    [("complementary", "500k", ("bank", "others")), ("grpo", "60k", ("others",))],
)
def test_a_run_that_fills_the_disk_ends_with_one_line(
    method: str, size: str, files: tuple[str, ...], tmp_path: Path
) -> None:
    """The bank or the episodes may be the first for which there is no space."""
    (folder := tmp_path / "full").mkdir()
    (safe := tmp_path / "safe").mkdir()
    done = train(
        FULL.replace("{size}", size),
        folder,
        method,
        then=f"cp {{}}/mine/bank.sqlite* {safe} 2> /dev/null || true",
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith(tuple(f"error: {folder}{DISK_ERRORS[name]}" for name in files))
    if method == "complementary":
        with closing(sqlite3.connect(safe / "bank.sqlite")) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            lost = "SELECT origin FROM log WHERE kind = 'submit' EXCEPT SELECT id FROM requests"
            assert db.execute(lost).fetchall() == []
            assert db.execute("SELECT COUNT(*) FROM requests").fetchone()[0] > 0


# ── a damaged file ────────────────────────────────────────────────────────────────────────────────

LOOKING = [
    ["ls", "--status", "all"],
    ["stats"],
    ["queue"],
    ["dead"],
    ["export"],
    ["show", "0/0/0#0"],
    ["search", "west"],
]
CHANGING = [["dead", "--retry"], ["prune", "--max-entries", "1", "--yes"]]


def damaged(whole: bytes, seed: int, cut: bool) -> bytes:
    """Return the file's content, cut off at a random place or partly overwritten.

    In the second case, 1 to 200 random bytes replace 200 bytes.
    """
    draw = random.Random(seed)
    place = draw.randrange(len(whole))
    return (
        whole[:place]
        if cut
        else whole[:place] + draw.randbytes(draw.randint(1, 200)) + whole[place + 200 :]
    )


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), cut=st.booleans(), command=st.sampled_from(LOOKING + CHANGING))
def test_a_damaged_bank_gives_one_error_line_or_a_result(
    bank_run: Path, seed: int, cut: bool, command: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bank.sqlite"
        path.write_bytes(damaged((bank_run / "bank.sqlite").read_bytes(), seed, cut))
        result = bank(command[0], path, *command[1:])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(
        result.exception
    )
    if result.exit_code:
        assert result.stderr.startswith("error: ")
        assert str(path) in result.stderr
        assert result.stderr.count("\n") == 1

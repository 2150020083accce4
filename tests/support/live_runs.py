"""Runs in processes of their own, and everything that such a run may leave behind.

A run gets a mark in its environment, which its child processes inherit. The processes of a run are
found by this mark, also after the run itself has ended.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from crl.scratch import SHARED_MEMORY
from support.paths import python_environment

MARK = "CRL_TEST_RUN"
"""Environment variable that marks the processes of a run."""

HANGING_CLOSE = """
import asyncio
from crl.envs.hosting.threads import ThreadHost
ThreadHost.aclose = lambda host: asyncio.sleep(600)
"""
"""Program for `start`: games in threads are never closed."""


def mark() -> str:
    return uuid.uuid4().hex


def start(
    arguments: Sequence[str], mark: str, temporary: Path, output: IO[str], *, python: str = ""
) -> subprocess.Popen[str]:
    """Start the command line `crl` with `arguments` in a new session.

    `python` is a program that runs first, for example to replace a function.
    """
    program = f"{python}\nfrom crl.cli.main import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=python_environment(
            TMPDIR=str(temporary), OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", **{MARK: mark}
        ),
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def processes(mark: str, words: str = "") -> dict[int, str]:
    """Return the command lines of all marked processes that contain `words`, by process id.

    Zombies are left out: they have ended.
    """
    found = {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if not folder.name.isdigit():
                continue
            if f"{MARK}={mark}".encode() not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            state = (folder / "stat").read_text("utf-8").rpartition(")")[2].split()[0]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if state not in "XZ" and words in command:
                found[int(folder.name)] = command
    return found


def wait_for(pattern: str, output: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the file `output` of a run contains `pattern`, a regular expression."""
    deadline = time.monotonic() + 180
    while not re.search(pattern, text := output.read_text("utf-8")):
        assert process.poll() is None, text
        assert time.monotonic() < deadline, text
        time.sleep(0.02)


def wait_for_end(mark: str, seconds: float) -> dict[int, str]:
    """Wait until no marked process is left. Return those that are left after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def kill_all(mark: str) -> None:
    """Kill the marked processes, so that a failed test leaves none behind."""
    for process in processes(mark):
        with suppress(ProcessLookupError):
            os.kill(process, 9)


def temporary_files(folder: Path) -> list[Path]:
    """Return the files and folders in a temporary folder, sockets included.

    The cache of torch's compiler is left out. All processes of a user share it.
    """
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


@contextmanager
def new_shared_memory() -> Iterator[list[str]]:
    """Yield a list. On exit it has the names of new entries in shared memory that nobody uses.

    An entry that a running process maps is in use, and so is a scratch folder whose lock is held.
    Both may belong to other tests, for example to their multiprocessing pools.
    """
    before = set(os.listdir(SHARED_MEMORY))
    left: list[str] = []
    yield left
    new = set(os.listdir(SHARED_MEMORY)) - before
    mapped = _mapped_inodes() if new else set()
    for name in new:
        with suppress(FileNotFoundError):
            if (SHARED_MEMORY / name).stat().st_ino not in mapped and not _is_locked(name):
                left.append(name)


def _mapped_inodes() -> set[int]:
    """Return the inodes of all files in shared memory that a process maps.

    A semaphore is created under another name, which its memory map keeps.
    """
    inodes = set()
    for file in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            for line in file.read_text("utf-8", "replace").splitlines():
                _, _, _, _, inode, *path = line.split(maxsplit=5)
                if path and path[0].startswith(f"{SHARED_MEMORY}/"):
                    inodes.add(int(inode))
    return inodes


def _is_locked(name: str) -> bool:
    try:
        with (SHARED_MEMORY / name / "lock").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False

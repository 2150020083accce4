"""Processes that engines and learners start, and their forced end.

A process finds its owner in its environment. vLLM's processes and ranks end when their owner is
gone, but only after their imports, which take up to a minute on a busy machine. An owner that exits
without closing its parts therefore kills them.
"""

from __future__ import annotations

import os
import signal
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

OWNER_VARIABLE = "CRL_OWNER"
"""Environment variable with the owner of a process; see `Owner`."""

ENGINE_VARIABLE = "CRL_ENGINE"
"""Environment variable with a random name of the vLLM engine that a process belongs to."""

_TRACKER = b"multiprocessing.resource_tracker"


class Owner(NamedTuple):
    """Process that started other processes."""

    process: int
    started: int | None
    """Its `start_time`."""
    temporary: Path
    """Its temporary folder."""

    @classmethod
    def current(cls) -> Owner:
        """Return this process."""
        return cls(os.getpid(), start_time(os.getpid()), Path(tempfile.gettempdir()))

    @classmethod
    def parse(cls, text: str) -> Owner:
        """Return the owner that a value of `OWNER_VARIABLE` names."""
        process, started, temporary = text.split(maxsplit=2)
        return cls(int(process), int(started), Path(temporary))

    def __str__(self) -> str:
        """Return the value of `OWNER_VARIABLE`."""
        return f"{self.process} {self.started} {self.temporary}"


def start_time(process: int) -> int | None:
    """Return the start time of a process in the kernel's clock ticks since boot.

    The start time distinguishes the process from a later process with the same id. Return None if
    the process is gone or a zombie.
    """
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "XZ" else int(fields[18])


def new_engine_name() -> str:
    """Return a value of `ENGINE_VARIABLE`."""
    return uuid.uuid4().hex


def kill_engine(name: str) -> None:
    """Send SIGKILL to all processes of an engine. vLLM leaves workers that have only just begun."""
    _kill_with(f"{ENGINE_VARIABLE}={name}")


def kill_owned(owner: Owner | None = None) -> None:
    """Send SIGKILL to all processes that `owner` owns, except this one. Default: this process."""
    _kill_with(f"{OWNER_VARIABLE}={owner or Owner.current()}")


def _kill_with(variable: str) -> None:
    """Kill the other processes that were started with a variable of the environment.

    Resource trackers are not killed: they remove shared memory when all other processes have ended,
    and then end too.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            variables = (folder / "environ").read_bytes().split(b"\0")
            is_tracker = _TRACKER in (folder / "cmdline").read_bytes()
            is_other = int(folder.name) != os.getpid()
            if os.fsencode(variable) in variables and is_other and not is_tracker:
                os.kill(int(folder.name), signal.SIGKILL)

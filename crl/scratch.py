"""Temporary folders per process for what must not outlive it, and the removal of those whose process is gone.

A process that is killed cannot tidy up: NetHack leaves 250 KB per game, a model's weights in shared memory are gigabytes of the machine's
memory. So everything of a process lies in folders that hold a file lock for as long as the process lives; whoever can take the lock of a
folder knows that it is stale.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import threading
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
"""Where a file is memory that processes share."""

_PREFIX = "crl-scratch-"
_LOCK_NAME = "lock"
_guard = threading.Lock()
_folders: dict[tuple[int, Path], Path] = {}
"""By process id, for a forked process has its own, and parent."""


def scratch_folder(parent: Path | None = None) -> Path:
    """This process's folder in `parent` (default: the system's temporary folder). Made on the first call, when stale ones there are
    swept; removed when the process exits."""
    parent = parent or Path(tempfile.gettempdir())
    with _guard:
        own = os.getpid(), parent
        if own not in _folders:
            parent.mkdir(parents=True, exist_ok=True)
            sweep_scratch(parent)
            _folders[own], descriptor = _make_locked(parent)
            atexit.register(_remove_own, os.getpid(), _folders[own], descriptor)
        return _folders[own]


def sweep_all() -> None:
    """`sweep_scratch` wherever folders are usually made."""
    for parent in (Path(tempfile.gettempdir()), SHARED_MEMORY):
        sweep_scratch(parent)


def sweep_scratch(parent: Path) -> int:
    """Removes the folders in `parent` whose process is gone; returns how many. Other users' and living ones stay."""
    removed = 0
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            removed += 1
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return removed


def _make_locked(parent: Path) -> tuple[Path, int]:
    """The folder, and the descriptor that holds its lock. It gets its name only once locked: a sweep never meets an unlocked living one."""
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
    descriptor = os.open(hidden / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return hidden.rename(parent / hidden.name.removeprefix(".")), descriptor


def _remove_own(process: int, folder: Path, descriptor: int) -> None:
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)

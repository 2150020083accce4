"""A temporary folder per process for what games leave behind, and the removal of those whose process is gone.

A game that is killed cannot tidy up (NetHack leaves 250 KB per instance). So everything of a process lies in one folder
that holds a file lock for as long as the process lives; whoever can take the lock of a folder knows that it is stale.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import threading
from pathlib import Path

_PREFIX = "crl-games-"
_LOCK_NAME = "lock"
_guard = threading.Lock()
_folder: tuple[int, Path, int] | None = None  # process id, folder, descriptor that holds its lock


def scratch_folder(parent: Path | None = None) -> Path:
    """This process's folder. Made on the first call, in `parent` (default: the system's temporary folder), where stale
    ones are swept first; removed when the process exits."""
    global _folder
    with _guard:
        if _folder is None or _folder[0] != os.getpid():
            parent = parent or Path(tempfile.gettempdir())
            parent.mkdir(parents=True, exist_ok=True)
            sweep_scratch(parent)
            _folder = (os.getpid(), *_make_locked(parent))
            atexit.register(_remove_own, *_folder)
        return _folder[1]


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
    """The folder gets its name only once it is locked: a sweep never meets an unlocked living one."""
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
    descriptor = os.open(hidden / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return hidden.rename(parent / hidden.name.removeprefix(".")), descriptor


def _remove_own(process: int, folder: Path, descriptor: int) -> None:
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)

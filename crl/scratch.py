"""Temporary folders of a process, and the removal of folders of killed processes.

A killed process cannot clean up. NetHack leaves 250 KB per game, and a model's weights in shared
memory use gigabytes of the machine's memory. Therefore all temporary files of a process are in
folders with a file lock, which the process holds while it lives. A folder whose lock another
process can acquire is stale.
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
"""Folder whose files are shared memory."""

_PREFIX = "crl-scratch-"
_LOCK_NAME = "lock"
_folders_lock = threading.Lock()
_folders: dict[tuple[int, Path], Path] = {}
"""Folders by process id and parent folder. A forked process gets its own folders."""


def scratch_folder(parent: Path | None = None) -> Path:
    """Return this process's folder in `parent`; the default is the system's temporary folder.

    The first call creates the folder and removes stale folders from `parent`. The folder is removed
    when the process exits.
    """
    parent = parent or Path(tempfile.gettempdir())
    with _folders_lock:
        key = os.getpid(), parent
        if key not in _folders:
            parent.mkdir(parents=True, exist_ok=True)
            remove_stale_folders(parent)
            _folders[key], descriptor = _create_locked(parent)
            atexit.register(_remove_own, os.getpid(), _folders[key], descriptor)
        return _folders[key]


def remove_own_folders() -> None:
    """Remove the folders of this process. Call this before an exit that skips exit handlers."""
    for process, parent in list(_folders):
        if process == os.getpid():
            shutil.rmtree(_folders[process, parent], ignore_errors=True)


def remove_all_stale_folders() -> None:
    """Remove stale folders from the system's temporary folder and from shared memory."""
    for parent in (Path(tempfile.gettempdir()), SHARED_MEMORY):
        remove_stale_folders(parent)


def remove_stale_folders(parent: Path) -> int:
    """Remove the folders in `parent` whose process is gone. Return the number of removed folders.

    Folders of running processes and of other users are not removed.
    """
    removed = 0
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR)
        except FileNotFoundError:
            # Its removal began, and a process that outlived the owner added files meanwhile.
            shutil.rmtree(folder, ignore_errors=True)
            continue
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


def _create_locked(parent: Path) -> tuple[Path, int]:
    """Create a locked folder. Return the folder and the descriptor that holds its lock.

    The folder gets its final name after it is locked. `remove_stale_folders` therefore never
    finds an unlocked folder of a running process.
    """
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
    descriptor = os.open(hidden / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return hidden.rename(parent / hidden.name.removeprefix(".")), descriptor


def _remove_own(process: int, folder: Path, descriptor: int) -> None:
    """Remove the folder at exit. Do nothing in a forked process, which does not own the folder."""
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)

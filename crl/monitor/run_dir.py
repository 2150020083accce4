"""Run directory: the paths of its files. A run never overwrites another run."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO

from crl.errors import ConfigError

LOCK_WAIT_S = 1.0
"""Seconds for which a run waits for its lock. `RunDir.is_locked` holds the lock for a moment."""


@dataclass(frozen=True)
class RunDir:
    """Paths in the run directory.

    `create` makes a new directory. `RunDir(path)` refers to an existing one.
    """

    path: Path

    @classmethod
    def create(cls, path: Path) -> RunDir:
        """Create the directory `path`.

        Raise `ConfigError` if a file or a non-empty directory exists there, or if the directory
        cannot be created.
        """
        require_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "run_dir",
                str(path),
                f"cannot be created ({error.strerror})",
                "Choose another --run-dir",
            ) from error
        return cls(path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run inside the context, so that no other process writes to its directory.

        The kernel releases the lock when the process ends, even after a crash. Raise `ConfigError`
        if another process holds the lock.
        """
        with (self.path / ".lock").open("a", encoding="utf-8") as file:
            deadline = time.monotonic() + LOCK_WAIT_S
            while not _locked(file, fcntl.LOCK_EX):
                if time.monotonic() >= deadline:
                    reason = "another process is training this run"
                    remedy = "Wait for its end, or interrupt it first"
                    raise ConfigError("run", str(self.path), reason, remedy)
                time.sleep(0.02)
            yield

    def is_locked(self) -> bool:
        """Return whether a process holds the lock of the run. Nothing is written."""
        try:
            with (self.path / ".lock").open("rb") as file:
                return not _locked(file, fcntl.LOCK_SH)
        except OSError:
            return False

    def open_log(self) -> TextIO:
        """Open log.txt to append text. Lone surrogates, which UTF-8 does not have, are escaped.

        All other characters are written as they are, so a terminal may interpret them.
        """
        return self.log.open("a", encoding="utf-8", errors="backslashreplace")

    def append_to_log(self, text: str) -> None:
        """Append lines to log.txt. Raise `OSError` if the file cannot be written."""
        with self.open_log() as stream:
            stream.write(text if text.endswith("\n") else text + "\n")

    def new_discarded(self) -> Path:
        """Return the path of a new directory for what a resumed run takes back."""
        numbers = [int(path.name) for path in self.discarded.glob("*") if path.name.isdigit()]
        return self.discarded / str(max(numbers, default=0) + 1)

    def clear(self) -> None:
        """Delete the contents of the directory, which can then be used by another run."""
        for item in self.path.iterdir():
            shutil.rmtree(item) if item.is_dir() else item.unlink()

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def episodes(self) -> Path:
        return self.path / "episodes"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def progress(self) -> Path:
        return self.path / "progress.json"

    @property
    def bank(self) -> Path:
        return self.path / "bank.sqlite"

    @property
    def discarded(self) -> Path:
        return self.path / "discarded"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """Return the directory of the checkpoint after `step` actor steps."""
        return self.checkpoints / str(step)


def _locked(file: IO[Any], mode: int) -> bool:
    """Lock an open file until it is closed. Return False if another process prevents this."""
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def require_free(path: Path) -> None:
    """Raise `ConfigError` if a run at `path` would overwrite something.

    An empty directory is free.
    """
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists():
        reason = "exists and is not empty" if path.is_dir() else "exists and is not a directory"
        raise ConfigError(
            "run_dir", str(path), reason, "Choose another directory, or remove this one first"
        )

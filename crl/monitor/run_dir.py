"""Run directory: the paths of its files. A run never overwrites another run."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from crl.errors import ConfigError


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
    def trajectories(self) -> Path:
        return self.path / "trajectories.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def bank(self) -> Path:
        return self.path / "bank.sqlite"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """Return the directory of the checkpoint after `step` actor steps."""
        return self.checkpoints / str(step)


def require_free(path: Path) -> None:
    """Raise `ConfigError` if a run at `path` would overwrite something.

    An empty directory is free.
    """
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists():
        reason = "exists and is not empty" if path.is_dir() else "exists and is not a directory"
        raise ConfigError(
            "run_dir", str(path), reason, "Choose another --run-dir, or remove it first"
        )

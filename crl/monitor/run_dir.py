"""The run directory: who lives where in it. A run never overwrites another one."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from crl.errors import ConfigError


@dataclass(frozen=True)
class RunDir:
    """Paths in RUN. `create` makes a new one; a bare `RunDir(path)` looks at one that is there."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> RunDir:
        """A new directory at `path`. Raises `ConfigError` when something is there already, or it cannot be made."""
        require_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "run_dir",
                str(path),
                f"cannot be made ({error.strerror})",
                "Choose another --run-dir",
            ) from error
        return cls(path)

    def clear(self) -> None:
        """Empties the directory, which is then free for another run."""
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
        return self.checkpoints / str(step)


def require_free(path: Path) -> None:
    """Raises `ConfigError` when a run at `path` would overwrite something: an empty directory is free."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists():
        what = "it exists and is not empty" if path.is_dir() else "it exists and is no directory"
        raise ConfigError(
            "run_dir", str(path), what, "Choose another --run-dir, or remove it first"
        )

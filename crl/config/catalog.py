"""Catalog of the installation: names of tasks, mixtures and presets.

The names are read from the file system, so nothing heavy is imported.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crl.config.layers import read_toml
from crl.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]


def tasks_dir() -> Path:
    """Return the folder of the bundled TOML files: `crl/_tasks` in a wheel, `tasks/` of the
    repository in a source checkout.
    """
    installed = PACKAGE / "_tasks"
    return installed if installed.is_dir() else PACKAGE.parent / "tasks"


def tasks() -> list[str]:
    """Return the names of the bundled tasks and mixtures."""
    return sorted(path.stem for path in tasks_dir().glob("*.toml"))


@dataclass(frozen=True)
class MixtureFile:
    """TOML file that lists several tasks instead of defining one.

    It contains `tasks = ["room", "webshop"]` and one table of changed settings for each task that
    needs one.
    """

    path: Path
    tasks: Sequence[str]
    changes: Mapping[str, Any]
    """Changed settings, by the stem of the task's file name."""

    def task_files(self) -> Iterator[tuple[Path, Mapping[str, Any]]]:
        """Yield the file and the changed settings of each task.

        Relative paths start at the mixture's folder.

        Raise `ConfigError` for a task that does not exist or that is a mixture itself.
        """
        for name in self.tasks:
            try:
                path = task_file(str(self.path.parent / name) if name.endswith(".toml") else name)
            except ConfigError as error:
                raise ConfigError(
                    "tasks",
                    name,
                    f"is listed in {self.path.name}, but {error.reason}",
                    error.remedy,
                ) from error
            if mixture(path):
                raise ConfigError(
                    "tasks",
                    name,
                    f"is listed in {self.path.name}, but is itself a mixture",
                    "List its tasks instead",
                )
            yield path, self.changes.get(path.stem, {})


def mixture(path: Path) -> MixtureFile | None:
    """Return the mixture in a file, or None if the file defines a single task.

    Raise `ConfigError` if the file cannot be read or its list or tables are invalid.
    """
    data = read_toml(path, "tasks")
    if "tasks" not in data:
        return None
    names = data.pop("tasks")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            "tasks",
            names,
            f"is not a list of tasks (from {path})",
            'Write for example tasks = ["room", "webshop"]',
        )
    for key, value in data.items():
        if key not in (Path(name).stem for name in names) or not isinstance(value, dict):
            reason = f"is not a table for one of the tasks in {path}"
            raise ConfigError(
                f"tasks.{key}", value, reason, f"Write [NAME] with one of: {', '.join(names)}"
            )
    return MixtureFile(path, names, data)


def presets() -> list[str]:
    """Return the names of the bundled presets."""
    return sorted(path.stem for path in (tasks_dir() / "presets").glob("*.toml"))


def task_file(name: str, key: str = "tasks") -> Path:
    """Return the file of a bundled task, or `name` itself if it is the path of a TOML file.

    Raise `ConfigError` under `key` if there is no such task or file.
    """
    return _find_file(key, "task", name, tasks_dir(), tasks())


def preset_file(name: str) -> Path:
    """Return the file of a bundled preset, or `name` itself if it is the path of a TOML file.

    Raise `ConfigError` if there is no such preset or file.
    """
    return _find_file("preset", "preset", name, tasks_dir() / "presets", presets())


def did_you_mean(word: str, known: Iterable[str], *, unlisted: Iterable[str] = ()) -> str:
    """Return a remedy for a misspelt word.

    It lists the most similar known word, if any, and all known words. Words in `unlisted` are only
    suggested if they are similar.
    """
    known = list(known)
    close = difflib.get_close_matches(word, [*known, *unlisted], n=1)
    listing = f"Available: {', '.join(known) or 'none'}"
    return f"Did you mean {close[0]}? {listing}" if close else listing


def _find_file(key: str, kind: str, name: str, folder: Path, known: list[str]) -> Path:
    """Return the file of a known name, or the path `name`.

    Raise `ConfigError` under `key` if there is none. `kind`: content of the file, for the error.
    """
    if name in known:
        return folder / f"{name}.toml"
    if not name.endswith(".toml"):
        raise ConfigError(
            key,
            name,
            f"is not a known {kind}",
            f"{did_you_mean(name, known)}; or give the path of a .toml file",
        )
    path = Path(os.path.expanduser(name))
    if not path.is_file():
        raise ConfigError(
            key,
            name,
            "there is no such file",
            f"Give an existing .toml file or one of: {', '.join(known)}",
        )
    return path

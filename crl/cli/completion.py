"""Shell completions: values of options and arguments that begin with the typed text.

`crl --install-completion` installs them. An empty list leaves the completion to the shell, which
completes paths. Modules that need more than typer are imported inside the functions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import typer

SAFE_PATH = re.compile(r"[\w.+/-]+")
"""Paths that are offered. The shell evaluates completions, so no other character may occur."""

RUN_FILES = ("config.json", "bank.sqlite")
"""Files of which every run has at least one."""


def choices(values: Iterable[str]) -> Callable[[str], list[str]]:
    """Return the completion of an option with fixed values."""

    def complete(incomplete: str) -> list[str]:
        return _starting(incomplete, values)

    return complete


def tasks(incomplete: str) -> list[str]:
    """Complete the last task of a list such as `room,web`."""
    from crl.config import catalog

    given, comma, last = incomplete.rpartition(",")
    names = (name for name in catalog.tasks() if name not in given.split(","))
    return [f"{given}{comma}{name}" for name in _starting(last, names)]


def task(incomplete: str) -> list[str]:
    """Complete the name of a bundled task or mixture."""
    from crl.config import catalog

    return _starting(incomplete, catalog.tasks())


def presets(incomplete: str) -> list[str]:
    """Complete the name of a bundled preset."""
    from crl.config import catalog

    return _starting(incomplete, catalog.presets())


def methods(incomplete: str) -> list[str]:
    """Complete the name of a bundled method."""
    from crl.config.method import BUNDLED_METHODS

    return _starting(incomplete, BUNDLED_METHODS)


def models(incomplete: str) -> list[str]:
    """Complete the name of a bundled or imported model."""
    from crl.config.models import bundled_models
    from crl.config.models.packaged import imported_models

    names = [*bundled_models(), *imported_models()]
    return _starting(incomplete, [name for name in names if SAFE_PATH.fullmatch(name)])


def packaged_models(incomplete: str) -> list[str]:
    """Complete the name of a model that `crl models get` downloads."""
    from crl.config.models.packaged import PACKAGED_MODELS

    return _starting(incomplete, PACKAGED_MODELS)


def keys(incomplete: str) -> list[str]:
    """Complete the key of a setting, with `tasks.NAME` for any task."""
    from crl.config.reference import settings

    return _starting(incomplete, (setting.key for setting in settings()))


def assignments(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the key of `KEY=VALUE`.

    Keys of tasks have the names in `--tasks`, or those of all bundled tasks.
    """
    from crl.config import catalog
    from crl.config.reference import TASK, settings

    given = [name for name in (ctx.params.get("tasks") or "").split(",") if name]
    names = [Path(name).stem for name in given] or catalog.tasks()
    found = []
    for setting in settings():
        of_task = setting.key.startswith(f"{TASK}.")
        rest = setting.key.removeprefix(TASK)
        found += [f"tasks.{name}{rest}" for name in names] if of_task else [setting.key]
    return [f"{key}=" for key in _starting(incomplete, found)]


def runs(incomplete: str) -> list[str]:
    """Complete the directory of a run: one in the folder `runs`, or one that begins as typed."""
    folder, _, begin = incomplete.rpartition("/")
    folders = {folder + "/" if "/" in incomplete else "": begin, "runs/": None}
    found = []
    for parent, start in folders.items():
        try:
            names = sorted(os.listdir(parent or "."))
        except OSError:  # it does not exist or cannot be read
            continue
        paths = [parent + name for name in names if start is None or name.startswith(start)]
        found += [path for path in paths if _is_run(path)]
    return _starting(incomplete, dict.fromkeys(found))


def folders_of_runs(incomplete: str) -> list[str]:
    """Complete the directory of a run, or a directory with runs."""
    found = runs(incomplete)
    parents = (path.rpartition("/")[0] for path in found)
    return [*dict.fromkeys(_starting(incomplete, filter(None, parents))), *found]


def _is_run(path: str) -> bool:
    """Return whether a path can be offered and is the directory of a run."""
    return bool(SAFE_PATH.fullmatch(path)) and any(
        os.path.isfile(os.path.join(path, name)) for name in RUN_FILES
    )


def _starting(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]

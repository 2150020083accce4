"""What this installation can play, for `crl tasks`. Imports no environment's library, and no torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crl.config import TaskConfig, catalog
from crl.config.load import task_settings
from crl.envs.registry import DATA, get_spec, require_extra
from crl.errors import ConfigError


@dataclass(frozen=True)
class TaskOffer:
    """A shipped task. turns: by rendering; problem: why it cannot be played; data: what it is played on, where there is official data."""

    name: str
    environment: str
    hosting: str
    turns: Mapping[str, int]
    problem: str | None
    data: str | None


def task_offers() -> list[TaskOffer]:
    return [_offer(name) for name in catalog.tasks() if not catalog.mixture(catalog.task_file(name))]


def mixtures() -> dict[str, Sequence[str]]:
    """The tasks of each shipped mixture."""
    found = {name: catalog.mixture(catalog.task_file(name)) for name in catalog.tasks()}
    return {name: mixed.tasks for name, mixed in found.items() if mixed}


def gem_problem() -> str | None:
    """Why `gem:ID` names no environment here; None where it does."""
    return None if importlib.util.find_spec("gem") else "it needs the extra 'gem', which is not installed. Run pip install 'crl[gem]'"


def _offer(name: str) -> TaskOffer:
    path = catalog.task_file(name)
    tasks = [TaskConfig.model_validate(task_settings(path, profile)) for profile in ("full", "compact")]
    spec, problem = get_spec(tasks[0].env), None
    try:
        require_extra(spec, name)
    except ConfigError as error:
        problem = f"{error.reason}. {error.remedy}"
    return TaskOffer(name, tasks[0].env, spec.hosting, {task.rendering: task.turns for task in tasks}, problem, _data(tasks[0].env))


def _data(environment: str) -> str | None:
    data = DATA.get(environment)
    if data is None:
        return None
    folder = os.environ.get(data.variable)
    if not folder:
        return f"{data.instead}; the official data is used when {data.variable} names its folder"
    return f"the official data in {folder}" if Path(folder).is_dir() else f"{data.variable} names {folder}, which is no folder"

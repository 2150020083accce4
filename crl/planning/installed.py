"""Tasks that this installation can play (`crl tasks`).

Imports neither torch nor any environment's library.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crl.config import TaskConfig, catalog
from crl.config.load import task_settings
from crl.envs.registry import get_spec, require_extra
from crl.errors import ConfigError


@dataclass(frozen=True)
class TaskInfo:
    """Task that is part of the package."""

    name: str
    environment: str
    hosting: str
    turns: Mapping[str, int]
    """Turn limit of an episode, by rendering."""
    problem: str | None
    """Reason why the task cannot be played; None if it can."""
    data: str | None
    """Description of the data in use, with a hint. None if the environment has no official data."""


def task_infos() -> list[TaskInfo]:
    return [
        _task_info(name) for name in catalog.tasks() if not catalog.mixture(catalog.task_file(name))
    ]


def mixtures() -> dict[str, Sequence[str]]:
    """Return the task names of each mixture of the package, by the mixture's name."""
    mixture_by_name = {name: catalog.mixture(catalog.task_file(name)) for name in catalog.tasks()}
    return {name: mixed.tasks for name, mixed in mixture_by_name.items() if mixed}


def gem_problem() -> str | None:
    """Return why environments named `gem:ID` are not available here; None if they are."""
    return (
        None
        if importlib.util.find_spec("gem")
        else "it needs the extra 'gem', which is not installed. Run pip install 'crl[gem]'"
    )


def _task_info(name: str) -> TaskInfo:
    path = catalog.task_file(name)
    tasks = [
        TaskConfig.model_validate(task_settings(path, profile)) for profile in ("full", "compact")
    ]
    spec, problem, data = get_spec(tasks[0].env), None, None
    try:
        require_extra(spec, name)
        data = spec.tasks.data() if spec.tasks.data else None
    except ConfigError as error:
        problem = f"{error.reason}. {error.remedy}" if error.key == name else str(error)
    data_text = "; ".join(filter(None, [data.description, data.hint])) if data else None
    return TaskInfo(
        name,
        tasks[0].env,
        spec.runtime.hosting,
        {task.rendering: task.max_turns for task in tasks},
        problem,
        data_text,
    )

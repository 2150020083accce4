"""Settings of the shipped tasks, read from their files."""

from __future__ import annotations

import tomllib
from pathlib import Path

from crl.envs.base import EnvSpec, Rendering
from crl.envs.registry import get_spec

TASKS = Path(__file__).resolve().parents[2] / "tasks"


def shipped_task(task: str, rendering: Rendering) -> tuple[EnvSpec, int]:
    """Return the environment and the number of turns in tasks/TASK.toml."""
    settings = tomllib.loads((TASKS / f"{task}.toml").read_text("utf-8"))
    settings |= settings["compact"] if rendering == "compact" else {}
    return get_spec(settings["env"]), settings["max_turns"]

"""Settings of the shipped tasks, read from their files, and scripted players."""

from __future__ import annotations

import random
import tomllib

from crl.envs.base import EnvSpec, Rendering
from crl.envs.curriculum import ScriptedPlayer
from crl.envs.registry import get_spec
from support.paths import ROOT

TASKS = ROOT / "tasks"


def shipped_task(task: str, rendering: Rendering) -> tuple[EnvSpec, int]:
    """Return the environment and the number of turns in tasks/TASK.toml."""
    settings = tomllib.loads((TASKS / f"{task}.toml").read_text("utf-8"))
    settings |= settings["compact"] if rendering == "compact" else {}
    return get_spec(settings["env"]), settings["max_turns"]


def scripted_player(spec: EnvSpec, rng: random.Random) -> ScriptedPlayer:
    """Return a new scripted player of an environment that has one."""
    make_player = spec.curriculum.scripted_player
    assert make_player is not None
    return make_player(rng)

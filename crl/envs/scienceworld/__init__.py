"""`scienceworld` and `scienceworld_small`: experiments of elementary science in text.

They play ScienceWorld (arXiv 2203.07540, the package scienceworld), with the tasks, splits and
simplifications of EMPO² (arXiv 2602.23008). The simulator runs in Java (see `engine`).

`scienceworld` plays the 18 tasks of EMPO²'s Table 1: the first 5 variations of each are for
training, and up to 20 others for evaluation. `scienceworld:TASK` plays one of them.

`scienceworld_small` is for tiny models: three of the tasks, with short texts and actions.

This module declares the environments without importing py4j or ScienceWorld. The module `engine`
imports them, in worker processes.
"""

from __future__ import annotations

import difflib
from dataclasses import replace

from crl.envs.base import ActionSpace, EnvSpec, Game, Rendering, Runtime
from crl.envs.curriculum import Curriculum
from crl.envs.registry import SCIENCEWORLD_PREFIX
from crl.envs.scienceworld.java import require_java
from crl.envs.scienceworld.lessons import ScienceAdvisor, digest
from crl.envs.scienceworld.player import GoldPlayer, SmallPlayer
from crl.envs.scienceworld.tasks import (
    NAME,
    SMALL,
    SMALL_TASKS,
    TASKS,
    probe_tasks,
    task_names,
    tasks_of,
)
from crl.errors import ConfigError

ACTIONS = (
    "look around, look at A, look in A, inventory, task, teleport to X, go X, focus on A, "
    "pick up A, put down A, move A to B, pour A in B, dunk A in B, mix A, open A, close A, "
    "activate A, deactivate A, connect A to B, disconnect A, use A on B, read A, eat A, flush A, "
    "wait (10 moves), wait1 (1 move), and the number of a choice that you are asked for (X a "
    "location, A and B things as they are called)"
)


def make_game(rendering: Rendering) -> Game:
    from crl.envs.scienceworld.game import ScienceWorldGame

    return ScienceWorldGame(rendering)


def single_task_spec(task: str, key: str) -> EnvSpec:
    """Return the spec of `scienceworld:TASK`. Raise `ConfigError` if there is no such task."""
    name = f"{SCIENCEWORLD_PREFIX}{task}"
    if task not in task_names():
        close = difflib.get_close_matches(task, task_names(), n=1)
        remedy = f"Did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            key,
            name,
            "is not one of the tasks of ScienceWorld that can be played",
            f"{remedy}The tasks are: {', '.join(task_names())}",
        )
    return replace(SPEC, name=name, tasks=tasks_of((task,), name))


SPEC = EnvSpec(
    name=NAME,
    make_game=make_game,
    tasks=TASKS,
    actions=ActionSpace(description=ACTIONS, example="move metal pot to stove"),
    turns=30,
    runtime=Runtime("processes", extra="scienceworld", require_program=require_java),
    curriculum=Curriculum(GoldPlayer, small=SMALL),
)
SMALL_SPEC = replace(
    SPEC,
    name=SMALL,
    tasks=SMALL_TASKS,
    turns=10,
    curriculum=Curriculum(SmallPlayer, digest, ScienceAdvisor(), probe_tasks),
)

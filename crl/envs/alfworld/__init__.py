"""`alfworld` and `alfworld_small`: household chores in text.

They are ALFWorld on TextWorld's engine, with ALFRED's domain.

`alfworld` follows the paper: 1,466 games for training, and 134 games in floor plans that are not
trained on. The games are played in shuffled rounds, without named places that persist. If the user
has ALFWorld's own games, these are played, otherwise games generated from ALFRED's floor plans (see
`games`).

`alfworld_small` is for tiny models: houses of six receptacles. Each house has a name and persists
over visits, like the places of the MiniHack environments (see `small`).

This module declares the environments without importing TextWorld or ALFWorld. The module `game`
imports them, in worker processes.
"""

from __future__ import annotations

from dataclasses import replace

from crl.envs.alfworld.lessons import HouseAdvisor, digest
from crl.envs.alfworld.player import AlfworldPlayer
from crl.envs.alfworld.tasks import NAME, SMALL, SMALL_TASKS, TASKS, probe_tasks
from crl.envs.base import ActionSpace, EnvSpec, Game, Rendering, Runtime
from crl.envs.curriculum import Curriculum

COMMANDS = (
    "go to X, open X, close X, take A from X, move A to X, clean A with X, heat A with X, "
    "cool A with X, use A, examine X, look, inventory"
)


def make_game(rendering: Rendering) -> Game:
    from crl.envs.alfworld.game import AlfworldGame

    return AlfworldGame(rendering)


SPEC = EnvSpec(
    name=NAME,
    make_game=make_game,
    tasks=TASKS,
    actions=ActionSpace(
        description=f"{COMMANDS} (X a receptacle and A a thing as they are called)",
        example="take mug 1 from shelf 2",
    ),
    turns=40,
    reward_range=(-1.0, 1.0),
    # most of a reset is the planner's translation of the game, which workers remember
    runtime=Runtime("processes", affinity=True, extra="alfworld"),
    curriculum=Curriculum(AlfworldPlayer, small=SMALL),
)
SMALL_SPEC = replace(
    SPEC,
    name=SMALL,
    tasks=SMALL_TASKS,
    turns=30,
    curriculum=Curriculum(AlfworldPlayer, digest, HouseAdvisor(), probe_tasks),
)

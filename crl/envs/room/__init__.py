"""`room`: find the stairs down in a dark 5×5 room with a monster and a trap.

The level is MiniHack-Room-Ultimate-5x5. This module declares the environment without importing
NetHack. The module `game` imports NetHack when the first game is created.

With the paper's limit of 30 turns, knowledge of a layout has no value here. With 4 turns it has
much value. The rooms of the train stream persist over visits, so that their layouts can be learnt.
"""

from __future__ import annotations

from crl.envs.actions import COMPASS
from crl.envs.base import ActionSpace, EnvSpec, Game, Rendering
from crl.envs.curriculum import Curriculum
from crl.envs.places import Places
from crl.envs.room.lessons import RoomAdvisor, digest
from crl.envs.room.player import RoomPlayer

NAME = "room"
GOAL = "Room: the {place}. Reach the stairs down (>)."
ACTIONS = tuple(COMPASS)
PLACES = Places(NAME, GOAL)
demonstration_tasks, probe_tasks = PLACES.demonstration_tasks, PLACES.probe_tasks


def make_game(rendering: Rendering) -> Game:
    from crl.envs.room.game import RoomGame

    return RoomGame(rendering)


SPEC = EnvSpec(
    name=NAME,
    make_game=make_game,
    tasks=PLACES.tasks,
    actions=ActionSpace(
        ACTIONS, f"{', '.join(ACTIONS)} (one step that way, or an attack on what stands there)"
    ),
    turns=30,
    curriculum=Curriculum(RoomPlayer, digest, RoomAdvisor(), probe_tasks),
)

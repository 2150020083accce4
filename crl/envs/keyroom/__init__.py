"""`keyroom`: take the key, unlock the door of the closet, and reach the stairs down in it.

The level is a dark 5×5 room (MiniHack-KeyRoom-Dark-S5). This module declares the environment
without importing NetHack. The module `game` imports NetHack when the first game is created.

The rooms of the train stream persist over visits, so that the cells of the key and the door can be
learnt.
"""

from __future__ import annotations

from crl.envs.actions import COMPASS
from crl.envs.base import ActionSpace, EnvSpec, Game, Rendering
from crl.envs.curriculum import Curriculum
from crl.envs.keyroom.lessons import KeyRoomAdvisor, digest
from crl.envs.keyroom.player import KeyRoomPlayer
from crl.envs.places import Places

NAME = "keyroom"
ACTIONS = (*COMPASS, "pickup", "apply")
PLACES = Places(
    NAME, "Key room: the {place}. Take the key, unlock the door, reach the stairs down (>)."
)


def make_game(rendering: Rendering) -> Game:
    from crl.envs.keyroom.game import KeyRoomGame

    return KeyRoomGame(rendering)


SPEC = EnvSpec(
    name=NAME,
    make_game=make_game,
    tasks=PLACES.tasks,
    actions=ActionSpace(
        ACTIONS,
        f"{', '.join(COMPASS)} (one step that way), pickup (what lies here), "
        "apply (the key, to a door next to you)",
    ),
    turns=30,
    curriculum=Curriculum(KeyRoomPlayer, digest, KeyRoomAdvisor(), PLACES.probe_tasks),
)

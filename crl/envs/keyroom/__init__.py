"""`keyroom`: take the key, unlock the door of the closet, and reach the stairs down in it.

The level is a dark 5×5 room (MiniHack-KeyRoom-Dark-S5). This module declares the environment
without importing NetHack. The module `game` imports NetHack when the first game is created.

The rooms of the train stream persist over visits, so that the cells of the key and the door can be
learnt.
"""

from __future__ import annotations

from crl.envs.actions import COMPASS
from crl.envs.base import EnvSpec, Game, Rendering
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
    hosting="threads",
    turns=30,
    reward_range=(0.0, 1.0),
    actions=ACTIONS,
    action_format=f"{', '.join(COMPASS)} (one step that way), pickup (what lies here), "
    "apply (the key, to a door next to you)",
    query_with_observation=False,
    make_game=make_game,
    task_source=PLACES.stream,
    eval_tasks=PLACES.eval_tasks,
    scripted_player=KeyRoomPlayer,
    revisit=PLACES.revisit,
    digest=digest,
    advisor=KeyRoomAdvisor(),
    probe_tasks=PLACES.probe_tasks,
)

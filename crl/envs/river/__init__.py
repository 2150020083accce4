"""`river` and `river_small`: push a boulder into the water and cross to the stairs down.

`river` is MiniHack-River-Narrow. `river_small` has a narrower near bank. This module declares the
environment without importing NetHack. The module `game` imports NetHack when the first game is
created.

The banks of the train stream persist over visits, so that the best boulder can be learnt.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from crl.envs.actions import COMPASS, moves
from crl.envs.base import ActionSpace, EnvSpec, Game, Rendering
from crl.envs.curriculum import Curriculum
from crl.envs.places import Places
from crl.envs.river.layout import BANK, SMALL_BANK
from crl.envs.river.player import RiverPlayer

NAME, SMALL = "river", "river_small"
ACTIONS = tuple(COMPASS)
PLACES = Places(NAME, "River: the {place}. Reach the stairs down (>) across the water.")
SMALL_PLACES = replace(PLACES, env=SMALL)


def make_game(rendering: Rendering, bank: int = BANK) -> Game:
    from crl.envs.river.game import RiverGame

    return RiverGame(rendering, bank)


SPEC = EnvSpec(
    name=NAME,
    make_game=make_game,
    tasks=PLACES.tasks,
    actions=ActionSpace(
        ACTIONS, f"{', '.join(ACTIONS)} (one step that way; it pushes a boulder that lies there)"
    ),
    turns=40,  # 30 are too few: one boulder in ten sinks without filling the water
    curriculum=Curriculum(RiverPlayer, partial(moves, actions=ACTIONS)),
)
SMALL_SPEC = replace(
    SPEC,
    name=SMALL,
    make_game=partial(make_game, bank=SMALL_BANK),
    tasks=SMALL_PLACES.tasks,
    curriculum=replace(SPEC.curriculum, scripted_player=partial(RiverPlayer, bank=SMALL_BANK)),
)

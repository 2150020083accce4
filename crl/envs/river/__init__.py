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
from crl.envs.base import EnvSpec, Game, Rendering
from crl.envs.places import Places
from crl.envs.river.player import BANK, SMALL_BANK, RiverPlayer

NAME, SMALL = "river", "river_small"
ACTIONS = tuple(COMPASS)
PLACES = Places(NAME, "River: the {place}. Reach the stairs down (>) across the water.")
SMALL_PLACES = replace(PLACES, env=SMALL)


def make_game(rendering: Rendering, bank: int = BANK) -> Game:
    from crl.envs.river.game import RiverGame

    return RiverGame(rendering, bank)


SPEC = EnvSpec(
    name=NAME,
    hosting="threads",
    turns=40,  # 30 are too few: one boulder in ten sinks without filling the water
    reward_range=(0.0, 1.0),
    actions=ACTIONS,
    action_format=f"{', '.join(ACTIONS)} (one step that way; it pushes a boulder that lies there)",
    query_with_observation=False,
    make_game=make_game,
    task_source=PLACES.stream,
    eval_tasks=PLACES.eval_tasks,
    scripted_player=RiverPlayer,
    revisit=PLACES.revisit,
    digest=partial(moves, actions=ACTIONS),
)
SMALL_SPEC = replace(
    SPEC,
    name=SMALL,
    make_game=partial(make_game, bank=SMALL_BANK),
    task_source=SMALL_PLACES.stream,
    eval_tasks=SMALL_PLACES.eval_tasks,
    scripted_player=partial(RiverPlayer, bank=SMALL_BANK),
    revisit=SMALL_PLACES.revisit,
)

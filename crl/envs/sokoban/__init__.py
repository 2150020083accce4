"""`sokoban`: push two boxes onto two targets in a grid of 6×6 cells.

The puzzles of the train stream persist over visits, including the boxes, so that the pushes can be
learnt. Only the player's start cell varies between visits. It is one of the cells from which the
same pushes solve the puzzle.
"""

from __future__ import annotations

from functools import partial

from crl.envs.actions import moves
from crl.envs.base import EnvSpec
from crl.envs.places import Places
from crl.envs.sokoban.game import ACTIONS, SokobanGame
from crl.envs.sokoban.player import SokobanPlayer

NAME = "sokoban"
PLACES = Places(NAME, "Sokoban: the {place}. Push every box (A) onto a target (C).")

SPEC = EnvSpec(
    name=NAME,
    hosting="threads",
    turns=30,
    reward_range=(0.0, 1.0),
    actions=ACTIONS,
    action_format=f"{', '.join(ACTIONS)} (one step that way; it pushes a box that lies there, "
    "if the cell behind it is free)",
    query_with_observation=False,
    make_game=SokobanGame,
    task_source=PLACES.stream,
    eval_tasks=PLACES.eval_tasks,
    scripted_player=SokobanPlayer,
    revisit=PLACES.revisit,
    digest=partial(moves, actions=ACTIONS),
)

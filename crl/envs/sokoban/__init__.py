"""`sokoban`: push two boxes onto two targets in a grid of 6×6 cells.

The puzzles of the train stream persist over visits, including the boxes, so that the pushes can be
learnt. Only the player's start cell varies between visits. It is one of the cells from which the
same pushes solve the puzzle.
"""

from __future__ import annotations

from functools import partial

from crl.envs.actions import moves
from crl.envs.base import ActionSpace, EnvSpec
from crl.envs.curriculum import Curriculum
from crl.envs.places import Places
from crl.envs.sokoban.game import ACTIONS, SokobanGame
from crl.envs.sokoban.player import SokobanPlayer

NAME = "sokoban"
PLACES = Places(NAME, "Sokoban: the {place}. Push every box (A) onto a target (C).")

SPEC = EnvSpec(
    name=NAME,
    make_game=SokobanGame,
    tasks=PLACES.tasks,
    actions=ActionSpace(
        ACTIONS,
        f"{', '.join(ACTIONS)} (one step that way; it pushes a box that lies there, "
        "if the cell behind it is free)",
    ),
    turns=30,
    curriculum=Curriculum(SokobanPlayer, partial(moves, actions=ACTIONS)),
)

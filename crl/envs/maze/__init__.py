"""`maze` and `maze_small`: find the stairs down in a maze.

`maze` has 7×7 cells (MiniHack-MazeWalk-9x9). `maze_small` has 5×5 cells, and its stairs are not
close to the start. This module declares the environment without importing NetHack. The module
`game` imports NetHack when the first game is created.

The mazes of the train stream persist over visits, so that the way to the stairs can be learnt.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from crl.envs.actions import COMPASS
from crl.envs.base import ActionSpace, EnvSpec, Game, Rendering
from crl.envs.curriculum import Curriculum
from crl.envs.maze.layout import SMALL_SIZE
from crl.envs.maze.lessons import MazeAdvisor, digest
from crl.envs.maze.player import MazePlayer
from crl.envs.places import Places

NAME, SMALL = "maze", "maze_small"
ACTIONS = tuple(COMPASS)
PLACES = Places(NAME, "Maze: the {place}. Reach the stairs down (>).")
SMALL_PLACES = replace(PLACES, env=SMALL)


def make_game(rendering: Rendering) -> Game:
    from crl.envs.maze.game import MazeGame

    return MazeGame(rendering)


def make_small_game(rendering: Rendering) -> Game:
    from crl.envs.maze.game import MazeGame
    from crl.envs.maze.oracle import small_layout

    return MazeGame(rendering, SMALL_SIZE, small_layout)


SPEC = EnvSpec(
    name=NAME,
    make_game=make_game,
    tasks=PLACES.tasks,
    actions=ActionSpace(ACTIONS, f"{', '.join(ACTIONS)} (one step that way)"),
    turns=30,
    curriculum=Curriculum(MazePlayer, digest, MazeAdvisor(), PLACES.probe_tasks),
)
SMALL_SPEC = replace(
    SPEC,
    name=SMALL,
    make_game=make_small_game,
    tasks=SMALL_PLACES.tasks,
    curriculum=Curriculum(
        partial(MazePlayer, size=SMALL_SIZE),
        digest,
        MazeAdvisor(SMALL_SIZE),
        SMALL_PLACES.probe_tasks,
    ),
)

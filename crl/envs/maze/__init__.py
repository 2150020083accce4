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
from crl.envs.base import EnvSpec, Game, Rendering
from crl.envs.maze.lessons import MazeAdvisor, digest
from crl.envs.maze.player import SIZE, SMALL_SIZE, MazePlayer
from crl.envs.places import Places

NAME, SMALL = "maze", "maze_small"
ACTIONS = tuple(COMPASS)
PLACES = Places(NAME, "Maze: the {place}. Reach the stairs down (>).")
SMALL_PLACES = replace(PLACES, env=SMALL)


def make_game(rendering: Rendering, size: int = SIZE) -> Game:
    from crl.envs.maze.game import MazeGame

    return MazeGame(rendering, size)


SPEC = EnvSpec(
    name=NAME,
    hosting="threads",
    turns=30,
    reward_range=(0.0, 1.0),
    actions=ACTIONS,
    action_format=f"{', '.join(ACTIONS)} (one step that way)",
    query_with_observation=False,
    make_game=make_game,
    task_source=PLACES.stream,
    eval_tasks=PLACES.eval_tasks,
    scripted_player=MazePlayer,
    revisit=PLACES.revisit,
    digest=digest,
    advisor=MazeAdvisor(),
    probe_tasks=PLACES.probe_tasks,
)
SMALL_SPEC = replace(
    SPEC,
    name=SMALL,
    make_game=partial(make_game, size=SMALL_SIZE),
    task_source=SMALL_PLACES.stream,
    eval_tasks=SMALL_PLACES.eval_tasks,
    scripted_player=partial(MazePlayer, size=SMALL_SIZE),
    revisit=SMALL_PLACES.revisit,
    advisor=MazeAdvisor(SMALL_SIZE),
    probe_tasks=SMALL_PLACES.probe_tasks,
)

"""Ground truth about the layouts of the maze, and the choice of small layouts.

The small maze is for tiny models. Its layouts are those in which the scripted player finds the
stairs in time.
"""

from __future__ import annotations

import random
import threading
from functools import cache

from crl.envs.maze.game import maze_level
from crl.envs.maze.layout import SIZE, SMALL_SIZE
from crl.envs.maze.player import MazePlayer
from crl.envs.minihack import text
from crl.envs.minihack.level import Level
from crl.envs.minihack.player import Point, neighbour, neighbours, shortest_walk
from crl.envs.places import DEMONSTRATION_LAYOUTS

MIN_STAIRS_DISTANCE = 3
"""Minimum number of steps from the start to the stairs of a small maze.

Random play would reach stairs that are closer.
"""
MAX_SEARCH_STEPS, SEARCH_TRIALS = 14, 12
"""Steps in which a searching player finds the stairs of a small maze, and number of trials.

The player finds the stairs in all trials. `MAX_SEARCH_STEPS` is the turn limit of `maze_small` in
tasks/maze.toml.
"""

Maze = tuple[Point, frozenset[Point], Point]


@cache
def small_layout(lgen: int) -> int:
    """Return the first layout seed of `lgen` whose stairs are far enough and are found in time.

    Each `lgen` has its own sequence of layout seeds. Demonstrations may also show stairs that are
    found late.
    """
    layouts = (
        seed
        for seed in range(lgen, 1 << 62, 1 << 32)
        if len(_way(*_read_layout(seed, SMALL_SIZE))) >= MIN_STAIRS_DISTANCE
    )
    return next(
        seed
        for seed in layouts
        if lgen in DEMONSTRATION_LAYOUTS or _found_in_time(*_read_layout(seed, SMALL_SIZE))
    )


def _found_in_time(start: Point, corridors: frozenset[Point], stairs: Point) -> bool:
    return all(
        _finds_stairs(start, corridors, stairs, MazePlayer(random.Random(i), SMALL_SIZE))
        for i in range(SEARCH_TRIALS)
    )


def _finds_stairs(
    position: Point, corridors: frozenset[Point], stairs: Point, player: MazePlayer
) -> bool:
    """Return whether a new player reaches the stairs within `MAX_SEARCH_STEPS` steps.

    The player sees only the cells next to it.
    """
    for _ in range(MAX_SEARCH_STEPS):
        visible = corridors & {position, *neighbours(position)}
        player.record_view(position, visible, visible & {stairs})
        position = end if (end := neighbour(position, player.act())) in corridors else position
        if position == stairs:
            return True
    return False


def true_maze(lgen: int, size: int = SIZE) -> Maze:
    """Return a layout's start cell, its corridors, and its stairs down.

    They do not depend on the dynamics. Never used by rollouts.
    """
    return _read_layout(small_layout(lgen) if size == SMALL_SIZE else lgen, size)


def true_way(lgen: int, size: int = SIZE) -> list[str]:
    """Return the directions of a shortest walk from a layout's start to its stairs."""
    return _way(*true_maze(lgen, size))


def _way(start: Point, corridors: frozenset[Point], stairs: Point) -> list[str]:
    path = shortest_walk(
        start, lambda point: point == stairs, lambda _, end: end in corridors, random.Random(0)
    )
    if path is None:
        raise LookupError(f"there is no way from {start} to the stairs at {stairs}")
    return path


_level_lock = threading.Lock()


@cache
def _read_layout(layout: int, size: int) -> Maze:
    with _level_lock:
        view = _mapped_level(size).reset(layout, 0)
    corridors = frozenset(point for point, cell in text.cells(view) if cell.kind != "unseen")
    (stairs,) = (point for point, cell in text.cells(view) if cell.name == text.STAIRS)
    return view.position, corridors, stairs


@cache
def _mapped_level(size: int) -> Level:
    return maze_level(size, mapped=True)

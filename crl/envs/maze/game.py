"""Game of the maze."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from crl.envs.actions import COMPASS
from crl.envs.base import Rendering
from crl.envs.maze.layout import SIZE
from crl.envs.minihack import text
from crl.envs.minihack.game import LevelGame
from crl.envs.minihack.level import Level, Window
from crl.types import Task

# the maze's walls are solid stone, which NetHack shows in the same way as unseen cells
full = partial(text.full, unseen="solid stone or not seen yet")
compact = partial(text.compact, things={text.STAIRS: "stairs"})


class MazeGame(LevelGame):
    """Game of the maze. (0, 0) is the top left cell of its corridors.

    `size` is `SIZE` or `SMALL_SIZE` cells. `layout(lgen)` returns the layout seed of a task.
    """

    def __init__(
        self,
        rendering: Rendering,
        size: int = SIZE,
        layout: Callable[[int], int] = lambda lgen: lgen,
    ) -> None:
        super().__init__(
            maze_level(size), tuple(COMPASS), rendering, full if rendering == "full" else compact
        )
        self._layout = layout

    def reset(self, task: Task) -> str:
        lgen = self._layout(int(task.params["lgen"]))
        return super().reset(replace(task, params={**task.params, "lgen": lgen}))


def maze_level(size: int, *, mapped: bool = False) -> Level:
    """Return the level MiniHack-MazeWalk. `mapped` shows the whole map from the start.

    MiniHack's size includes the outer wall. NetHack places the maze in the middle of its map.
    """
    from minihack.envs.mazewalk import MiniHackMazeWalk

    window = Window(x=36, y=7 if size == SIZE else 9, width=size, height=size)
    return Level(MiniHackMazeWalk, window, w=size + 2, h=size + 2, premapped=mapped)

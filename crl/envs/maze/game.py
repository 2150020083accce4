"""The maze's game."""

from __future__ import annotations

import random
import threading
from functools import cache, partial

from crl.envs.actions import COMPASS
from crl.envs.base import Rendering
from crl.envs.minihack import text
from crl.envs.minihack.game import LevelGame
from crl.envs.minihack.level import Level, Window
from crl.envs.minihack.player import At, walk

LEVEL = "MiniHack-MazeWalk-9x9-v0"
WINDOW = Window(x=36, y=7, width=7, height=7)

# NetHack shows solid stone, which is what this maze's walls are, as it shows what was never seen
full = partial(text.full, unseen="solid stone or not seen yet")
compact = partial(text.compact, things={text.STAIRS: "stairs"})


class MazeGame(LevelGame):
    """The maze, (0, 0) the top left cell of its corridors."""

    def __init__(self, rendering: Rendering) -> None:
        super().__init__(Level(LEVEL, WINDOW), tuple(COMPASS), rendering, full if rendering == "full" else compact)


_peek_lock = threading.Lock()


@cache
def true_maze(lgen: int) -> tuple[At, frozenset[At], At]:
    """Where a layout's episodes start, its corridors, and its stairs down, whatever the dynamics. Never for rollouts."""
    with _peek_lock:
        view = _mapped_level().reset(lgen, 0)
    corridors = frozenset(at for at, cell in text.cells(view) if cell.kind != "unseen")
    (stairs,) = (at for at, cell in text.cells(view) if cell.name == text.STAIRS)
    return view.position, corridors, stairs


def true_way(lgen: int) -> list[str]:
    """The directions of a shortest walk from a layout's start to its stairs."""
    start, corridors, stairs = true_maze(lgen)
    path = walk(start, lambda at: at == stairs, lambda _, to: to in corridors, random.Random(0))
    if path is None:
        raise LookupError(f"no way leads to the stairs of layout {lgen}")
    return path


@cache
def _mapped_level() -> Level:
    return Level("MiniHack-MazeWalk-Mapped-9x9-v0", WINDOW)

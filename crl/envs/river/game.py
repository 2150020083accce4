"""The river's game."""

from __future__ import annotations

from crl.envs.actions import COMPASS
from crl.envs.base import Rendering
from crl.envs.minihack import text
from crl.envs.minihack.game import LevelGame
from crl.envs.minihack.level import Level, Window
from crl.envs.minihack.view import View

LEVEL = "MiniHack-River-Narrow-v0"
WINDOW = Window(x=26, y=7, width=25, height=7)
RIVER = (18, 19)
"""The columns of the water."""
BOULDERS = 3
"""How many boulders the compact rendering tells of, the nearest first."""


class RiverGame(LevelGame):
    """Both banks and the river between them, (0, 0) the top left cell."""

    def __init__(self, rendering: Rendering) -> None:
        super().__init__(Level(LEVEL, WINDOW), tuple(COMPASS), rendering, text.full if rendering == "full" else compact)


def compact(view: View) -> str:
    """Where you are (row and column from 1), and how far are: the water in your row, a ford, the nearest boulders, and the stairs.

    at 2 3 / water east 16 / boulder east 4 south 1
    """
    here = view.position
    lines = [f"at {here[1] + 1} {here[0] + 1}"]
    water = [x for x, cell in enumerate(view.cells[here[1]]) if cell.name == "water" and x > here[0]]
    lines += [f"water {text.way(here, (water[0], here[1]))}"] if water else []
    lines += [f"ford {text.way(here, at)}" for at, cell in text.cells(view) if at[0] in RIVER and cell.name == "floor"]
    boulders = sorted((at for at, cell in text.cells(view) if cell.name == "boulder"), key=lambda at: _steps(here, at))
    lines += [f"boulder {text.way(here, at)}" for at in boulders[:BOULDERS]]
    lines += [f"stairs {text.way(here, at)}" for at, cell in text.cells(view) if cell.name == text.STAIRS]
    return "\n".join(lines)


def _steps(start: tuple[int, int], end: tuple[int, int]) -> int:
    return max(abs(end[0] - start[0]), abs(end[1] - start[1]))

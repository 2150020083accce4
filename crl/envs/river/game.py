"""Game of the river."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from crl.envs.actions import COMPASS
from crl.envs.base import Rendering
from crl.envs.minihack import text
from crl.envs.minihack.game import LevelGame
from crl.envs.minihack.level import Level, Window
from crl.envs.minihack.view import View
from crl.envs.river.layout import BANK, FAR_SIDE

BOULDERS = 3
"""Maximum number of boulders in a compact text, nearest first.

Also the number of boulders in a small river.
"""


class RiverGame(LevelGame):
    """Game of the river: both banks and the river between them.

    (0, 0) is the top left cell. `bank` is `BANK` or `SMALL_BANK`.
    """

    def __init__(self, rendering: Rendering, bank: int = BANK) -> None:
        super().__init__(
            _level(bank),
            tuple(COMPASS),
            rendering,
            text.full if rendering == "full" else partial(compact, bank=bank),
        )


def _level(bank: int) -> Level:
    """Return MiniHack-River-Narrow, or a similar level with a narrower near bank."""
    window = Window(x=26 if bank == BANK else 32, y=7, width=bank + FAR_SIDE, height=7)
    return Level("MiniHack-River-Narrow-v0" if bank == BANK else _small_river(bank), window)


def _small_river(bank: int) -> Callable[..., Any]:
    from minihack import LevelGenerator, MiniHackNavigation

    level = LevelGenerator(map="\n" + f"{'.' * bank}WW{'.' * (FAR_SIDE - 2)}\n" * 7)
    level.set_start_rect((0, 0), (bank - 1, 6))
    level.set_area_variable("$boulder_area", type="fillrect", x1=1, y1=1, x2=bank - 1, y2=5)
    for _ in range(BOULDERS):
        level.add_object_area("$boulder_area", name="boulder", symbol="`")
    level.add_goal_pos((bank + FAR_SIDE - 1, 2))
    return partial(MiniHackNavigation, des_file=level.get_des())


def compact(view: View, bank: int = BANK) -> str:
    """Return the compact text of a view.

    The text gives the agent's cell (row and column from 1), and the distances to fords, to the
    nearest boulders and to the stairs. The columns of the river are always the same, so the text
    does not give them:

        at 2 3 / boulder east 4 south 1        (" / " is a line break)
    """
    position = view.position
    lines = [f"at {position[1] + 1} {position[0] + 1}"]
    river = (bank, bank + 1)
    lines += [
        f"ford {text.offset_text(position, point)}"
        for point, cell in text.cells(view)
        if point[0] in river and cell.name == "floor"
    ]
    boulders = sorted(
        (point for point, cell in text.cells(view) if cell.name == "boulder"),
        key=lambda point: _distance(position, point),
    )
    lines += [f"boulder {text.offset_text(position, point)}" for point in boulders[:BOULDERS]]
    lines += [
        f"stairs {text.offset_text(position, point)}"
        for point, cell in text.cells(view)
        if cell.name == text.STAIRS
    ]
    return "\n".join(lines)


def _distance(start: tuple[int, int], end: tuple[int, int]) -> int:
    return max(abs(end[0] - start[0]), abs(end[1] - start[1]))

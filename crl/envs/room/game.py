"""Game of the room."""

from __future__ import annotations

from crl.envs.actions import COMPASS
from crl.envs.base import Rendering
from crl.envs.minihack.game import LevelGame
from crl.envs.minihack.level import Level, Window
from crl.envs.minihack.text import full
from crl.envs.room.text import compact

LEVEL = "MiniHack-Room-Ultimate-5x5-v0"
WINDOW = Window(x=36, y=9, width=5, height=5)
ACTIONS = tuple(COMPASS)


class RoomGame(LevelGame):
    """Game of the room. (0, 0) is the room's top left cell."""

    def __init__(self, rendering: Rendering) -> None:
        super().__init__(
            Level(LEVEL, WINDOW), ACTIONS, rendering, full if rendering == "full" else compact
        )

"""Game of the key room."""

from __future__ import annotations

from dataclasses import replace

from crl.envs.actions import COMPASS
from crl.envs.base import Rendering
from crl.envs.keyroom import ACTIONS
from crl.envs.minihack import text
from crl.envs.minihack.game import LevelGame
from crl.envs.minihack.level import INVENTORY, OBSERVATIONS, Level, Turn, Window, minihack
from crl.envs.minihack.view import View

WINDOW = Window(x=36, y=8, width=7, height=7)
KEY = "key named The Master Key of Thievery"
_COMMANDS = dict(zip(ACTIONS, map(int, minihack.envs.keyroom.APPLY_ACTIONS), strict=True))
_KEYBOARD = tuple(range(128))
_MAX_PUSHES = 20
"""Maximum number of steps into an unlocked door.

The door sticks in three of ten attempts.
"""

_THINGS = {text.STAIRS: "stairs", KEY: "key", text.CLOSED_DOOR: "door", text.OPEN_DOOR: "entrance"}


class _KeyRoom(minihack.envs.keyroom.MiniHackKeyRoom5x5Dark):
    """MiniHack-KeyRoom-Dark-S5-v0, played with single key presses.

    MiniHack's own `step` answers NetHack's questions, and it waits for the door without a limit.
    """

    step = minihack.MiniHackNavigation.step


class KeyRoomGame(LevelGame):
    """Game of the key room. (0, 0) is the corner of its outer wall.

    `apply` has the same meaning as in MiniHack: it applies the key to the door next to the player,
    until the door opens.
    """

    def __init__(self, rendering: Rendering) -> None:
        level = Level(
            _KeyRoom,
            WINDOW,
            actions=_KEYBOARD,
            allow_all_yn_questions=True,
            observation_keys=(*OBSERVATIONS, *INVENTORY),
        )
        super().__init__(level, ACTIONS, rendering, text.full if rendering == "full" else compact)

    def _play(self, choice: str) -> Turn:
        if choice != "apply":
            return self.level.step(_COMMANDS[choice])
        key, door = _held_key(self.view), _adjacent_door(self.view)
        if key is None:
            return Turn(replace(self.view, message="You have no key."), success=False)
        if door is None:
            return Turn(
                replace(self.view, message="There is no closed door next to you."), success=False
            )
        for command in (_COMMANDS["apply"], ord(key), _COMMANDS[door]):
            self.level.step(command)
        turn = self.level.step(ord("y"))
        for _ in range(_MAX_PUSHES):
            if turn.view is None or _adjacent_door(turn.view) is None:
                break
            turn = self.level.step(_COMMANDS[door])
        return turn


def compact(view: View) -> str:
    """Return the text of `text.compact`, and whether the key lies here or is held.

    at 3 4 / open east west / door north 1 / key held        (" / " is a line break)
    """
    words = [text.compact(view, _THINGS)]
    words += ["key here"] if "see here a key" in view.message else []
    words += ["key held"] if _held_key(view) else []
    return "\n".join(words)


def _held_key(view: View) -> str | None:
    """Return the key's letter in the inventory, or None without a key."""
    return next((letter for letter, name in view.inventory.items() if "key" in name), None)


def _adjacent_door(view: View) -> str | None:
    """Return the direction of a closed door next to the player, or None if there is none."""
    x, y = view.position
    cells = {name: text.cell_at(view, (x + dx, y + dy)) for name, (dx, dy) in COMPASS.items()}
    return next(
        (name for name, cell in cells.items() if cell and cell.name == text.CLOSED_DOOR), None
    )

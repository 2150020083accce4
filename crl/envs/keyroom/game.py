"""The key room's game."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from functools import cache

from crl.envs.actions import COMPASS
from crl.envs.base import Rendering, play
from crl.envs.keyroom import ACTIONS
from crl.envs.keyroom.player import KeyRoomPlayer
from crl.envs.minihack import text
from crl.envs.minihack.game import LevelGame
from crl.envs.minihack.level import INVENTORY, OBSERVATIONS, Level, Turn, Window, minihack
from crl.envs.minihack.player import At
from crl.envs.minihack.view import View
from crl.types import Task

WINDOW = Window(x=36, y=8, width=7, height=7)
KEY = "key named The Master Key of Thievery"
_COMMANDS = dict(zip(ACTIONS, map(int, minihack.envs.keyroom.APPLY_ACTIONS), strict=True))
_KEYBOARD = tuple(range(128))
_PUSHES = 20
"""An unlocked door can stick, three times in ten; so often it is tried at the most."""

_THINGS = {text.STAIRS: "stairs", KEY: "key", text.CLOSED_DOOR: "door", text.OPEN_DOOR: "entrance"}


class _KeyRoom(minihack.envs.keyroom.MiniHackKeyRoom5x5Dark):
    """MiniHack-KeyRoom-Dark-S5-v0, played key by key: its own `step` answers NetHack's questions, and waits for the door without end."""

    step = minihack.MiniHackNavigation.step


class KeyRoomGame(LevelGame):
    """The key room, (0, 0) the corner of its outer wall. `apply` is MiniHack's: the key to the door next to the player, until it opens."""

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
        key, door = _held_key(self.view), _door_beside(self.view)
        if key is None:
            return Turn(replace(self.view, message="You have no key."), success=False)
        if door is None:
            return Turn(
                replace(self.view, message="There is no closed door next to you."), success=False
            )
        for pressed in (_COMMANDS["apply"], ord(key), _COMMANDS[door]):
            self.level.step(pressed)
        turn = self.level.step(ord("y"))
        for _ in range(_PUSHES):
            if turn.view is None or _door_beside(turn.view) is None:
                break
            turn = self.level.step(_COMMANDS[door])
        return turn


def compact(view: View) -> str:
    """What `text.compact` says, and whether the key lies here or is held.

    at 3 4 / open east west / door north 1 / key held
    """
    words = [text.compact(view, _THINGS)]
    words += ["key here"] if "see here a key" in view.message else []
    words += ["key held"] if _held_key(view) else []
    return "\n".join(words)


def _held_key(view: View) -> str | None:
    """The inventory's letter of the key."""
    return next((letter for letter, name in view.inventory.items() if "key" in name), None)


def _door_beside(view: View) -> str | None:
    """The direction of a closed door next to the player."""
    x, y = view.position
    cells = {name: text.cell_at(view, (x + dx, y + dy)) for name, (dx, dy) in COMPASS.items()}
    return next(
        (name for name, cell in cells.items() if cell and cell.name == text.CLOSED_DOOR), None
    )


_peek_lock = threading.Lock()


@cache
def true_places(lgen: int) -> tuple[At, At]:
    """Where the key and the door of a layout are, whatever the dynamics: played to find out, never for rollouts.

    Raises `LookupError` when they are not found.
    """
    player, task = (
        KeyRoomPlayer(random.Random(0)),
        Task("keyroom", 0, "train", "", {"lgen": lgen, "core": 0}),
    )
    with _peek_lock:
        play(_peek_game(), task, player, turns=60)
    if player.key is None or player.door is None:
        raise LookupError(f"the key or the door of layout {lgen} were never seen")
    return player.key, player.door


@cache
def _peek_game() -> KeyRoomGame:
    return KeyRoomGame("compact")

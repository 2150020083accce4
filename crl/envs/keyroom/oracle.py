"""Ground truth about the layouts of the key room, for diagnostics."""

from __future__ import annotations

import random
import threading
from functools import cache

from crl.envs.base import play_episode
from crl.envs.keyroom.game import KeyRoomGame
from crl.envs.keyroom.player import KeyRoomPlayer
from crl.envs.minihack.player import Point
from crl.types import Task

_level_lock = threading.Lock()


@cache
def true_cells(lgen: int) -> tuple[Point, Point]:
    """Return the cells of a layout's key and door, which do not depend on the dynamics.

    The function plays the game to find them. Never used by rollouts. Raise `LookupError` if they
    are not found.
    """
    player, task = (
        KeyRoomPlayer(random.Random(0)),
        Task("keyroom", 0, "train", "", {"lgen": lgen, "core": 0}),
    )
    with _level_lock:
        play_episode(_layout_game(), task, player, turns=60)
    if player.key is None or player.door is None:
        raise LookupError(f"the key or the door of layout {lgen} were not found")
    return player.key, player.door


@cache
def _layout_game() -> KeyRoomGame:
    return KeyRoomGame("compact")

"""Ground truth about the layouts of the room, for warm start and diagnostics."""

from __future__ import annotations

import random
import threading
from functools import cache

from crl.envs.actions import COMPASS
from crl.envs.minihack.level import Level
from crl.envs.minihack.text import STAIRS, cells
from crl.envs.minihack.view import View
from crl.envs.room.game import ACTIONS, WINDOW

_level_lock = threading.Lock()


@cache
def true_stairs(lgen: int) -> tuple[int, int]:
    """Return the cell of a layout's stairs down: (x, y) from the room's top left.

    Never used by rollouts. The cell is read from the same level with the light on. If a monster or
    an object hides the stairs, the function plays at random until the stairs are seen or reached.
    Raise `LookupError` if they are not found.
    """
    rng = random.Random(lgen)
    with _level_lock:
        level = _lit_level()
        for core in range(200):
            view: View | None = level.reset(lgen, core)
            for _ in range(30):
                seen = next((point for point, cell in cells(view) if cell.name == STAIRS), None)
                if seen:
                    return seen
                previous, action = view.position, rng.choice(ACTIONS)
                turn = level.step(ACTIONS.index(action))
                if turn.success:
                    dx, dy = COMPASS[action]
                    return (previous[0] + dx, previous[1] + dy)
                view = turn.view
                if view is None:
                    break
    raise LookupError(f"the stairs of layout {lgen} were not found")


@cache
def true_start(lgen: int) -> tuple[int, int]:
    """Return the start cell of a layout's episodes: (x, y) from the room's top left.

    The cell does not depend on the dynamics. Never used by rollouts.
    """
    with _level_lock:
        return _lit_level().reset(lgen, 0).position


@cache
def _lit_level() -> Level:
    from minihack.envs.room import MiniHackRoom

    return Level(MiniHackRoom, WINDOW, size=5, random=True, lit=True, n_monster=1, n_trap=1)

"""The room's game, and what only the warm start may know of it."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from functools import cache

from crl.envs.actions import COMPASS, parse_choice
from crl.envs.base import Rendering
from crl.envs.minihack import Level, View, Window
from crl.envs.room import text
from crl.types import StepResult, Task

LEVEL = "MiniHack-Room-Ultimate-5x5-v0"
WINDOW = Window(x=36, y=9, width=5, height=5)
ACTIONS = tuple(COMPASS)


class RoomGame:
    """A `Game`. Reward 1 and success on reaching the stairs; death ends it with 0.

    For demonstrations and scripted oracles only, never for rollouts: `view`, `position`, `start` and `grid` (what has
    been seen), with (x, y) from the room's top left and y growing to the south; `moves`, the actions that the game took.
    After the last step they are as before it.
    """

    def __init__(self, rendering: Rendering) -> None:
        self.level = Level(LEVEL, WINDOW)
        self.moves = 0
        self._rendering: Rendering = rendering
        self._render = text.full if rendering == "full" else text.compact
        self._view: View | None = None
        self._start = (0, 0)
        self._over = True

    def reset(self, task: Task) -> str:
        """Starts the episode of the task's `lgen` and `core`. Raises `KeyError` when its params lack them."""
        view = self.level.reset(int(task.params["lgen"]), int(task.params["core"]))
        self._view = replace(view, message="")  # NetHack's greeting says nothing about the room
        self._start, self.moves, self._over = view.position, 0, False
        return self._render(self._view)

    def step(self, action: str) -> StepResult:
        """Walks, or attacks what stands there. Raises `RuntimeError` outside an episode."""
        if self._over:
            raise RuntimeError("this episode is over: reset first")
        choice = parse_choice(action, ACTIONS)
        if choice is None:
            return StepResult(f"{text.INVALID[self._rendering]}\n{self._render(self.view)}", valid=False)
        turn = self.level.step(ACTIONS.index(choice))
        self.moves += 1
        if turn.view is not None:
            self._view = turn.view
            return StepResult(self._render(turn.view))
        self._over = True
        last_words = text.WON if turn.success else text.DIED
        return StepResult(last_words[self._rendering], reward=float(turn.success), done=True, success=turn.success)

    def close(self) -> None:
        self._over = True
        self.level.close()

    @property
    def view(self) -> View:
        if self._view is None:
            raise RuntimeError("no episode has begun: reset first")
        return self._view

    @property
    def position(self) -> tuple[int, int]:
        return self.view.position

    @property
    def start(self) -> tuple[int, int]:
        return self._start

    @property
    def grid(self) -> tuple[str, ...]:
        """Five rows of five symbols, top first; `~` where nothing has been seen."""
        return text.grid(self.view)


_peek_lock = threading.Lock()


@cache
def true_exit(lgen: int) -> tuple[int, int]:
    """Where the stairs down of a layout are: (x, y) from the room's top left. Never for rollouts.

    Read from the same level with the light on. Where a monster or an object hides the stairs, the game is played at random until it
    does not. Raises `LookupError` when that never happens.
    """
    rng = random.Random(lgen)
    with _peek_lock:
        level = _lit_level()
        for core in range(200):
            view: View | None = level.reset(lgen, core)
            for _ in range(30):
                for y, row in enumerate(view.cells):
                    for x, cell in enumerate(row):
                        if cell.name == text.STAIRS:
                            return (x, y)
                before, action = view.position, rng.choice(ACTIONS)
                turn = level.step(ACTIONS.index(action))
                if turn.success:
                    dx, dy = COMPASS[action]
                    return (before[0] + dx, before[1] + dy)
                view = turn.view
                if view is None:
                    break
    raise LookupError(f"the stairs of layout {lgen} were never seen")


@cache
def true_start(lgen: int) -> tuple[int, int]:
    """Where a layout's episodes start, whatever their dynamics: (x, y) from the room's top left. Never for rollouts."""
    with _peek_lock:
        return _lit_level().reset(lgen, 0).position


@cache
def _lit_level() -> Level:
    from minihack.envs.room import MiniHackRoom

    return Level(MiniHackRoom, WINDOW, size=5, random=True, lit=True, n_monster=1, n_trap=1)

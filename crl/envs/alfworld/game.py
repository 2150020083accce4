"""ALFWorld's game: a household chore in TextWorld's engine, played in text."""

from __future__ import annotations

from crl.envs.alfworld import text
from crl.envs.alfworld.engine import Engine
from crl.envs.alfworld.games import game_of, official_path
from crl.envs.base import Rendering
from crl.envs.host import describe
from crl.types import StepResult, Task

_LEFT_OUT = frozenset({"help"})
"""Says nothing about the game."""


class AlfworldGame:
    """A `Game`. An episode's rewards sum to +1 where the chore was done and to -1 where it was not (CRL C.1): the first step costs 1,
    being done pays 2. Not thread-safe (see `engine`).

    moves: commands that the game took.
    """

    def __init__(self, rendering: Rendering) -> None:
        self.moves = 0
        self._rendering: Rendering = rendering
        self._engine = Engine()
        self._owed = 0.0
        self._over = True

    def reset(self, task: Task) -> str:
        """Starts the game that the task's params name. Raises `KeyError` when they name none, `ValueError` for a file that holds none."""
        data, path = game_of(task), official_path(task)
        try:
            said = self._engine.start(data)
        except (
            Exception
        ) as error:  # whatever the parsers of TextWorld and of the planner make of it
            if path is None:
                raise
            raise ValueError(f"{path} is no game of ALFWorld's: {describe(error)}") from error
        self.moves, self._owed, self._over = 0, -1.0, False
        return self._told(said)

    def step(self, action: str) -> StepResult:
        """Does one command. Raises `RuntimeError` outside an episode."""
        if self._over:
            raise RuntimeError("this episode is over: reset first")
        cost, self._owed = self._owed, 0.0
        command = text.chosen(action, self.admissible)
        if command is None:
            return StepResult(self._told(text.INVALID[self._rendering]), reward=cost, valid=False)
        self.moves += 1
        said, won = self._engine.do(command)
        if won:
            self._over = True
            return StepResult(text.WON[self._rendering], reward=cost + 2.0, done=True, success=True)
        return StepResult(self._told(said), reward=cost)

    def close(self) -> None:
        self._over = True
        self._engine.close()

    @property
    def admissible(self) -> tuple[str, ...]:
        """The commands that the game takes now."""
        return tuple(command for command in self._engine.admissible if command not in _LEFT_OUT)

    def _told(self, said: str) -> str:
        return text.full(said, self.admissible) if self._rendering == "full" else text.compact(said)

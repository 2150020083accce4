"""Game of ALFWorld: a household chore in TextWorld's engine, played in text."""

from __future__ import annotations

from crl.envs.alfworld import text
from crl.envs.alfworld.engine import PddlEngine
from crl.envs.alfworld.games import game_of, official_path
from crl.envs.base import Rendering
from crl.envs.hosting.threads import describe_error
from crl.types import StepResult, Task

_HIDDEN_COMMANDS = frozenset({"help"})
"""Commands that are not offered, because their output is not about the game."""


class AlfworldGame:
    """`Game` of ALFWorld. Not thread-safe (see `engine`).

    The rewards of an episode sum to +1 if the chore was done, and to -1 otherwise (CRL C.1): the
    first step costs 1, and success gives 2. `moves` is the number of commands that the game has
    accepted.
    """

    def __init__(self, rendering: Rendering) -> None:
        self.moves = 0
        self._rendering: Rendering = rendering
        self._engine = PddlEngine()
        self._pending_reward = 0.0
        self._over = True

    def reset(self, task: Task) -> str:
        """Start the game that the task's params name.

        Raise `KeyError` if they name none, and `ValueError` if the file holds no valid game.
        """
        data, path = game_of(task), official_path(task)
        try:
            feedback = self._engine.start(data)
        except Exception as error:  # the parsers of TextWorld and the planner can raise anything
            if path is None:
                raise
            raise ValueError(
                f"{path} is not a valid ALFWorld game: {describe_error(error)}"
            ) from error
        self.moves, self._pending_reward, self._over = 0, -1.0, False
        return self._render(feedback)

    def step(self, action: str) -> StepResult:
        """Execute one command. Raise `RuntimeError` outside an episode."""
        if self._over:
            raise RuntimeError("the episode is over: call reset first")
        pending, self._pending_reward = self._pending_reward, 0.0
        command = text.chosen_command(action, self.admissible)
        if command is None:
            return StepResult(
                self._render(text.INVALID[self._rendering]), reward=pending, valid=False
            )
        self.moves += 1
        feedback, won = self._engine.execute(command)
        if won:
            self._over = True
            return StepResult(
                text.WON[self._rendering], reward=pending + 2.0, done=True, success=True
            )
        return StepResult(self._render(feedback), reward=pending)

    def close(self) -> None:
        self._over = True
        self._engine.close()

    @property
    def admissible(self) -> tuple[str, ...]:
        """Commands that the game accepts now."""
        return tuple(
            command for command in self._engine.admissible if command not in _HIDDEN_COMMANDS
        )

    def _render(self, feedback: str) -> str:
        return (
            text.full(feedback, self.admissible)
            if self._rendering == "full"
            else text.compact(feedback)
        )

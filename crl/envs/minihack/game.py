"""Game that all MiniHack environments share.

One action per turn, until the stairs down are reached or the player dies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from crl.envs.actions import parse_choice
from crl.envs.base import Rendering, invalid_action_text
from crl.envs.minihack import text
from crl.envs.minihack.level import Level, Turn
from crl.envs.minihack.view import View
from crl.types import StepResult, Task


class LevelGame:
    """`Game` of a level. Reaching the stairs gives reward 1 and success. Death gives reward 0.

    `actions` are the names of the actions, in the order of the level's actions. `render` turns a
    view into a text.

    The following attributes are for demonstrations and scripted oracles, never for rollouts:

    * `view`, `position`, `start` and `grid` (the seen part of the map), with (x, y) from the
      window's top left and y growing to the south. The last step of an episode does not update
      them.
    * `moves`, the number of actions that the game has accepted.
    """

    def __init__(
        self,
        level: Level,
        actions: Sequence[str],
        rendering: Rendering,
        render: Callable[[View], str],
    ) -> None:
        self.level = level
        self.moves = 0
        self._actions = tuple(actions)
        self._rendering: Rendering = rendering
        self._render = render
        self._view: View | None = None
        self._start = (0, 0)
        self._over = True

    def reset(self, task: Task) -> str:
        """Start the episode of the task's `lgen` and `core`.

        Raise `KeyError` if the task's params lack one of them.
        """
        view = self.level.reset(int(task.params["lgen"]), int(task.params["core"]))
        self._view = replace(view, message="")  # NetHack's greeting says nothing about the level
        self._start, self.moves, self._over = view.position, 0, False
        return self._render(self._view)

    def step(self, action: str) -> StepResult:
        """Play one of the actions. Raise `RuntimeError` outside an episode."""
        if self._over:
            raise RuntimeError("the episode is over: call reset first")
        choice = parse_choice(action, self._actions)
        if choice is None:
            return StepResult(
                f"{invalid_action_text(self._rendering, self._actions)}\n{self._render(self.view)}",
                valid=False,
            )
        turn = self._play(choice)
        self.moves += 1
        if turn.view is not None:
            self._view = turn.view
            return StepResult(self._render(turn.view))
        self._over = True
        end_texts = text.WON if turn.success else text.DIED
        return StepResult(
            end_texts[self._rendering], reward=float(turn.success), done=True, success=turn.success
        )

    def close(self) -> None:
        self._over = True
        self.level.close()

    @property
    def view(self) -> View:
        if self._view is None:
            raise RuntimeError("no episode has started: call reset first")
        return self._view

    @property
    def position(self) -> tuple[int, int]:
        return self.view.position

    @property
    def start(self) -> tuple[int, int]:
        return self._start

    @property
    def grid(self) -> tuple[str, ...]:
        """Rows of the map, top first. `~` marks cells that have not been seen."""
        return text.grid(self.view)

    def _play(self, choice: str) -> Turn:
        return self.level.step(self._actions.index(choice))

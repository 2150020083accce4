"""Game of Sokoban, played in text."""

from __future__ import annotations

import random

from crl.envs.actions import parse_choice
from crl.envs.base import Rendering, invalid_action_text
from crl.envs.sokoban.puzzle import SIZE, STEPS, Point, Position, Puzzle, move, puzzle
from crl.types import StepResult, Task

ACTIONS = tuple(STEPS)
LEGEND = {
    "@": "you",
    "A": "box",
    "C": "target",
    "*": "box on a target",
    "+": "you on a target",
    ".": "floor",
    "W": "wall",
}


class SokobanGame:
    """`Game` of Sokoban. Reward 1 and success when the puzzle is solved.

    The task's `lgen` fixes the grid and its boxes, and `core` fixes the player's start cell.
    `position` and `puzzle` are for scripted oracles, never for rollouts.
    """

    def __init__(self, rendering: Rendering) -> None:
        self._rendering: Rendering = rendering
        self._over = True
        self.puzzle: Puzzle
        self.position: Position

    def reset(self, task: Task) -> str:
        """Start the task's puzzle. Raise `KeyError` if its params lack `lgen` or `core`."""
        self.puzzle = puzzle(int(task.params["lgen"]))
        start = random.Random(int(task.params["core"])).choice(sorted(self.puzzle.moves))
        self.position, self._over = Position(start, self.puzzle.boxes), False
        return self._render()

    def step(self, action: str) -> StepResult:
        """Walk or push. Raise `RuntimeError` outside an episode."""
        if self._over:
            raise RuntimeError("the episode is over: call reset first")
        choice = parse_choice(action, ACTIONS)
        if choice is None:
            return StepResult(
                f"{invalid_action_text(self._rendering, ACTIONS)}\n{self._render()}", valid=False
            )
        self.position = move(self.puzzle.grid, self.position, choice)
        if self.position.boxes != self.puzzle.grid.targets:
            return StepResult(self._render())
        self._over = True
        words = "Every box is on a target." if self._rendering == "full" else "solved."
        return StepResult(words, reward=1.0, done=True, success=True)

    def close(self) -> None:
        self._over = True

    def _render(self) -> str:
        if self._rendering == "compact":  # without the outer wall, which is always the same
            return "\n".join(
                " ".join(self._symbol((x, y)) for x in range(1, SIZE - 1))
                for y in range(1, SIZE - 1)
            )
        rows = ["".join(self._symbol((x, y)) for x in range(SIZE)) for y in range(SIZE)]
        present = "".join(rows)
        legend = "; ".join(
            f"{symbol} {name}" for symbol, name in LEGEND.items() if symbol in present
        )
        return "\n".join(["Map:", *rows, f"Legend: {legend}"])

    def _symbol(self, point: Point) -> str:
        grid, target = self.puzzle.grid, point in self.puzzle.grid.targets
        if point == self.position.player:
            return "+" if target else "@"
        if point in self.position.boxes:
            return "*" if target else "A"
        if point in grid.floor:
            return "C" if target else "."
        return "W"

"""Scripted player of Sokoban. It reads only the texts, in either rendering."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from crl.envs.shortest_path import shortest_path
from crl.envs.sokoban.puzzle import SIZE, STEPS, Grid, Position, move

_SYMBOLS = r"[W.CA@*+]"
_FULL = re.compile(rf"^Map:\n((?:{_SYMBOLS}{{{SIZE}}}\n){{{SIZE}}})", re.MULTILINE)
_COMPACT = re.compile(rf"(?:^{_SYMBOLS}(?: {_SYMBOLS})+$\n?){{{SIZE - 2}}}", re.MULTILINE)


class SokobanPlayer:
    """Player that solves the puzzle in its first text, and then plays the solution."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._plan: list[str] = []

    def begin(self, goal: str, observation: str) -> None:
        grid, start = read_puzzle(observation)

        def moves(position: Position) -> Iterator[tuple[str, Position]]:
            return ((name, move(grid, position, name)) for name in STEPS)

        self._plan = (
            shortest_path(start, lambda position: position.boxes == grid.targets, moves) or []
        )

    def observe(self, observation: str) -> None:
        """Ignore the text. The solution already predicts every position."""

    def act(self) -> str:
        return self._plan.pop(0) if self._plan else self._rng.choice(list(STEPS))


def read_puzzle(observation: str) -> tuple[Grid, Position]:
    """Return the grid and the position that a text shows, in either rendering.

    Raise `ValueError` if the text shows no puzzle.
    """
    if match := _FULL.search(observation):
        symbols = {
            (x, y): symbol
            for y, row in enumerate(match[1].splitlines())
            for x, symbol in enumerate(row)
        }
    elif match := _COMPACT.search(observation):
        symbols = {
            (x, y): symbol
            for y, row in enumerate(match[0].splitlines(), 1)
            for x, symbol in enumerate(row.split(), 1)
        }
    else:
        raise ValueError(f"the text shows no puzzle: {observation!r}")

    def cells(wanted: str) -> frozenset[tuple[int, int]]:
        return frozenset(point for point, symbol in symbols.items() if symbol in wanted)

    (player,) = cells("@+")
    return Grid(cells(".CA@*+"), cells("C*+")), Position(player, cells("A*"))

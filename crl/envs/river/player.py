"""Scripted player of the river. It reads only the texts, in either rendering."""

from __future__ import annotations

import random

from crl.envs.actions import COMPASS
from crl.envs.minihack.player import At, read_at, read_map, read_things, walk

BANK, SMALL_BANK = 18, 8
"""Number of columns of the near bank. Also the index of the river's first column of water."""
BEYOND = 7
"""Number of columns of the river and the far bank.

The river is two cells wide. A player that falls into the second cell crawls out on a bank next to
it.
"""
_HEIGHT, _EXIT_ROW = 7, 2


class RiverPlayer:
    """Player that pushes a boulder east into the water, walks over it, and swims the rest.

    It chooses the boulder with the shortest total way. It remembers boulders that the texts no
    longer mention, pushes that moved nothing, and the cell where a boulder has filled the water.
    """

    def __init__(self, rng: random.Random, bank: int = BANK) -> None:
        self._rng, self._water, self._exit = rng, bank, (bank + BEYOND - 1, _EXIT_ROW)
        self._forget()

    def begin(self, goal: str, observation: str) -> None:
        self._forget()
        self.observe(observation)

    def observe(self, observation: str) -> None:
        before = self._here
        names, here = read_map(observation), read_at(observation)
        if names is not None:
            self._see(names)
        elif here is not None:
            self._hear(here, observation)
        if self._pushed and self._here == before:
            self._stuck.add(self._pushed)

    def act(self) -> str:
        self._pushed = None
        if self._here[0] > self._water:
            path = self._walk({self._exit})
        elif self._here == self._ford:
            path = ["east"]
        elif self._ford:
            path = self._walk({self._ford})
        else:
            path = self._push()
        return path[0] if path else self._rng.choice(list(COMPASS))

    def _forget(self) -> None:
        self._here: At = (0, 0)
        self._boulders: set[At] = set()
        self._stuck: set[tuple[At, str]] = set()
        self._ford: At | None = None
        self._pushed: tuple[At, str] | None = None

    def _see(self, names: dict[At, str]) -> None:
        self._here = next(at for at, name in names.items() if name == "you")
        self._boulders = {at for at, name in names.items() if name == "boulder"}
        self._ford = next(
            (at for at, name in names.items() if at[0] == self._water and name in ("floor", "you")),
            None,
        )

    def _hear(self, here: At, words: str) -> None:
        """Read a compact text.

        It mentions only the nearest boulders. Boulders that are farther away are remembered.
        """
        self._here = here
        things = list(read_things(words, here))
        told = {at for name, at in things if name == "boulder"}
        reach = max((_steps(here, at) for at in told), default=0)
        self._boulders = told | {at for at in self._boulders if _steps(here, at) > reach}
        self._ford = next((at for name, at in things if name == "ford"), self._ford)

    def _push(self) -> list[str] | None:
        """Return the way to the best boulder, followed by one push, or None if there is no way.

        The best boulder gives the shortest total way to the stairs if it is pushed into the water
        in a straight line.
        """
        ways = []
        for x, y in self._boulders:
            for name in ("east", "northeast", "southeast"):
                dx, dy = COMPASS[name]
                lane = [(x + i * dx, y + i * dy) for i in range(1, self._water - x + 1)]
                if (
                    not lane
                    or ((x, y), name) in self._stuck
                    or self._boulders & set(lane)
                    or not 0 <= lane[-1][1] < _HEIGHT
                ):
                    continue
                behind = (x - dx, y - dy)
                path = [] if self._here == behind else self._walk({behind})
                if path is not None:
                    across = max(BEYOND - 1, abs(_EXIT_ROW - lane[-1][1]))
                    ways.append((len(path) + len(lane) + across, (x, y), name, path))
        if not ways:
            return None
        _, boulder, name, path = min(ways)
        if not path:
            self._pushed = (boulder, name)
        return [*path, name]

    def _walk(self, wanted: set[At]) -> list[str] | None:
        return walk(
            self._here, lambda at: at in wanted, lambda _, to: self._passable(to), self._rng
        )

    def _passable(self, to: At) -> bool:
        x, y = to
        dry = 0 <= x < self._water or self._water + 1 < x < self._water + BEYOND or to == self._ford
        return dry and 0 <= y < _HEIGHT and to not in self._boulders


def _steps(start: At, end: At) -> int:
    return max(abs(end[0] - start[0]), abs(end[1] - start[1]))

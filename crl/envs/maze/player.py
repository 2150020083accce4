"""Scripted player of the maze. It reads only the texts, in either rendering."""

from __future__ import annotations

import random
from collections.abc import Set

from crl.envs.actions import COMPASS
from crl.envs.minihack.player import (
    At,
    around,
    beside,
    read_at,
    read_map,
    read_open,
    read_things,
    walk,
)

SIZE, SMALL_SIZE = 7, 5
"""Width and height of a maze, in cells."""


class MazePlayer:
    """Player that walks to the stairs if it knows a way, else to where it may see more.

    In the second case it walks to the nearest cell beside an unseen one. It remembers the cells
    that it has been next to: those that are not corridors are stone. `here`, `corridors` and
    `stairs` (empty until the stairs are seen) are (x, y) from the top left.
    """

    def __init__(self, rng: random.Random, size: int = SIZE) -> None:
        self._rng, self._size = rng, size
        self._forget()

    def begin(self, goal: str, observation: str) -> None:
        self._forget()
        self.observe(observation)

    def observe(self, observation: str) -> None:
        names, here = read_map(observation), read_at(observation)
        if names is not None:
            here = next(at for at, name in names.items() if name == "you")
            seen = {at for at, name in names.items() if "not seen" not in name}
            self.see(here, seen, {at for at, name in names.items() if name == "staircase down"})
        elif here is not None:
            seen = {here, *(beside(here, name) for name in read_open(observation))}
            self.see(here, seen, {at for _, at in read_things(observation, here)})

    def see(self, here: At, corridors: Set[At], stairs: Set[At]) -> None:
        """Record the player's cell, and the corridors and stairs that are seen from it."""
        self.here = here
        self.corridors |= corridors
        self.stairs |= stairs
        self._inspected |= {here, *around(here)}

    def act(self) -> str:
        unknown = {at for at in self.corridors if self._unknown_beside(at)}
        path = self.way_to_stairs(self.here) or self._way(self.here, unknown)
        return path[0] if path else self._rng.choice(list(COMPASS))

    def way_to_stairs(self, start: At) -> list[str] | None:
        """Return a shortest walk from a cell to the stairs within the known part of the maze.

        Return None if no way is known.
        """
        return self._way(start, self.stairs)

    def _forget(self) -> None:
        self.here: At = (0, 0)
        self.corridors: set[At] = set()
        self.stairs: set[At] = set()
        self._inspected: set[At] = set()

    def _way(self, start: At, wanted: set[At]) -> list[str] | None:
        known = self.corridors | self.stairs
        return walk(start, lambda at: at in wanted, lambda _, to: to in known, self._rng)

    def _unknown_beside(self, at: At) -> bool:
        """Return whether an unseen corridor may begin beside this cell.

        Cells with two odd coordinates are always stone.
        """
        near = (beside(at, name) for name in ("north", "east", "south", "west"))
        unseen = (to for to in near if to not in self._inspected and to not in self.corridors)
        return any(
            0 <= x < self._size and 0 <= y < self._size and (x % 2 == 0 or y % 2 == 0)
            for x, y in unseen
        )

"""Scripted player of the maze. It reads only the texts, in either rendering."""

from __future__ import annotations

import random
from collections.abc import Set

from crl.envs.actions import COMPASS
from crl.envs.maze.layout import SIZE
from crl.envs.minihack.player import (
    Point,
    neighbour,
    neighbours,
    read_map,
    read_open_directions,
    read_position,
    read_things,
    shortest_walk,
)


class MazePlayer:
    """Player that walks to the stairs if it knows a way, else to where it may see more.

    In the second case it walks to the nearest cell beside an unseen one. It remembers the cells
    that it has been next to: those that are not corridors are stone. `position`, `corridors` and
    `stairs` (empty until the stairs are seen) are (x, y) from the top left.
    """

    def __init__(self, rng: random.Random, size: int = SIZE) -> None:
        self._rng, self._size = rng, size
        self._reset()

    def begin(self, goal: str, observation: str) -> None:
        self._reset()
        self.observe(observation)

    def observe(self, observation: str) -> None:
        names, position = read_map(observation), read_position(observation)
        if names is not None:
            position = next(point for point, name in names.items() if name == "you")
            seen = {point for point, name in names.items() if "not seen" not in name}
            self.record_view(
                position, seen, {point for point, name in names.items() if name == "staircase down"}
            )
        elif position is not None:
            seen = {
                position,
                *(neighbour(position, name) for name in read_open_directions(observation)),
            }
            self.record_view(
                position, seen, {point for _, point in read_things(observation, position)}
            )

    def record_view(self, position: Point, corridors: Set[Point], stairs: Set[Point]) -> None:
        """Record the player's cell, and the corridors and stairs that are seen from it."""
        self.position = position
        self.corridors |= corridors
        self.stairs |= stairs
        self._inspected |= {position, *neighbours(position)}

    def act(self) -> str:
        unknown = {point for point in self.corridors if self._borders_unknown(point)}
        path = self.way_to_stairs(self.position) or self._way(self.position, unknown)
        return path[0] if path else self._rng.choice(list(COMPASS))

    def way_to_stairs(self, start: Point) -> list[str] | None:
        """Return a shortest walk from a cell to the stairs within the known part of the maze.

        Return None if no way is known.
        """
        return self._way(start, self.stairs)

    def _reset(self) -> None:
        self.position: Point = (0, 0)
        self.corridors: set[Point] = set()
        self.stairs: set[Point] = set()
        self._inspected: set[Point] = set()

    def _way(self, start: Point, targets: set[Point]) -> list[str] | None:
        known = self.corridors | self.stairs
        return shortest_walk(
            start, lambda point: point in targets, lambda _, end: end in known, self._rng
        )

    def _borders_unknown(self, point: Point) -> bool:
        """Return whether an unseen corridor may begin beside this cell.

        Cells with two odd coordinates are always stone.
        """
        adjacent = (neighbour(point, name) for name in ("north", "east", "south", "west"))
        unseen = (
            end for end in adjacent if end not in self._inspected and end not in self.corridors
        )
        return any(
            0 <= x < self._size and 0 <= y < self._size and (x % 2 == 0 or y % 2 == 0)
            for x, y in unseen
        )

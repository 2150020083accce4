"""Scripted player of the key room. It reads only the texts, in either rendering."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

from crl.envs.actions import COMPASS
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

_INTERIOR = frozenset((x, y) for x in range(1, 6) for y in range(1, 6))
_HELD = re.compile(r"^(Inventory: .*\bkey named|key held)", re.MULTILINE)
_NAMES = {
    "staircase down": "stairs",
    "closed door": "door",
    "key named The Master Key of Thievery": "key",
}


class KeyRoomPlayer:
    """Player that takes the key, applies it to the door, and walks to the stairs.

    It explores until it has found them. It remembers the floor, the cells that it has been next to,
    and the cells of things. `key` and `door` are (x, y) from the corner of the outer wall, or None
    until they are seen.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._reset()

    def begin(self, goal: str, observation: str) -> None:
        self._reset()
        self.observe(observation)

    def observe(self, observation: str) -> None:
        names, position = read_map(observation), read_position(observation)
        if names is not None:
            self._position = next(point for point, name in names.items() if name == "you")
            self._floor |= {
                point
                for point, name in names.items()
                if name not in ("wall", "closed door", "wall or open door", "not seen yet")
            }
            things = {_NAMES[name]: point for point, name in names.items() if name in _NAMES}
        elif position is not None:
            self._position = position
            self._floor |= {
                position,
                *(neighbour(position, name) for name in read_open_directions(observation)),
            }
            things = dict(read_things(observation, position))
        else:
            return
        if self.door and "door" not in things:
            self._door_open = True
        self._stairs = things.get("stairs", self._stairs)
        self.key, self.door = things.get("key", self.key), things.get("door", self.door)
        self._holding = bool(_HELD.search(observation))
        self._inspected |= {self._position, *neighbours(self._position)}

    def act(self) -> str:
        if not self._holding and self._position == self.key:
            return "pickup"
        if (
            self._holding
            and self.door
            and not self._door_open
            and self._position in self._thresholds(self.door)
        ):
            return "apply"
        return next(
            (path[0] for targets in self._targets() if (path := self._walk_to(targets))),
            self._rng.choice(list(COMPASS)),
        )

    def _targets(self) -> Iterable[set[Point]]:
        """Yield sets of cells to walk to, the most wanted set first."""
        if self._stairs:
            yield {self._stairs}
        if self.key and not self._holding:
            yield {self.key}
        if self.door and self._door_open:
            yield {self.door}
        if self.door and self._holding:
            yield self._thresholds(self.door)
        yield {
            point
            for point in self._floor
            if any(end in _INTERIOR and end not in self._inspected for end in neighbours(point))
        }
        yield self._floor

    def _reset(self) -> None:
        self._position: Point = (0, 0)
        self._floor: set[Point] = set()
        self._inspected: set[Point] = set()
        self._stairs: Point | None = None
        self.key: Point | None = None
        self.door: Point | None = None
        self._door_open = self._holding = False

    def _thresholds(self, door: Point) -> set[Point]:
        """Return the floor cells from which the door can be entered."""
        return {neighbour(door, name) for name in ("north", "east", "south", "west")} & self._floor

    def _walk_to(self, targets: set[Point]) -> list[str] | None:
        return shortest_walk(
            self._position, lambda point: point in targets, self._passable, self._rng
        )

    def _passable(self, start: Point, end: Point) -> bool:
        if self.door in (start, end):
            return self._door_open and (start[0] == end[0] or start[1] == end[1])
        return end in self._floor

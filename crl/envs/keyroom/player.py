"""Scripted player of the key room. It reads only the texts, in either rendering."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

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
        self._forget()

    def begin(self, goal: str, observation: str) -> None:
        self._forget()
        self.observe(observation)

    def observe(self, observation: str) -> None:
        names, here = read_map(observation), read_at(observation)
        if names is not None:
            self._here = next(at for at, name in names.items() if name == "you")
            self._floor |= {
                at
                for at, name in names.items()
                if name not in ("wall", "closed door", "wall or open door", "not seen yet")
            }
            things = {_NAMES[name]: at for at, name in names.items() if name in _NAMES}
        elif here is not None:
            self._here = here
            self._floor |= {here, *(beside(here, name) for name in read_open(observation))}
            things = dict(read_things(observation, here))
        else:
            return
        if self.door and "door" not in things:
            self._open = True
        self._stairs = things.get("stairs", self._stairs)
        self.key, self.door = things.get("key", self.key), things.get("door", self.door)
        self._holding = bool(_HELD.search(observation))
        self._inspected |= {self._here, *around(self._here)}

    def act(self) -> str:
        if not self._holding and self._here == self.key:
            return "pickup"
        if (
            self._holding
            and self.door
            and not self._open
            and self._here in self._thresholds(self.door)
        ):
            return "apply"
        return next(
            (path[0] for wanted in self._wishes() if (path := self._way_to(wanted))),
            self._rng.choice(list(COMPASS)),
        )

    def _wishes(self) -> Iterable[set[At]]:
        """Yield sets of cells to walk to, the most wanted set first."""
        if self._stairs:
            yield {self._stairs}
        if self.key and not self._holding:
            yield {self.key}
        if self.door and self._open:
            yield {self.door}
        if self.door and self._holding:
            yield self._thresholds(self.door)
        yield {
            at
            for at in self._floor
            if any(to in _INTERIOR and to not in self._inspected for to in around(at))
        }
        yield self._floor

    def _forget(self) -> None:
        self._here: At = (0, 0)
        self._floor: set[At] = set()
        self._inspected: set[At] = set()
        self._stairs: At | None = None
        self.key: At | None = None
        self.door: At | None = None
        self._open = self._holding = False

    def _thresholds(self, door: At) -> set[At]:
        """Return the floor cells from which the door can be entered."""
        return {beside(door, name) for name in ("north", "east", "south", "west")} & self._floor

    def _way_to(self, wanted: set[At]) -> list[str] | None:
        return walk(self._here, lambda at: at in wanted, self._passable, self._rng)

    def _passable(self, at: At, to: At) -> bool:
        if self.door in (at, to):
            return self._open and (at[0] == to[0] or at[1] == to[1])
        return to in self._floor

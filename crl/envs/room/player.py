"""Scripted player of the room. It reads only the texts, in either rendering."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from crl.envs.actions import COMPASS, parse_choice
from crl.envs.minihack.player import At, beside, read_at, read_map, walk

_SIZE = 5
_CELLS = frozenset((x, y) for x in range(_SIZE) for y in range(_SIZE))
_STAIRS = re.compile(r"^stairs (\w+)$", re.MULTILINE)
_TRAP = re.compile(r"^trap (\w+)$", re.MULTILINE)


class RoomPlayer:
    """Player that walks to the stairs if it has seen them, else to the nearest unseen cell.

    If it has seen every cell, it walks to the nearest unvisited one. It walks around traps if
    possible. It remembers seen cells, visited cells and traps. `here` and `stairs` (the cells that
    may hold the stairs) are (x, y) from the top left.
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
            self._see(names)
        elif here is not None:
            self._read_words(here, observation)
        self._visited.add(self.here)

    def act(self) -> str:
        for wanted in (self.stairs, _CELLS - self._seen, _CELLS - self._visited):
            if wanted:
                step = self._first_step(wanted, avoid=self._traps) or self._first_step(
                    wanted, avoid=set()
                )
                if step:
                    return step
        return self._rng.choice(list(COMPASS))

    def _forget(self) -> None:
        self.here: At = (0, 0)
        self._seen: set[At] = set()
        self._visited: set[At] = set()
        self._traps: set[At] = set()
        self.stairs: set[At] = set()

    def _see(self, names: dict[At, str]) -> None:
        self.here = next(at for at, name in names.items() if name == "you")
        self._seen = {at for at, name in names.items() if name != "not seen yet"}
        self._traps |= {at for at, name in names.items() if "trap" in name}
        self.stairs = {at for at, name in names.items() if name == "staircase down"}

    def _read_words(self, here: At, words: str) -> None:
        self.here = here
        near = {at for at in _CELLS if max(abs(at[0] - here[0]), abs(at[1] - here[1])) <= 1}
        fresh = near - self._seen
        self._seen |= near
        self._traps |= {beside(here, name) for name in _TRAP.findall(words)}
        stairs = _STAIRS.search(words)
        if stairs:
            dx, dy = COMPASS[stairs[1]]
            possible = {
                at
                for at in self._seen
                if (_sign(at[0] - here[0]), _sign(at[1] - here[1])) == (dx, dy)
            }
            # stairs that appear for the first time are not in a cell that was seen before
            self.stairs = (self.stairs & possible) or (fresh & possible) or possible

    def _first_step(self, wanted: set[At] | frozenset[At], avoid: set[At]) -> str | None:
        """Return the first step of a shortest walk to the nearest cell of `wanted`.

        Ties are broken at random. Return None if there is no way.
        """
        path = walk(
            self.here,
            lambda at: at in wanted,
            lambda _, to: to in _CELLS and (to not in avoid or to in wanted),
            self._rng,
        )
        return path[0] if path else None


def possible_stairs(turns: Sequence[tuple[bool, str]]) -> frozenset[At]:
    """Return the cells that may hold the stairs, as far as an episode's compact texts show them.

    Return an empty set if the stairs were never seen. `turns` holds (whether the agent wrote the
    text, text) in order. The last text may report that the stairs were reached. This report alone
    does not give their cell: an agent that did not see the stairs next to it before it reached them
    has stepped on a teleporter.
    """
    player, last_action = RoomPlayer(random.Random(0)), None
    for said, words in turns:
        if said:
            last_action = parse_choice(words, tuple(COMPASS))
        elif words.startswith("stairs reached") and last_action:
            return frozenset(player.stairs & {beside(player.here, last_action)} or player.stairs)
        else:
            player.observe(words)
    return frozenset(player.stairs)


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)

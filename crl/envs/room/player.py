"""Scripted player of the room. It reads only the texts, in either rendering."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from crl.envs.actions import COMPASS, parse_choice
from crl.envs.minihack.player import Point, neighbour, read_map, read_position, shortest_walk

_SIZE = 5
_CELLS = frozenset((x, y) for x in range(_SIZE) for y in range(_SIZE))
_STAIRS = re.compile(r"^stairs (\w+)$", re.MULTILINE)
_TRAP = re.compile(r"^trap (\w+)$", re.MULTILINE)


class RoomPlayer:
    """Player that walks to the stairs if it has seen them, else to the nearest unseen cell.

    If it has seen every cell, it walks to the nearest unvisited one. It walks around traps if
    possible. It remembers seen cells, visited cells and traps. `position` and `stairs` (the cells
    that may hold the stairs) are (x, y) from the top left.
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
            self._read_full(names)
        elif position is not None:
            self._read_compact(position, observation)
        self._visited.add(self.position)

    def act(self) -> str:
        for targets in (self.stairs, _CELLS - self._seen, _CELLS - self._visited):
            if targets:
                step = self._first_step(targets, avoid=self._traps) or self._first_step(
                    targets, avoid=set()
                )
                if step:
                    return step
        return self._rng.choice(list(COMPASS))

    def _reset(self) -> None:
        self.position: Point = (0, 0)
        self._seen: set[Point] = set()
        self._visited: set[Point] = set()
        self._traps: set[Point] = set()
        self.stairs: set[Point] = set()

    def _read_full(self, names: dict[Point, str]) -> None:
        self.position = next(point for point, name in names.items() if name == "you")
        self._seen = {point for point, name in names.items() if name != "not seen yet"}
        self._traps |= {point for point, name in names.items() if "trap" in name}
        self.stairs = {point for point, name in names.items() if name == "staircase down"}

    def _read_compact(self, position: Point, text: str) -> None:
        self.position = position
        visible = {
            point
            for point in _CELLS
            if max(abs(point[0] - position[0]), abs(point[1] - position[1])) <= 1
        }
        new_cells = visible - self._seen
        self._seen |= visible
        self._traps |= {neighbour(position, name) for name in _TRAP.findall(text)}
        stairs = _STAIRS.search(text)
        if stairs:
            dx, dy = COMPASS[stairs[1]]
            possible = {
                point
                for point in self._seen
                if (_sign(point[0] - position[0]), _sign(point[1] - position[1])) == (dx, dy)
            }
            # stairs that appear for the first time are not in a cell that was seen before
            self.stairs = (self.stairs & possible) or (new_cells & possible) or possible

    def _first_step(self, targets: set[Point] | frozenset[Point], avoid: set[Point]) -> str | None:
        """Return the first step of a shortest walk to the nearest cell of `targets`.

        Ties are broken at random. Return None if there is no way.
        """
        path = shortest_walk(
            self.position,
            lambda point: point in targets,
            lambda _, end: end in _CELLS and (end not in avoid or end in targets),
            self._rng,
        )
        return path[0] if path else None


def possible_stairs(turns: Sequence[tuple[bool, str]]) -> frozenset[Point]:
    """Return the cells that may hold the stairs, as far as an episode's compact texts show them.

    Return an empty set if the stairs were never seen. `turns` holds (whether the agent wrote the
    text, text) in order. The last text may report that the stairs were reached. This report alone
    does not give their cell: an agent that did not see the stairs next to it before it reached them
    has stepped on a teleporter.
    """
    player, last_action = RoomPlayer(random.Random(0)), None
    for by_agent, text in turns:
        if by_agent:
            last_action = parse_choice(text, tuple(COMPASS))
        elif text.startswith("stairs reached") and last_action:
            return frozenset(
                player.stairs & {neighbour(player.position, last_action)} or player.stairs
            )
        else:
            player.observe(text)
    return frozenset(player.stairs)


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)

"""Scripted player of the river. It reads only the texts, in either rendering."""

from __future__ import annotations

import random

from crl.envs.actions import COMPASS
from crl.envs.minihack.player import Point, read_map, read_position, read_things, shortest_walk
from crl.envs.river.layout import BANK, FAR_SIDE

_HEIGHT, _STAIRS_ROW = 7, 2


class RiverPlayer:
    """Player that pushes a boulder east into the water, walks over it, and swims the rest.

    It chooses the boulder with the shortest total way. It remembers boulders that the texts no
    longer mention, pushes that moved nothing, and the cell where a boulder has filled the water.
    """

    def __init__(self, rng: random.Random, bank: int = BANK) -> None:
        self._rng, self._water, self._stairs = rng, bank, (bank + FAR_SIDE - 1, _STAIRS_ROW)
        self._reset()

    def begin(self, goal: str, observation: str) -> None:
        self._reset()
        self.observe(observation)

    def observe(self, observation: str) -> None:
        previous = self._position
        names, position = read_map(observation), read_position(observation)
        if names is not None:
            self._read_full(names)
        elif position is not None:
            self._read_compact(position, observation)
        if self._pushed and self._position == previous:
            self._stuck.add(self._pushed)

    def act(self) -> str:
        self._pushed = None
        if self._position[0] > self._water:
            path = self._walk_to({self._stairs})
        elif self._position == self._ford:
            path = ["east"]
        elif self._ford:
            path = self._walk_to({self._ford})
        else:
            path = self._plan_push()
        return path[0] if path else self._rng.choice(list(COMPASS))

    def _reset(self) -> None:
        self._position: Point = (0, 0)
        self._boulders: set[Point] = set()
        self._stuck: set[tuple[Point, str]] = set()
        self._ford: Point | None = None
        self._pushed: tuple[Point, str] | None = None

    def _read_full(self, names: dict[Point, str]) -> None:
        self._position = next(point for point, name in names.items() if name == "you")
        self._boulders = {point for point, name in names.items() if name == "boulder"}
        self._ford = next(
            (
                point
                for point, name in names.items()
                if point[0] == self._water and name in ("floor", "you")
            ),
            None,
        )

    def _read_compact(self, position: Point, text: str) -> None:
        """Read a compact text.

        It mentions only the nearest boulders. Boulders that are farther away are remembered.
        """
        self._position = position
        things = list(read_things(text, position))
        visible = {point for name, point in things if name == "boulder"}
        visible_distance = max((_distance(position, point) for point in visible), default=0)
        self._boulders = visible | {
            point for point in self._boulders if _distance(position, point) > visible_distance
        }
        self._ford = next((point for name, point in things if name == "ford"), self._ford)

    def _plan_push(self) -> list[str] | None:
        """Return the way to the best boulder, followed by one push, or None if there is no way.

        The best boulder gives the shortest total way to the stairs if it is pushed into the water
        in a straight line.
        """
        candidates = []
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
                path = [] if self._position == behind else self._walk_to({behind})
                if path is not None:
                    across = max(FAR_SIDE - 1, abs(_STAIRS_ROW - lane[-1][1]))
                    candidates.append((len(path) + len(lane) + across, (x, y), name, path))
        if not candidates:
            return None
        _, boulder, name, path = min(candidates)
        if not path:
            self._pushed = (boulder, name)
        return [*path, name]

    def _walk_to(self, targets: set[Point]) -> list[str] | None:
        return shortest_walk(
            self._position,
            lambda point: point in targets,
            lambda _, point: self._passable(point),
            self._rng,
        )

    def _passable(self, point: Point) -> bool:
        x, y = point
        dry = (
            0 <= x < self._water
            or self._water + 1 < x < self._water + FAR_SIDE
            or point == self._ford
        )
        return dry and 0 <= y < _HEIGHT and point not in self._boulders


def _distance(start: Point, end: Point) -> int:
    return max(abs(end[0] - start[0]), abs(end[1] - start[1]))

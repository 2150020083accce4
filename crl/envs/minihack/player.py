"""Shared code of the scripted players of MiniHack environments.

It reads maps and compact texts, and finds walks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

from crl.envs.actions import COMPASS
from crl.envs.shortest_path import shortest_path

Point = tuple[int, int]

_MAP = re.compile(r"^Map:\n(.+?)\nLegend: (.+)$", re.MULTILINE | re.DOTALL)
_POSITION = re.compile(r"^at (\d+) (\d+)$", re.MULTILINE)
_OPEN = re.compile(r"^open (.+)$", re.MULTILINE)
_THING = re.compile(r"^(\w+) (here|(?:east|west|north|south) \d.*)$", re.MULTILINE)


def read_map(observation: str) -> dict[Point, str] | None:
    """Return the names of the cells of a full text's map, by (x, y) from its top left.

    Return None if the text has no map. A symbol with several meanings is named by all of them
    ("wall or open door").
    """
    match = _MAP.search(observation)
    if match is None:
        return None
    symbols = {entry[0]: entry[2:] for entry in match[2].splitlines()[0].split("; ")}
    return {
        (x, y): symbols[symbol]
        for y, row in enumerate(match[1].splitlines())
        for x, symbol in enumerate(row)
    }


def read_position(observation: str) -> Point | None:
    """Return the player's cell in a compact text, as (x, y) from 0. Return None if it has none."""
    match = _POSITION.search(observation)
    return (int(match[2]) - 1, int(match[1]) - 1) if match else None


def read_open_directions(observation: str) -> list[str]:
    """Return the open directions in a compact text."""
    match = _OPEN.search(observation)
    return match[1].split() if match else []


def read_things(observation: str, position: Point) -> Iterator[tuple[str, Point]]:
    """Yield (name, cell) of every line of the form `key east 2 south 1`."""
    for name, offset in _THING.findall(observation):
        x, y = position
        words = offset.split()
        for direction, count in zip(words[::2], words[1::2], strict=False):
            dx, dy = COMPASS[direction]
            x, y = x + dx * int(count), y + dy * int(count)
        yield name, (x, y)


def neighbour(point: Point, direction: str) -> Point:
    """Return the neighbour of a cell in a compass direction."""
    dx, dy = COMPASS[direction]
    return (point[0] + dx, point[1] + dy)


def neighbours(point: Point) -> Iterator[Point]:
    """Yield the eight neighbours of a cell."""
    return (neighbour(point, name) for name in COMPASS)


def shortest_walk(
    start: Point,
    is_target: Callable[[Point], bool],
    passable: Callable[[Point, Point], bool],
    rng: random.Random,
) -> list[str] | None:
    """Return the directions of a shortest walk to a target, or None if there is no way.

    The walk has at least one step. Ties are broken at random. `passable(start, end)` returns
    whether a step is possible.
    """
    directions = list(COMPASS)
    rng.shuffle(directions)

    def moves(point: Point) -> Iterator[tuple[str, Point]]:
        return (
            (name, end) for name in directions if passable(point, end := neighbour(point, name))
        )

    return shortest_path(start, lambda point: point != start and is_target(point), moves)

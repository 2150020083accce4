"""Shared code of the scripted players of MiniHack environments.

It reads maps and compact texts, and finds walks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

from crl.envs.actions import COMPASS
from crl.envs.search import shortest_path

At = tuple[int, int]

_MAP = re.compile(r"^Map:\n(.+?)\nLegend: (.+)$", re.MULTILINE | re.DOTALL)
_AT = re.compile(r"^at (\d+) (\d+)$", re.MULTILINE)
_OPEN = re.compile(r"^open (.+)$", re.MULTILINE)
_THING = re.compile(r"^(\w+) (here|(?:east|west|north|south) \d.*)$", re.MULTILINE)


def read_map(observation: str) -> dict[At, str] | None:
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


def read_at(observation: str) -> At | None:
    """Return the player's cell in a compact text, as (x, y) from 0. Return None if it has none."""
    match = _AT.search(observation)
    return (int(match[2]) - 1, int(match[1]) - 1) if match else None


def read_open(observation: str) -> list[str]:
    """Return the open directions in a compact text."""
    match = _OPEN.search(observation)
    return match[1].split() if match else []


def read_things(observation: str, here: At) -> Iterator[tuple[str, At]]:
    """Yield (name, cell) of every line of the form `key east 2 south 1`."""
    for name, way in _THING.findall(observation):
        x, y = here
        words = way.split()
        for direction, count in zip(words[::2], words[1::2], strict=False):
            dx, dy = COMPASS[direction]
            x, y = x + dx * int(count), y + dy * int(count)
        yield name, (x, y)


def beside(at: At, name: str) -> At:
    """Return the neighbour of a cell in a compass direction."""
    dx, dy = COMPASS[name]
    return (at[0] + dx, at[1] + dy)


def around(at: At) -> Iterator[At]:
    """Yield the eight neighbours of a cell."""
    return (beside(at, name) for name in COMPASS)


def walk(
    here: At, wanted: Callable[[At], bool], passable: Callable[[At, At], bool], rng: random.Random
) -> list[str] | None:
    """Return the directions of a shortest walk to a wanted cell, or None if there is no way.

    The walk has at least one step. Ties are broken at random. `passable(from, to)` returns whether
    a step is possible.
    """
    order = list(COMPASS)
    rng.shuffle(order)

    def moves(at: At) -> Iterator[tuple[str, At]]:
        return ((name, there) for name in order if passable(at, there := beside(at, name)))

    return shortest_path(here, lambda at: at != here and wanted(at), moves)

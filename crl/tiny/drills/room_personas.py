"""Demonstrators of the room.

A *persona* is one way of walking for a whole episode. A single expert with random noise on every
action teaches nothing: the loss stays at the value of a uniform guess. A mixture of personas is
equally diverse, and can be learnt.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Protocol

from crl.envs.actions import COMPASS
from crl.envs.room.game import RoomGame

Cell = tuple[int, int]
SIZE = 5
UNSEEN, STAIRS, TRAP = "~", ">", "^"
OPPOSITE = {
    name: next(other for other, back in COMPASS.items() if back == (-dx, -dy))
    for name, (dx, dy) in COMPASS.items()
}


class Persona(Protocol):
    """Interface of a demonstrator for one episode."""

    def act(self, game: RoomGame, rng: random.Random) -> str: ...


class Explorer:
    """Persona that walks to the stairs if it sees them, else to the nearest unseen cell.

    It avoids traps.
    """

    def act(self, game: RoomGame, rng: random.Random) -> str:
        targets = cells_showing(game, STAIRS) or cells_showing(game, UNSEEN)
        return first_step(game, targets, rng) or rng.choice(list(COMPASS))


class Walker:
    """Persona that walks in one direction until the wall, then chooses another direction."""

    def __init__(self, direction: str | None = None) -> None:
        self._direction = direction

    def act(self, game: RoomGame, rng: random.Random) -> str:
        if self._direction is None or not inside(neighbour(game.position, self._direction)):
            self._direction = rng.choice(open_directions(game))
        return self._direction


class Pacer:
    """Persona that walks one step forth and one step back."""

    def __init__(self) -> None:
        self._direction: str | None = None

    def act(self, game: RoomGame, rng: random.Random) -> str:
        back = OPPOSITE[self._direction] if self._direction else None
        self._direction = (
            back
            if back and inside(neighbour(game.position, back))
            else rng.choice(open_directions(game))
        )
        return self._direction


class Follower:
    """Persona that walks in the advised direction, and to the stairs if it sees them.

    It does not compensate for bad advice: at the wall it paces.
    """

    def __init__(self, direction: str) -> None:
        self._direction: str | None = direction
        self._explorer, self._pacer = Explorer(), Pacer()

    def act(self, game: RoomGame, rng: random.Random) -> str:
        if cells_showing(game, STAIRS):
            return self._explorer.act(game, rng)
        if self._direction and not inside(neighbour(game.position, self._direction)):
            self._direction = None
        return self._direction or self._pacer.act(game, rng)


class Lingerer:
    """Persona that walks around the start, at most one step away from it."""

    def act(self, game: RoomGame, rng: random.Random) -> str:
        x, y = game.start
        near = {at for at in cells() if max(abs(at[0] - x), abs(at[1] - y)) <= 1}
        return first_step(game, near, rng) or rng.choice(list(COMPASS))


def persona_for_lesson(kind: str, direction: str) -> Persona | None:
    """Return the persona that follows a lesson, or None if the lesson cannot be followed.

    `crl.envs.room.lessons` lists the kinds.
    """
    match kind:
        case "exit":
            return Follower(direction)
        case "walk":
            return Walker(direction)
        case "explore":
            return Explorer()
        case "stay":
            return Lingerer()
        case "back":
            return Pacer()
    return None


def cells() -> list[Cell]:
    return [(x, y) for y in range(SIZE) for x in range(SIZE)]


def inside(at: Cell) -> bool:
    return 0 <= at[0] < SIZE and 0 <= at[1] < SIZE


def neighbour(at: Cell, direction: str) -> Cell:
    dx, dy = COMPASS[direction]
    return at[0] + dx, at[1] + dy


def symbol(game: RoomGame, at: Cell) -> str:
    return game.grid[at[1]][at[0]]


def cells_showing(game: RoomGame, wanted: str) -> set[Cell]:
    """Return the cells that show this symbol."""
    return {
        (x, y) for y, row in enumerate(game.grid) for x, char in enumerate(row) if char == wanted
    }


def open_directions(game: RoomGame) -> list[str]:
    return [name for name in COMPASS if inside(neighbour(game.position, name))]


def first_step(game: RoomGame, targets: set[Cell], rng: random.Random) -> str | None:
    """Return the first direction of a shortest path to the nearest target, or None without a path.

    The path avoids traps. Ties are broken at random.
    """
    order = list(COMPASS)
    rng.shuffle(order)
    queue: deque[tuple[Cell, str | None]] = deque([(game.position, None)])
    seen = {game.position}
    while queue:
        at, first = queue.popleft()
        if first and at in targets:
            return first
        for direction in order:
            after = neighbour(at, direction)
            if (
                inside(after)
                and after not in seen
                and (symbol(game, after) != TRAP or after in targets)
            ):
                seen.add(after)
                queue.append((after, first or direction))
    return None

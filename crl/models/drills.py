"""What the bundled models are taught before RL: an extensible list of drills, each a kind of demonstration.

The room's demonstrators are *personas*: one way of walking for a whole episode, with a rare slip. (An expert with random
noise on every action teaches nothing: the loss stays at the value of a uniform guess.)
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from crl.envs.actions import COMPASS
from crl.envs.room import demonstration_tasks
from crl.envs.room.game import RoomGame
from crl.models.warm_start import Demonstration
from crl.types import Segment, Task

Cell = tuple[int, int]
SIZE = 5
UNSEEN, STAIRS, TRAP = "~", ">", "^"


@dataclass(frozen=True)
class Drill:
    """A kind of demonstration: `make(rng, n)` yields n of them; the recipe takes `count`."""

    name: str
    count: int
    make: Callable[[random.Random, int], Iterator[Demonstration]]


class Persona(Protocol):
    """A demonstrator for one episode."""

    def act(self, game: RoomGame, rng: random.Random) -> str: ...


class Explorer:
    """Goes to the stairs when it sees them, else to the nearest cell that it has not seen; around traps."""

    def act(self, game: RoomGame, rng: random.Random) -> str:
        stairs = [at for at in cells() if symbol(game, at) == STAIRS]
        targets = stairs or [at for at in cells() if symbol(game, at) == UNSEEN]
        return first_step(game, set(targets), rng) or rng.choice(list(COMPASS))


class Walker:
    """Keeps one direction until the wall, then takes another."""

    def __init__(self) -> None:
        self._direction: str | None = None

    def act(self, game: RoomGame, rng: random.Random) -> str:
        if self._direction is None or not inside(neighbour(game.position, self._direction)):
            self._direction = rng.choice(open_directions(game))
        return self._direction


class Pacer:
    """Goes one step and back again."""

    def __init__(self) -> None:
        self._direction: str | None = None

    def act(self, game: RoomGame, rng: random.Random) -> str:
        back = OPPOSITE[self._direction] if self._direction else None
        self._direction = back if back and inside(neighbour(game.position, back)) else rng.choice(open_directions(game))
        return self._direction


@dataclass(frozen=True)
class RoomWalks:
    """Episodes of the compact room: `shares` of the personas; `slip`: chance of a random action; `turns`: at most so many."""

    shares: tuple[tuple[Callable[[], Persona], float], ...]
    slip: float
    turns: int

    def make(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        game = RoomGame("compact")
        try:
            for task in demonstration_tasks(n):
                yield self._episode(game, task, rng)
        finally:
            game.close()

    def _episode(self, game: RoomGame, task: Task, rng: random.Random) -> Demonstration:
        kinds, weights = zip(*self.shares, strict=True)
        persona = rng.choices(kinds, weights)[0]()
        segments = [Segment("user", task.goal, "task"), Segment("user", game.reset(task), "env")]
        for turn in range(self.turns):
            action = rng.choice(list(COMPASS)) if rng.random() < self.slip else persona.act(game, rng)
            segments.append(Segment("assistant", action, "policy"))
            result = game.step(action)
            if result.done or turn == self.turns - 1:
                break
            segments.append(Segment("user", result.text, "env"))
        return segments


OPPOSITE = {name: next(other for other, back in COMPASS.items() if back == (-dx, -dy)) for name, (dx, dy) in COMPASS.items()}


def cells() -> list[Cell]:
    return [(x, y) for y in range(SIZE) for x in range(SIZE)]


def inside(at: Cell) -> bool:
    return 0 <= at[0] < SIZE and 0 <= at[1] < SIZE


def neighbour(at: Cell, direction: str) -> Cell:
    dx, dy = COMPASS[direction]
    return at[0] + dx, at[1] + dy


def symbol(game: RoomGame, at: Cell) -> str:
    return game.grid[at[1]][at[0]]


def open_directions(game: RoomGame) -> list[str]:
    return [name for name in COMPASS if inside(neighbour(game.position, name))]


def first_step(game: RoomGame, targets: set[Cell], rng: random.Random) -> str | None:
    """First direction of a shortest path to the nearest target, around traps; ties at random; None without a path."""
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
            if inside(after) and after not in seen and (symbol(game, after) != TRAP or after in targets):
                seen.add(after)
                queue.append((after, first or direction))
    return None


ACTOR_DRILLS = (Drill("room walks", 12_000, RoomWalks(((Explorer, 0.55), (Walker, 0.27), (Pacer, 0.18)), slip=0.03, turns=6).make),)

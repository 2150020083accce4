"""Generator of Sokoban puzzles that can always be solved.

A grid is searched backwards from its solved positions: the player pulls boxes instead of pushing
them. The search finds every solvable position and its number of moves. The puzzle is one of these
positions, with the wanted difficulty.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from crl.envs.actions import COMPASS

At = tuple[int, int]
SIZE = 6
BOXES = 2
INNER_WALLS = 2
MOVES = range(6, 21)
"""Allowed number of moves of the shortest solution, for every start cell of the player."""

STEPS = {name: COMPASS[name] for name in ("north", "east", "south", "west")}


@dataclass(frozen=True, slots=True)
class Position:
    """Cells of the player and of the boxes, as (x, y) from the grid's top left."""

    player: At
    boxes: frozenset[At]


@dataclass(frozen=True, slots=True)
class Room:
    """Part of a puzzle that never moves."""

    floor: frozenset[At]
    """Cells without a wall, including the targets."""
    targets: frozenset[At]


@dataclass(frozen=True, slots=True)
class Puzzle:
    """Grid with its boxes and the possible start cells of the player."""

    room: Room
    boxes: frozenset[At]
    moves: dict[At, int]
    """Start cell → number of moves of the shortest solution.

    The player can walk between these cells without a push, so the same pushes solve the puzzle from
    each of them.
    """


def move(room: Room, position: Position, direction: str) -> Position:
    """Return the position after a step, or after a push of one box onto free floor.

    Return the same position if the way is blocked.
    """
    step = STEPS[direction]
    to = _plus(position.player, step)
    boxes = position.boxes
    if to in boxes:
        beyond = _plus(to, step)
        if beyond not in room.floor or beyond in boxes:
            return position
        boxes = boxes - {to} | {beyond}
    return Position(to, boxes) if to in room.floor else position


@lru_cache(maxsize=256)
def puzzle(seed: int) -> Puzzle:
    """Return the puzzle of a seed."""
    rng = random.Random(seed)
    while True:
        room = _room(rng)
        solvable = moves_to_solve(room)
        wanted = sorted(
            (p for p, moves in solvable.items() if moves in MOVES and not p.boxes & room.targets),
            key=_order,
        )
        if wanted:
            boxes = (chosen := rng.choice(wanted)).boxes
            moves = {at: solvable[Position(at, boxes)] for at in sorted(_region(room, chosen))}
            if all(n in MOVES for n in moves.values()):
                return Puzzle(room, boxes, moves)


def moves_to_solve(room: Room) -> dict[Position, int]:
    """Return a map from every solvable position to its smallest number of moves."""
    moves = {Position(at, room.targets): 0 for at in sorted(room.floor - room.targets)}
    queue = deque(moves)
    while queue:
        position = queue.popleft()
        for before in _before(room, position):
            if before not in moves:
                moves[before] = moves[position] + 1
                queue.append(before)
    return moves


def _before(room: Room, position: Position) -> Iterator[Position]:
    """Yield the positions from which one move leads to this position.

    The player steps back, and may pull the box in front of it along.
    """
    for dx, dy in STEPS.values():
        back, front = _plus(position.player, (-dx, -dy)), _plus(position.player, (dx, dy))
        if back in room.floor and back not in position.boxes:
            yield Position(back, position.boxes)
            if front in position.boxes:
                yield Position(back, position.boxes - {front} | {position.player})


def _room(rng: random.Random) -> Room:
    """Return a grid with random inner walls and targets.

    If walls divide the grid, the boxes and the player stay on the side of the targets.
    """
    inside = [(x, y) for y in range(1, SIZE - 1) for x in range(1, SIZE - 1)]
    floor = sorted(set(inside) - set(rng.sample(inside, INNER_WALLS)))
    return Room(frozenset(floor), frozenset(rng.sample(floor, BOXES)))


def _region(room: Room, position: Position) -> frozenset[At]:
    """Return the cells that the player can reach without a push."""
    reached, queue = {position.player}, [position.player]
    while queue:
        at = queue.pop()
        near = {_plus(at, step) for step in STEPS.values()} & room.floor - position.boxes - reached
        reached |= near
        queue += near
    return frozenset(reached)


def _order(position: Position) -> tuple[At, list[At]]:
    return position.player, sorted(position.boxes)


def _plus(at: At, step: At) -> At:
    return (at[0] + step[0], at[1] + step[1])

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

Point = tuple[int, int]
SIZE = 6
BOXES = 2
INNER_WALLS = 2
SOLUTION_MOVES = range(6, 21)
"""Allowed number of moves of the shortest solution, for every start cell of the player."""

STEPS = {name: COMPASS[name] for name in ("north", "east", "south", "west")}


@dataclass(frozen=True, slots=True)
class Position:
    """Cells of the player and of the boxes, as (x, y) from the grid's top left."""

    player: Point
    boxes: frozenset[Point]


@dataclass(frozen=True, slots=True)
class Grid:
    """Part of a puzzle that never moves."""

    floor: frozenset[Point]
    """Cells without a wall, including the targets."""
    targets: frozenset[Point]


@dataclass(frozen=True, slots=True)
class Puzzle:
    """Grid with its boxes and the possible start cells of the player."""

    grid: Grid
    boxes: frozenset[Point]
    moves: dict[Point, int]
    """Start cell → number of moves of the shortest solution.

    The player can walk between these cells without a push, so the same pushes solve the puzzle from
    each of them.
    """


def move(grid: Grid, position: Position, direction: str) -> Position:
    """Return the position after a step, or after a push of one box onto free floor.

    Return the same position if the way is blocked.
    """
    step = STEPS[direction]
    to = _add(position.player, step)
    boxes = position.boxes
    if to in boxes:
        beyond = _add(to, step)
        if beyond not in grid.floor or beyond in boxes:
            return position
        boxes = boxes - {to} | {beyond}
    return Position(to, boxes) if to in grid.floor else position


@lru_cache(maxsize=256)
def puzzle(seed: int) -> Puzzle:
    """Return the puzzle of a seed."""
    rng = random.Random(seed)
    while True:
        grid = _random_grid(rng)
        solvable = moves_to_solve(grid)
        suitable = sorted(
            (
                p
                for p, moves in solvable.items()
                if moves in SOLUTION_MOVES and not p.boxes & grid.targets
            ),
            key=_sort_key,
        )
        if suitable:
            boxes = (selected := rng.choice(suitable)).boxes
            moves = {
                point: solvable[Position(point, boxes)]
                for point in sorted(_reachable(grid, selected))
            }
            if all(n in SOLUTION_MOVES for n in moves.values()):
                return Puzzle(grid, boxes, moves)


def moves_to_solve(grid: Grid) -> dict[Position, int]:
    """Return a map from every solvable position to its smallest number of moves."""
    moves = {Position(point, grid.targets): 0 for point in sorted(grid.floor - grid.targets)}
    queue = deque(moves)
    while queue:
        position = queue.popleft()
        for previous in _predecessors(grid, position):
            if previous not in moves:
                moves[previous] = moves[position] + 1
                queue.append(previous)
    return moves


def _predecessors(grid: Grid, position: Position) -> Iterator[Position]:
    """Yield the positions from which one move leads to this position.

    The player steps back, and may pull the box in front of it along.
    """
    for dx, dy in STEPS.values():
        back, front = _add(position.player, (-dx, -dy)), _add(position.player, (dx, dy))
        if back in grid.floor and back not in position.boxes:
            yield Position(back, position.boxes)
            if front in position.boxes:
                yield Position(back, position.boxes - {front} | {position.player})


def _random_grid(rng: random.Random) -> Grid:
    """Return a grid with random inner walls and targets.

    If walls divide the grid, the boxes and the player stay on the side of the targets.
    """
    inside = [(x, y) for y in range(1, SIZE - 1) for x in range(1, SIZE - 1)]
    floor = sorted(set(inside) - set(rng.sample(inside, INNER_WALLS)))
    return Grid(frozenset(floor), frozenset(rng.sample(floor, BOXES)))


def _reachable(grid: Grid, position: Position) -> frozenset[Point]:
    """Return the cells that the player can reach without a push."""
    reached, queue = {position.player}, [position.player]
    while queue:
        point = queue.pop()
        adjacent = {
            _add(point, step) for step in STEPS.values()
        } & grid.floor - position.boxes - reached
        reached |= adjacent
        queue += adjacent
    return frozenset(reached)


def _sort_key(position: Position) -> tuple[Point, list[Point]]:
    return position.player, sorted(position.boxes)


def _add(point: Point, step: Point) -> Point:
    return (point[0] + step[0], point[1] + step[1])

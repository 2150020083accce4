"""Texts of a MiniHack level: the `full` rendering, and helpers of the `compact` renderings.

All functions are pure functions of a `View`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from crl.envs.actions import COMPASS
from crl.envs.minihack.view import UNSEEN, Cell, View

STAIRS, OPEN_DOOR, CLOSED_DOOR = "staircase down", "open door", "closed door"
_BLOCKED = ("wall", "water", CLOSED_DOOR)
WON = {"full": "You reach the stairs down.", "compact": "stairs reached."}
DIED = {"full": "You die.", "compact": "you died."}


def full(view: View, unseen: str = "not seen yet") -> str:
    """Return the full text of a view.

    The text starts with the game's message, if there is one. The map with fog of war, a legend of
    its symbols, and the hit points follow. The inventory is last, if the level reports one.
    `unseen` is the legend's name for cells that show nothing.
    """
    rows = grid(view)
    legend = "; ".join(
        f"{symbol} {' or '.join(names)}"
        for symbol, names in (_legend(view) | {UNSEEN: [unseen]}).items()
        if symbol in "".join(rows)
    )
    message = [view.message] if view.message else []
    inventory = [f"Inventory: {'; '.join(view.inventory.values())}"] if view.inventory else []
    return "\n".join(
        [
            *message,
            "Map:",
            *rows,
            f"Legend: {legend}",
            f"HP {view.hit_points}/{view.max_hit_points}",
            *inventory,
        ]
    )


def grid(view: View) -> tuple[str, ...]:
    """Return the map's rows, top first, with one character per cell."""
    return tuple("".join(cell.symbol for cell in row) for row in view.cells)


def cells(view: View) -> Iterator[tuple[tuple[int, int], Cell]]:
    """Yield ((x, y), cell) in reading order."""
    return (((x, y), cell) for y, row in enumerate(view.cells) for x, cell in enumerate(row))


def cell_at(view: View, point: tuple[int, int]) -> Cell | None:
    """Return the cell at (x, y), or None outside the window."""
    x, y = point
    return view.cells[y][x] if 0 <= y < len(view.cells) and 0 <= x < len(view.cells[y]) else None


def direction(start: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the compass direction of the first step of a straight walk, diagonals first.

    Raise `KeyError` if `start` equals `end`.
    """
    return _BY_STEP[_sign(end[0] - start[0]), _sign(end[1] - start[1])]


def compact(view: View, things: Mapping[str, str]) -> str:
    """Return the player's cell, the open directions, and the distances of the known things.

    The cell is given as row and column from 1. `things` maps names of cells to the names in the
    text:

        at 2 3 / open north east / key east 2 south 1 / door here        (" / " is a line break)
    """
    position = view.position
    lines = [
        f"at {position[1] + 1} {position[0] + 1}",
        f"open {' '.join(open_directions(view)) or 'nowhere'}",
    ]
    return "\n".join(
        [
            *lines,
            *(
                f"{things[cell.name]} {offset_text(position, point)}"
                for point, cell in cells(view)
                if cell.name in things
            ),
        ]
    )


def open_directions(view: View) -> list[str]:
    """Return the directions in which the player can step.

    Doors cannot be entered diagonally.
    """
    position, directions = view.position, []
    for name, (dx, dy) in COMPASS.items():
        cell = cell_at(view, (position[0] + dx, position[1] + dy))
        if (
            cell is not None
            and cell.kind != "unseen"
            and cell.name not in _BLOCKED
            and not (dx and dy and cell.name == OPEN_DOOR)
        ):
            directions.append(name)
    return directions


def offset_text(start: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the offset from `start` to `end`: `east 2 south 1`, or `here` if they are equal."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    parts = [f"{'east' if dx > 0 else 'west'} {abs(dx)}"] if dx else []
    parts += [f"{'south' if dy > 0 else 'north'} {abs(dy)}"] if dy else []
    return " ".join(parts) or "here"


def _legend(view: View) -> dict[str, list[str]]:
    """Return a map from symbol to its meanings on this map, in reading order.

    The player comes first, unseen cells come last.
    """
    legend: dict[str, list[str]] = {"@": ["you"]}
    for _, cell in sorted(cells(view), key=lambda item: item[1].symbol == UNSEEN):
        names = legend.setdefault(cell.symbol, [])
        if cell.name not in names:
            names.append(cell.name)
    return legend


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)


_BY_STEP = {step: name for name, step in COMPASS.items()}

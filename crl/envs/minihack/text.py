"""A MiniHack level in words: the `full` rendering for language models, and what the `compact` ones share. Pure functions of a `View`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from crl.envs.actions import COMPASS
from crl.envs.minihack.view import UNSEEN, Cell, View

STAIRS, OPEN_DOOR, CLOSED_DOOR = "staircase down", "open door", "closed door"
_BLOCKED = ("wall", "water", CLOSED_DOOR)
WON = {"full": "You reach the stairs down.", "compact": "stairs reached."}
DIED = {"full": "You die.", "compact": "you died."}


def full(view: View, unseen: str = "not seen yet") -> str:
    """The game's message if there is one, the map with its fog of war, what its symbols mean (`unseen`: those of cells that show
    nothing), the hit points, and the inventory where the level has one."""
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
    """The map's rows, top first, one character a cell."""
    return tuple("".join(cell.symbol for cell in row) for row in view.cells)


def cells(view: View) -> Iterator[tuple[tuple[int, int], Cell]]:
    """((x, y), cell) in reading order."""
    return (((x, y), cell) for y, row in enumerate(view.cells) for x, cell in enumerate(row))


def cell_at(view: View, at: tuple[int, int]) -> Cell | None:
    """The cell at (x, y), or None outside the window."""
    x, y = at
    return view.cells[y][x] if 0 <= y < len(view.cells) and 0 <= x < len(view.cells[y]) else None


def direction(start: tuple[int, int], end: tuple[int, int]) -> str:
    """The compass direction of the first step of a straight walk, diagonals first. Raises `KeyError` when start is end."""
    return _BY_STEP[_sign(end[0] - start[0]), _sign(end[1] - start[1])]


def compact(view: View, things: Mapping[str, str]) -> str:
    """Where you are (row and column from 1), where you can step, and how far the known things are; `things` names them by their cells'.

    at 2 3 / open north east / key east 2 south 1 / door here
    """
    here = view.position
    lines = [f"at {here[1] + 1} {here[0] + 1}", f"open {' '.join(open_ways(view)) or 'nowhere'}"]
    return "\n".join(
        [
            *lines,
            *(
                f"{things[cell.name]} {way(here, at)}"
                for at, cell in cells(view)
                if cell.name in things
            ),
        ]
    )


def open_ways(view: View) -> list[str]:
    """The directions of the cells next to the player that a step leads to. Doors are not entered diagonally."""
    here, ways = view.position, []
    for name, (dx, dy) in COMPASS.items():
        cell = cell_at(view, (here[0] + dx, here[1] + dy))
        if (
            cell is not None
            and cell.kind != "unseen"
            and cell.name not in _BLOCKED
            and not (dx and dy and cell.name == OPEN_DOOR)
        ):
            ways.append(name)
    return ways


def way(start: tuple[int, int], end: tuple[int, int]) -> str:
    """How many columns and rows end is from start: `east 2 south 1`; `here` when they are equal."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    parts = [f"{'east' if dx > 0 else 'west'} {abs(dx)}"] if dx else []
    parts += [f"{'south' if dy > 0 else 'north'} {abs(dy)}"] if dy else []
    return " ".join(parts) or "here"


def _legend(view: View) -> dict[str, list[str]]:
    """Symbol → what it stands for on this map, in reading order; you first, the unseen last."""
    legend: dict[str, list[str]] = {"@": ["you"]}
    for _, cell in sorted(cells(view), key=lambda item: item[1].symbol == UNSEEN):
        names = legend.setdefault(cell.symbol, [])
        if cell.name not in names:
            names.append(cell.name)
    return legend


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)


_BY_STEP = {step: name for name, step in COMPASS.items()}

"""The room in words. Pure functions of a `View`: `full` for real LLMs, `compact` for the bundled tiny models."""

from __future__ import annotations

from crl.envs.actions import COMPASS
from crl.envs.minihack import UNSEEN, Cell, View

STAIRS = "staircase down"
WON = {"full": "You reach the stairs down.", "compact": "stairs reached."}
DIED = {"full": "You die.", "compact": "you died."}
INVALID = {
    "full": f"That is not an action, and nothing happened. The actions are: {', '.join(COMPASS)}.",
    "compact": "unknown action.",
}


def full(view: View) -> str:
    """The game's message if there is one, the map with its fog of war, what its symbols mean, and the hit points."""
    rows = ["".join(cell.symbol for cell in row) for row in view.cells]
    legend = "; ".join(f"{symbol} {' or '.join(names)}" for symbol, names in _legend(view).items())
    message = [view.message] if view.message else []
    return "\n".join([*message, "Map:", *rows, f"Legend: {legend}", f"HP {view.hit_points}/{view.max_hit_points}"])


def compact(view: View) -> str:
    """Where you are (row and column from 1), where the stairs or else the dark is, and what is next to you.

    at 2 3 / dark east south / trap north / jackal west
    """
    here = view.position
    lines = [f"at {here[1] + 1} {here[0] + 1}"]
    stairs = next((at for at, cell in _cells(view) if cell.name == STAIRS), None)
    lines.append(f"stairs {direction(here, stairs)}" if stairs else f"dark {' '.join(_dark(view)) or 'nowhere'}")
    for name, (dx, dy) in COMPASS.items():
        cell = cell_at(view, (here[0] + dx, here[1] + dy))
        if cell is not None and cell.kind == "trap":
            lines.append(f"trap {name}")
        elif cell is not None and cell.kind == "creature":
            lines.append(f"{cell.name} {name}")
    return "\n".join(lines)


def grid(view: View) -> tuple[str, ...]:
    """The map's rows, top first, one character a cell."""
    return tuple("".join(cell.symbol for cell in row) for row in view.cells)


def cell_at(view: View, at: tuple[int, int]) -> Cell | None:
    """The cell at (x, y), or None outside the window."""
    x, y = at
    return view.cells[y][x] if 0 <= y < len(view.cells) and 0 <= x < len(view.cells[y]) else None


def direction(start: tuple[int, int], end: tuple[int, int]) -> str:
    """The compass direction of the first step of a straight walk, diagonals first. Raises `KeyError` when start is end."""
    return _BY_STEP[_sign(end[0] - start[0]), _sign(end[1] - start[1])]


def _dark(view: View) -> list[str]:
    """Directions in which the second cell is unseen (the first always is seen); else that of the nearest unseen cell."""
    x, y = view.position
    dark = []
    for name, (dx, dy) in COMPASS.items():
        cell = cell_at(view, (x + 2 * dx, y + 2 * dy))
        if cell is not None and cell.kind == "unseen":
            dark.append(name)
    if dark:
        return dark
    unseen = [at for at, cell in _cells(view) if cell.kind == "unseen"]
    nearest = min(unseen, key=lambda at: max(abs(at[0] - x), abs(at[1] - y)), default=None)
    return [direction(view.position, nearest)] if nearest else []


def _legend(view: View) -> dict[str, list[str]]:
    """Symbol → what it stands for on this map, in reading order; you first, the unseen last."""
    legend: dict[str, list[str]] = {"@": ["you"]}
    for _, cell in sorted(_cells(view), key=lambda item: item[1].symbol == UNSEEN):
        names = legend.setdefault(cell.symbol, [])
        if cell.name not in names:
            names.append(cell.name)
    return legend


def _cells(view: View) -> list[tuple[tuple[int, int], Cell]]:
    return [((x, y), cell) for y, row in enumerate(view.cells) for x, cell in enumerate(row)]


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)


_BY_STEP = {step: name for name, step in COMPASS.items()}

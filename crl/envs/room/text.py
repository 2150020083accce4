"""Compact rendering of the room, for the bundled tiny models."""

from __future__ import annotations

from crl.envs.actions import COMPASS
from crl.envs.minihack.text import STAIRS, cell_at, cells, direction
from crl.envs.minihack.view import View


def compact(view: View) -> str:
    """Return the compact text of a view.

    The text gives the agent's cell (row and column from 1), then the direction of the stairs, or
    else of dark cells. The traps and creatures next to the agent are last:

        at 2 3 / dark east south / trap north / jackal west        (" / " is a line break)
    """
    position = view.position
    lines = [f"at {position[1] + 1} {position[0] + 1}"]
    stairs = next((point for point, cell in cells(view) if cell.name == STAIRS), None)
    lines.append(
        f"stairs {direction(position, stairs)}"
        if stairs
        else f"dark {' '.join(_dark(view)) or 'nowhere'}"
    )
    for name, (dx, dy) in COMPASS.items():
        cell = cell_at(view, (position[0] + dx, position[1] + dy))
        if cell is not None and cell.kind == "trap":
            lines.append(f"trap {name}")
        elif cell is not None and cell.kind == "creature":
            lines.append(f"{cell.name} {name}")
    return "\n".join(lines)


def _dark(view: View) -> list[str]:
    """Return the directions in which the second cell is unseen (the first is always seen).

    If there are none, return the direction of the nearest unseen cell.
    """
    x, y = view.position
    dark = []
    for name, (dx, dy) in COMPASS.items():
        cell = cell_at(view, (x + 2 * dx, y + 2 * dy))
        if cell is not None and cell.kind == "unseen":
            dark.append(name)
    if dark:
        return dark
    unseen = [point for point, cell in cells(view) if cell.kind == "unseen"]
    nearest = min(unseen, key=lambda point: max(abs(point[0] - x), abs(point[1] - y)), default=None)
    return [direction(view.position, nearest)] if nearest else []

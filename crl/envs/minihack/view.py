"""View of a MiniHack level, as its player sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

CellKind = Literal["unseen", "plain", "trap", "creature", "object", "you"]

UNSEEN = "~"


@dataclass(frozen=True, slots=True)
class Cell:
    """Cell as the player sees or remembers it."""

    symbol: str
    name: str
    """NetHack's own description, without an article."""
    kind: CellKind


@dataclass(frozen=True, slots=True)
class View:
    """Copy of the visible state of a level."""

    cells: tuple[tuple[Cell, ...], ...]
    """`cells[y][x]`, from the window's top left.

    Cells that were never seen are of kind `unseen`. The game itself remembers seen cells (fog of
    war).
    """
    position: tuple[int, int]
    """Cell of the player, as (x, y) in the window."""
    hit_points: int
    """NetHack's hit points."""
    max_hit_points: int
    message: str
    """Last line of the game's messages, or empty."""
    inventory: Mapping[str, str] = field(default_factory=dict)
    """Letter → description. Empty unless the level was created with `INVENTORY`."""

"""What a player sees of a MiniHack level."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

CellKind = Literal["unseen", "plain", "trap", "creature", "object", "you"]

UNSEEN = "~"


@dataclass(frozen=True, slots=True)
class Cell:
    """One square as the player sees or remembers it. `name` is NetHack's own description, without an article."""

    symbol: str
    name: str
    kind: CellKind


@dataclass(frozen=True, slots=True)
class View:
    """What the player sees, copied. `cells[y][x]` from the window's top left; `position` is (x, y) there.

    Cells never seen are of kind `unseen`; seen ones are remembered by the game itself (fog of war). Hit points in
    NetHack's points. `message` is the game's last line, or empty. `inventory`: letter → what it is, where the level was asked for it.
    """

    cells: tuple[tuple[Cell, ...], ...]
    position: tuple[int, int]
    hit_points: int
    max_hit_points: int
    message: str
    inventory: Mapping[str, str] = field(default_factory=dict)

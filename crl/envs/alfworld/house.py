"""Content of a household game: receptacles, the things in them, and a chore.

Pure data. The module `pddl` turns it into a game.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
"""ALFWorld's six kinds of chore, with ALFRED's names."""

LAMPS = ("DeskLamp", "FloorLamp")
APPLIANCES = {
    "pick_clean_then_place_in_recep": "SinkBasin",
    "pick_heat_then_place_in_recep": "Microwave",
    "pick_cool_then_place_in_recep": "Fridge",
}


@dataclass(frozen=True)
class Chore:
    """Chore of a game. The types are ALFRED's."""

    kind: str
    thing: str
    """Type of the thing."""
    receptacle: str
    """Type of the destination.

    For the kind `look_at_obj_in_light` it is the type of the lamp.
    """


@dataclass(frozen=True)
class House:
    """Receptacles and things of a house, with its chore."""

    chore: Chore
    receptacles: tuple[str, ...]
    """Types of the receptacles."""
    things: tuple[tuple[str, int], ...]
    """(type, index of the receptacle that holds it) of every thing."""


_PHRASES = {
    "pick_and_place_simple": "put a {thing} in {receptacle}",
    "look_at_obj_in_light": "look at {thing} under the {receptacle}",
    "pick_clean_then_place_in_recep": "put a clean {thing} in {receptacle}",
    "pick_heat_then_place_in_recep": "put a hot {thing} in {receptacle}",
    "pick_cool_then_place_in_recep": "put a cool {thing} in {receptacle}",
    "pick_two_obj_and_place": "put two {thing} in {receptacle}",
}
_PATTERNS = (
    ("look_at_obj_in_light", r"(?:look at|examine) (?:the )?(\w+) (?:under|with|in) the (\w+)"),
    ("pick_two_obj_and_place", r"(?:put|find) two (\w+) (?:and put them )?(?:in|on) (\w+)"),
    (
        "pick_clean_then_place_in_recep",
        r"put a clean (\w+) in (\w+)|clean some (\w+) and put it in (\w+)",
    ),
    (
        "pick_heat_then_place_in_recep",
        r"put a hot (\w+) in (\w+)|heat some (\w+) and put it in (\w+)",
    ),
    (
        "pick_cool_then_place_in_recep",
        r"put a cool (\w+) in (\w+)|cool some (\w+) and put it in (\w+)",
    ),
    ("pick_and_place_simple", r"put (?:a|some) (\w+) (?:in|on) (\w+)"),
)


def phrase(chore: Chore) -> str:
    """Return the chore in ALFWorld's words, by the first of its templates."""
    return _PHRASES[chore.kind].format(
        thing=chore.thing.lower(), receptacle=chore.receptacle.lower()
    )


def read_chore(text: str) -> Chore:
    """Return the chore that a goal names in any of ALFWorld's templates.

    Its types are in lower case. Raise `ValueError` if the goal names no chore.
    """
    for kind, pattern in _PATTERNS:
        if match := re.search(pattern, text.lower()):
            thing, receptacle = (group for group in match.groups() if group)
            return Chore(kind, thing, receptacle)
    raise ValueError(f"the text names no chore: {text!r}")


def numbered(types: Sequence[str]) -> list[tuple[str, int]]:
    """Return (type, number) of each entry, in order.

    The entries of one type are numbered from 1: "cabinet 2" is ("Cabinet", 2).
    """
    seen: Counter[str] = Counter()
    names = []
    for kind in types:
        seen[kind] += 1
        names.append((kind, seen[kind]))
    return names

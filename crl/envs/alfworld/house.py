"""What a household game is about: a room, the things in it, and a chore. Pure data; `pddl` makes a game of it."""

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
"""ALFWorld's six kinds of chore, by ALFRED's names."""

LAMPS = ("DeskLamp", "FloorLamp")
APPLIANCES = {
    "pick_clean_then_place_in_recep": "SinkBasin",
    "pick_heat_then_place_in_recep": "Microwave",
    "pick_cool_then_place_in_recep": "Fridge",
}


@dataclass(frozen=True)
class Chore:
    """thing and receptacle: ALFRED's types; where the chore is to look at a thing in light, `receptacle` is the lamp's type."""

    kind: str
    thing: str
    receptacle: str


@dataclass(frozen=True)
class House:
    """receptacles: their types. things: (type, index of the receptacle that it is in)."""

    chore: Chore
    receptacles: tuple[str, ...]
    things: tuple[tuple[str, int], ...]


_PHRASES = {
    "pick_and_place_simple": "put a {thing} in {receptacle}",
    "look_at_obj_in_light": "look at {thing} under the {receptacle}",
    "pick_clean_then_place_in_recep": "put a clean {thing} in {receptacle}",
    "pick_heat_then_place_in_recep": "put a hot {thing} in {receptacle}",
    "pick_cool_then_place_in_recep": "put a cool {thing} in {receptacle}",
    "pick_two_obj_and_place": "put two {thing} in {receptacle}",
}
_READINGS = (
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
    """The chore as ALFWorld words it, in the first of its templates."""
    return _PHRASES[chore.kind].format(
        thing=chore.thing.lower(), receptacle=chore.receptacle.lower()
    )


def read_chore(text: str) -> Chore:
    """The chore that a goal names, in any of ALFWorld's templates; types in lower case. Raises `ValueError` when it names none."""
    for kind, pattern in _READINGS:
        if match := re.search(pattern, text.lower()):
            thing, receptacle = (group for group in match.groups() if group)
            return Chore(kind, thing, receptacle)
    raise ValueError(f"no chore in {text!r}")


def numbered(types: Sequence[str]) -> list[tuple[str, int]]:
    """(type, number from 1 among its like) of each, in order: "cabinet 2" is ("Cabinet", 2)."""
    seen: Counter[str] = Counter()
    names = []
    for kind in types:
        seen[kind] += 1
        names.append((kind, seen[kind]))
    return names

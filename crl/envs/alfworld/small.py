"""Small houses for tiny models: six receptacles each, which persist over visits.

A place's layout fixes the receptacles, the chore, and where the things are that the chore needs. An
agent can learn these facts, because the layout persists (see `crl.envs.places`). The dynamics fix
the other things. The module is pure Python, because the train stream makes goals where ALFWorld is
not imported.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from crl.envs.alfworld.house import APPLIANCES, KINDS, Chore, House
from crl.seeds import generator

RECEPTACLES = 6
_OTHER_THINGS = 4
"""Number of things that the chore does not need."""

HOLDS = {
    "Cabinet": "Bowl Cup Mug Plate Pot Pan",
    "CounterTop": "Apple Bread Bowl Cup Egg Fork Knife Mug Pan Plate Pot Potato Spoon Tomato",
    "DiningTable": "Apple Bread Bowl Cup Egg Fork Knife Mug Pan Plate Pot Potato Spoon Tomato",
    "Drawer": "Fork Knife Spoon Book CD CellPhone KeyChain Pen Pencil Watch",
    "Fridge": "Apple Bread Bowl Cup Egg Mug Pan Plate Pot Potato Tomato",
    "GarbageCan": "Apple Bread Egg Potato Tomato CD Pen Pencil",
    "Microwave": "Apple Bread Bowl Cup Egg Mug Plate Potato Tomato",
    "SinkBasin": "Apple Bowl Cup Egg Fork Knife Mug Pan Plate Pot Potato Spoon Tomato",
    "Desk": "Book CD CellPhone KeyChain Laptop Pen Pencil Watch Bowl Mug",
    "Dresser": "Book CD CellPhone KeyChain Laptop Pen Pencil Watch Bowl Mug",
    "SideTable": "Book CD CellPhone KeyChain Laptop Pen Pencil Watch Bowl Mug",
    "Shelf": "Book Bowl CD CellPhone KeyChain Pen Pencil Watch Mug",
    "Bed": "Book CellPhone Laptop",
    "Safe": "CD CellPhone KeyChain Watch",
}
"""Receptacle → things that it may hold: a part of ALFRED's table."""

_ROOM_RECEPTACLES = {
    "kitchen": (
        "Cabinet",
        "Cabinet",
        "CounterTop",
        "DiningTable",
        "Drawer",
        "Fridge",
        "GarbageCan",
        "Microwave",
        "SinkBasin",
    ),
    "bedroom": (
        "Bed",
        "Desk",
        "Drawer",
        "Drawer",
        "Dresser",
        "GarbageCan",
        "Safe",
        "Shelf",
        "Shelf",
        "SideTable",
    ),
}
_ROOMS_OF_CHORE = {
    kind: ("kitchen",) if kind in APPLIANCES else ("kitchen", "bedroom") for kind in KINDS
} | {"look_at_obj_in_light": ("bedroom",)}
SUITABLE_THINGS = {
    "pick_clean_then_place_in_recep": (
        "Apple Bowl Cup Egg Fork Knife Mug Pan Plate Pot Potato Spoon Tomato"
    ),
    "pick_heat_then_place_in_recep": "Apple Bread Cup Egg Mug Plate Potato Tomato",
    "pick_cool_then_place_in_recep": "Apple Bowl Bread Cup Egg Mug Pan Plate Pot Potato Tomato",
}
"""Kind of chore → things that can be cleaned, heated or cooled."""

_LAMP_STANDS = ("Desk", "SideTable", "Dresser")


def house(layout: int, dynamics: int | None) -> House:
    """Return the house of a layout, with the other things under these dynamics.

    None: the house holds only the things that the chore needs.
    """
    rng = generator(layout, "alfworld_small/layout")
    chore, receptacles, needed = _layout_content(rng)
    if dynamics is None:
        return House(chore, receptacles, tuple(needed))
    dynamics_rng = generator(layout, "alfworld_small/about", dynamics)
    kinds = sorted({thing for kind in receptacles for thing in _holds(kind)} - {chore.thing})
    others = [
        (thing, dynamics_rng.choice(_possible_receptacles(receptacles, thing)))
        for thing in dynamics_rng.sample(kinds, min(_OTHER_THINGS, len(kinds)))
    ]
    return House(chore, receptacles, (*needed, *others))


def _layout_content(rng: random.Random) -> tuple[Chore, tuple[str, ...], list[tuple[str, int]]]:
    """Return the chore, the receptacles, and the needed things with their receptacles."""
    kind = rng.choice(KINDS)
    room = list(_ROOM_RECEPTACLES[rng.choice(_ROOMS_OF_CHORE[kind])])
    needs_lamp = kind == "look_at_obj_in_light"
    while True:
        receptacles = tuple(sorted(rng.sample(room, RECEPTACLES)))
        suitable = SUITABLE_THINGS.get(kind, " ".join(HOLDS.values())).split()
        things = sorted(
            {thing for holder in receptacles for thing in _holds(holder)} & set(suitable)
        )
        goals = ["DeskLamp"] if needs_lamp else sorted(set(receptacles))
        lamp_stands = [i for i, holder in enumerate(receptacles) if holder in _LAMP_STANDS]
        thing, goal = rng.choice(things), rng.choice(goals)
        candidates = [
            i for i in _possible_receptacles(receptacles, thing) if receptacles[i] != goal
        ]
        fits = bool(lamp_stands) if needs_lamp else thing in _holds(goal)
        if fits and candidates and APPLIANCES.get(kind, receptacles[0]) in receptacles:
            break
    count = 2 if kind == "pick_two_obj_and_place" else 1
    needed = [(thing, rng.choice(candidates)) for _ in range(count)]
    if needs_lamp:
        needed.append((goal, rng.choice(lamp_stands)))
    return Chore(kind, thing, goal), receptacles, needed


def _holds(receptacle: str) -> list[str]:
    return HOLDS[receptacle].split()


def _possible_receptacles(receptacles: Sequence[str], thing: str) -> list[int]:
    return [i for i, kind in enumerate(receptacles) if thing in _holds(kind)]

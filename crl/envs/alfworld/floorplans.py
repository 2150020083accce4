"""Generated houses that follow ALFRED's floor plans.

A floor plan gives receptacles and things. ALFRED's tables give the receptacles that may hold a
thing. A house is a pure function of its use and its number. ALFRED places things in a simulator.
Here they are in random receptacles that may hold them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import alfworld.gen.constants as alfred  # pyright: ignore[reportMissingImports]
from alfworld.gen.constants import (  # pyright: ignore[reportMissingImports]
    VAL_ACTION_OBJECTS,
    VAL_RECEPTACLE_OBJECTS,
)

from crl.envs.alfworld.house import APPLIANCES, KINDS, LAMPS, Chore, House
from crl.seeds import generator

UNSEEN_PLANS = (10, 219, 308, 424)
"""Floor plans of the unseen split: a kitchen, living room, bedroom and bathroom.

They are the floor plans of ALFRED's unseen validation split.
"""

_UNLISTED_RECEPTACLES = {"CoffeeMachine": 1, "Toaster": 1, "StoveBurner": 4}
"""Receptacles that the layouts do not list → number of them in a floor plan.

They are present if the floor plan's list of objects names them.
"""
_MAX_PER_TYPE = 3
"""Maximum number of receptacles of one type, while floor plans have up to 30.

With this maximum, games have about as many receptacles as ALFWorld's own, where many receptacles
cannot be reached.
"""
_MAX_OTHER_TYPES = 16
"""Maximum number of types of things that the chore does not need."""
_LAMP_STANDS = ("Desk", "SideTable", "Dresser", "CoffeeTable", "DiningTable", "Shelf")
_PROPERTY = {
    "pick_clean_then_place_in_recep": "Cleanable",
    "pick_heat_then_place_in_recep": "Heatable",
    "pick_cool_then_place_in_recep": "Coolable",
}
_UNUSED_THINGS = {"Box", "Statue"}
"""Things in ALFRED's floor plans that its chores do not use."""


@dataclass(frozen=True)
class FloorPlan:
    """Floor plan of ALFRED. All names are ALFRED's types."""

    number: int
    receptacles: tuple[str, ...]
    """Types of the receptacles. A type occurs once for each receptacle."""
    things: tuple[str, ...]
    """Types of the things."""
    lamps: tuple[str, ...]
    """Types of the lamps."""


def house(use: str, number: int) -> House:
    """Return the house with this number of a use.

    A use is the draw name of a split (`crl.types.SPLIT_DRAW_NAMES`): "train", "known" or "new".
    "train" and "known" share their floor plans, but not their chores and the places of things. The
    kinds of chore take turns.
    """
    rng = generator(0, f"alfworld/{use}", number)
    kind = KINDS[number % len(KINDS)]
    plans = [plan for plan in (_unseen() if use == "new" else _seen()) if chores(plan, kind)]
    plan = rng.choice(plans)
    chore = rng.choice(chores(plan, kind))
    return House(chore, plan.receptacles, _place_things(plan, chore, rng))


@cache
def floor_plans() -> tuple[FloorPlan, ...]:
    """Return ALFRED's 120 floor plans, by number."""
    folder = Path(str(alfred.__file__)).parent / "layouts"
    numbers = sorted(
        int(path.name.removeprefix("FloorPlan").removesuffix("-objects.json"))
        for path in folder.glob("*-objects.json")
    )
    return tuple(_floor_plan(folder, number) for number in numbers)


@cache
def _unseen() -> tuple[FloorPlan, ...]:
    return tuple(plan for plan in floor_plans() if plan.number in UNSEEN_PLANS)


@cache
def _seen() -> tuple[FloorPlan, ...]:
    """Return the other floor plans, except those that only differ from an unseen one in number.

    Floor plans 412 and 428 are like 424.
    """
    return tuple(
        plan
        for plan in floor_plans()
        if not any(replace(plan, number=unseen.number) == unseen for unseen in _unseen())
    )


def _floor_plan(folder: Path, number: int) -> FloorPlan:
    named = set(json.loads((folder / f"FloorPlan{number}-objects.json").read_text("utf-8")))
    places = json.loads((folder / f"FloorPlan{number}-openable.json").read_text("utf-8"))
    receptacles = [place.split("|")[-1 if place.endswith("Basin") else 0] for place in places]
    receptacles += [
        kind for kind, count in _UNLISTED_RECEPTACLES.items() if kind in named for _ in range(count)
    ]
    counts = Counter(kind for kind in receptacles if kind in VAL_RECEPTACLE_OBJECTS)
    receptacles = [kind for kind in sorted(counts) for _ in range(min(counts[kind], _MAX_PER_TYPE))]
    possible = set().union(*(VAL_RECEPTACLE_OBJECTS[kind] for kind in receptacles)) - _UNUSED_THINGS
    lamps = [kind for kind in LAMPS if kind in named and set(_LAMP_STANDS) & set(receptacles)]
    return FloorPlan(number, tuple(receptacles), tuple(sorted(named & possible)), tuple(lamps))


@cache
def chores(plan: FloorPlan, kind: str) -> tuple[Chore, ...]:
    """Return all chores of a kind that the floor plan allows."""
    if kind == "look_at_obj_in_light":
        return tuple(Chore(kind, thing, lamp) for lamp in plan.lamps for thing in plan.things)
    if kind in APPLIANCES and APPLIANCES[kind] not in plan.receptacles:
        return ()
    suitable = VAL_ACTION_OBJECTS[_PROPERTY[kind]] if kind in _PROPERTY else set(plan.things)
    return tuple(
        Chore(kind, thing, receptacle)
        for thing in plan.things
        for receptacle in sorted(set(plan.receptacles))
        if thing in suitable
        and thing in VAL_RECEPTACLE_OBJECTS[receptacle]
        and _possible_receptacles(plan, thing, receptacle)
    )


def _possible_receptacles(plan: FloorPlan, thing: str, excluded: str = "") -> list[int]:
    """Return the indices of the receptacles that may hold the thing.

    Receptacles of the type `excluded` are left out.
    """
    return [
        i
        for i, kind in enumerate(plan.receptacles)
        if thing in VAL_RECEPTACLE_OBJECTS[kind] and kind != excluded
    ]


def _place_things(plan: FloorPlan, chore: Chore, rng: random.Random) -> tuple[tuple[str, int], ...]:
    """Return (type, index of the receptacle) of all things.

    There are one to three things of the wanted type (at least two if the chore needs two), none of
    them at the chore's destination. There are one or two things of each other type.
    """
    placed = [
        (lamp, rng.choice([i for i, kind in enumerate(plan.receptacles) if kind in _LAMP_STANDS]))
        for lamp in plan.lamps
    ]
    sources = _possible_receptacles(plan, chore.thing, chore.receptacle)
    count = rng.randint(2 if chore.kind == "pick_two_obj_and_place" else 1, 3)
    placed += [(chore.thing, rng.choice(sources)) for _ in range(count)]
    others = [thing for thing in plan.things if thing != chore.thing]
    for thing in rng.sample(others, min(_MAX_OTHER_TYPES, len(others))):
        placed += [
            (thing, rng.choice(_possible_receptacles(plan, thing)))
            for _ in range(rng.randint(1, 2))
        ]
    return tuple(placed)

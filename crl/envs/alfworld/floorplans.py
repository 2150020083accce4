"""Generated houses that follow ALFRED's floor plans: the receptacles of a room, what lies in it, and where that may lie.

A house is a pure function of its number and of its use. ALFRED poses its things in a simulator; here they lie in random receptacles
that may hold them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import alfworld.gen.constants as alfred  # pyright: ignore[reportMissingImports]
from alfworld.gen.constants import VAL_ACTION_OBJECTS, VAL_RECEPTACLE_OBJECTS  # pyright: ignore[reportMissingImports]

from crl.envs.alfworld.house import APPLIANCES, KINDS, LAMPS, Chore, House
from crl.seeds import generator

UNSEEN = (10, 219, 308, 424)
"""Floor plans of the `new` eval, one of each kind of room: those of ALFRED's unseen validation."""

_STANDING = {"CoffeeMachine": 1, "Toaster": 1, "StoveBurner": 4}
"""Receptacles that the layouts do not list, and how many stand where a floor plan's objects name them."""
_MOST_ALIKE = 3
"""Receptacles of one type, in place of up to 30: games then have about as many as ALFWorld's own, where many cannot be reached."""
_MOST_OTHERS = 16
"""Types of things that lie about beside what the chore is about."""
_LAMP_STANDS = ("Desk", "SideTable", "Dresser", "CoffeeTable", "DiningTable", "Shelf")
_PROPERTY = {
    "pick_clean_then_place_in_recep": "Cleanable",
    "pick_heat_then_place_in_recep": "Heatable",
    "pick_cool_then_place_in_recep": "Coolable",
}
_NOT_CARRIED = {"Box", "Statue"}
"""Things that ALFRED's floor plans name and its chores are not about."""


@dataclass(frozen=True)
class FloorPlan:
    """receptacles and things: ALFRED's types; a type that occurs twice stands there twice."""

    number: int
    receptacles: tuple[str, ...]
    things: tuple[str, ...]
    lamps: tuple[str, ...]


def house(use: str, number: int) -> House:
    """The house with this number among those of a use, "train", "known" or "new": floor plans are shared by the first two, chores and
    places of things are not. Kinds of chore take turns."""
    rng = generator(0, f"alfworld/{use}", number)
    kind = KINDS[number % len(KINDS)]
    plans = [plan for plan in (_unseen() if use == "new" else _seen()) if chores(plan, kind)]
    plan = rng.choice(plans)
    chore = rng.choice(chores(plan, kind))
    return House(chore, plan.receptacles, _placed(plan, chore, rng))


@cache
def floor_plans() -> tuple[FloorPlan, ...]:
    """ALFRED's 120 floor plans, by number."""
    folder = Path(str(alfred.__file__)).parent / "layouts"
    numbers = sorted(
        int(path.name.removeprefix("FloorPlan").removesuffix("-objects.json"))
        for path in folder.glob("*-objects.json")
    )
    return tuple(_floor_plan(folder, number) for number in numbers)


@cache
def _unseen() -> tuple[FloorPlan, ...]:
    return tuple(plan for plan in floor_plans() if plan.number in UNSEEN)


@cache
def _seen() -> tuple[FloorPlan, ...]:
    """The others, without those that are like an unseen one but for their number (412 and 428 are like 424)."""
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
        kind for kind, count in _STANDING.items() if kind in named for _ in range(count)
    ]
    counts = Counter(kind for kind in receptacles if kind in VAL_RECEPTACLE_OBJECTS)
    receptacles = [kind for kind in sorted(counts) for _ in range(min(counts[kind], _MOST_ALIKE))]
    holdable = set().union(*(VAL_RECEPTACLE_OBJECTS[kind] for kind in receptacles)) - _NOT_CARRIED
    lamps = [kind for kind in LAMPS if kind in named and set(_LAMP_STANDS) & set(receptacles)]
    return FloorPlan(number, tuple(receptacles), tuple(sorted(named & holdable)), tuple(lamps))


@cache
def chores(plan: FloorPlan, kind: str) -> tuple[Chore, ...]:
    """Every chore of a kind that the floor plan allows."""
    if kind == "look_at_obj_in_light":
        return tuple(Chore(kind, thing, lamp) for lamp in plan.lamps for thing in plan.things)
    if kind in APPLIANCES and APPLIANCES[kind] not in plan.receptacles:
        return ()
    able = VAL_ACTION_OBJECTS[_PROPERTY[kind]] if kind in _PROPERTY else set(plan.things)
    return tuple(
        Chore(kind, thing, receptacle)
        for thing in plan.things
        for receptacle in sorted(set(plan.receptacles))
        if thing in able
        and thing in VAL_RECEPTACLE_OBJECTS[receptacle]
        and _homes(plan, thing, receptacle)
    )


def _homes(plan: FloorPlan, thing: str, but: str = "") -> list[int]:
    """Receptacles that may hold the thing, those of one type left out."""
    return [
        i
        for i, kind in enumerate(plan.receptacles)
        if thing in VAL_RECEPTACLE_OBJECTS[kind] and kind != but
    ]


def _placed(plan: FloorPlan, chore: Chore, rng: random.Random) -> tuple[tuple[str, int], ...]:
    """One to three of the wanted thing, none of them where the chore wants it, among one or two of others."""
    placed = [
        (lamp, rng.choice([i for i, kind in enumerate(plan.receptacles) if kind in _LAMP_STANDS]))
        for lamp in plan.lamps
    ]
    away = _homes(plan, chore.thing, chore.receptacle)
    count = rng.randint(2 if chore.kind == "pick_two_obj_and_place" else 1, 3)
    placed += [(chore.thing, rng.choice(away)) for _ in range(count)]
    others = [thing for thing in plan.things if thing != chore.thing]
    for thing in rng.sample(others, min(_MOST_OTHERS, len(others))):
        placed += [(thing, rng.choice(_homes(plan, thing))) for _ in range(rng.randint(1, 2))]
    return tuple(placed)

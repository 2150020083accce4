"""Conversion of a `House` into a game of TextWorld.

The game consists of ALFRED's domain, ALFWorld's grammar, and a PDDL problem for the house.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from alfworld.gen.constants import (  # pyright: ignore[reportMissingImports]
    OPENABLE_CLASS_SET,
    VAL_ACTION_OBJECTS,
    VAL_RECEPTACLE_OBJECTS,
)
from alfworld.gen.goal_library import gdict  # pyright: ignore[reportMissingImports]
from alfworld.info import (  # pyright: ignore[reportMissingImports]
    ALFRED_PDDL_PATH,
    ALFRED_TWL2_PATH,
)

from crl.envs.alfworld.house import LAMPS, Chore, House, numbered, phrase

GameData = Mapping[str, object]
"""Content of a game.tw-pddl file."""

_NAMED_BY_DOMAIN = ("SinkBasin", "Microwave", "Fridge"), ("Knife", "ButterKnife")
"""Types of receptacles and of things that the domain's actions name.

Every problem must declare them.
"""

_PROPERTIES = {
    "Heatable": "heatable",
    "Coolable": "coolable",
    "Cleanable": "cleanable",
    "Toggleable": "toggleable",
}


def game_data(house: House) -> GameData:
    domain, grammar = _texts()
    return {
        "pddl_domain": domain,
        "grammar": grammar.replace("UNKNOWN GOAL", phrase(house.chore)),
        "pddl_problem": problem(house),
        "solvable": True,
        "walkthrough": None,
    }


def problem(house: House) -> str:
    receptacles = _ids(house.receptacles)
    things = _ids([kind for kind, _ in house.things])
    # the agent starts at the last location, which has no receptacle
    places = [f"loc_bar_{i}" for i in range(len(receptacles) + 1)]
    thing_types = sorted({kind for kind, _ in house.things} | set(_NAMED_BY_DOMAIN[1]))
    receptacle_types = sorted({*house.receptacles, *_NAMED_BY_DOMAIN[0]})
    objects = [
        "agent1 - agent",
        *(f"{place} - location" for place in places),
        *(f"{kind}Type - otype" for kind in thing_types),
        *(f"{kind}Type - rtype" for kind in receptacle_types),
        *(f"{name} - receptacle" for name in receptacles),
        *(f"{name} - object" for name in things),
    ]
    facts = [f"(atLocation agent1 {places[-1]})", "(= (total-cost) 0)"]
    for name, kind, place in zip(receptacles, house.receptacles, places, strict=False):
        facts += [f"(receptacleType {name} {kind}Type)", f"(receptacleAtLocation {name} {place})"]
        facts += [f"(openable {name})"] if kind in OPENABLE_CLASS_SET else []
        facts += [
            f"(canContain {kind}Type {other}Type)"
            for other in thing_types
            if other in VAL_RECEPTACLE_OBJECTS[kind]
        ]
    for name, (kind, index) in zip(things, house.things, strict=True):
        facts += [f"(objectType {name} {kind}Type)", f"(inReceptacle {name} {receptacles[index]})"]
        facts += [f"(objectAtLocation {name} {places[index]})"]
        facts += [] if kind in LAMPS else [f"(pickupable {name})"]
        facts += [
            f"({word} {name})"
            for group, word in _PROPERTIES.items()
            if kind in VAL_ACTION_OBJECTS[group]
        ]
    unique = "\n".join(dict.fromkeys(facts))
    listed = "\n".join(objects)
    return (
        f"(define (problem house)\n(:domain alfred)\n(:objects\n{listed}\n)\n"
        f"(:init\n{unique}\n)\n{_goal(house.chore)}"
    )


def _goal(chore: Chore) -> str:
    """Return the goal, with the parenthesis that closes the problem, as in ALFWorld's templates."""
    names = {"obj": chore.thing, "recep": chore.receptacle, "toggle": chore.receptacle}
    return gdict[chore.kind]["pddl"].format(**names).replace("#", "-")


def _ids(types: Sequence[str]) -> list[str]:
    """Return identifiers that ALFWorld's demangler turns into the names of `numbered`.

    The demangler numbers the entries of one type in reverse order.
    """
    counts = Counter(types)
    return [_id(kind, counts[kind] + 1 - number) for kind, number in numbered(types)]


def _id(kind: str, number: int) -> str:
    """Return an identifier. A basin's identifier has its whole and itself, as in ALFRED."""
    base_type = kind.removesuffix("Basin")
    return (
        f"{base_type}_bar_{number:02d}"
        if base_type == kind
        else f"{base_type}_bar_{number:02d}_bar_{kind}"
    )


@cache
def _texts() -> tuple[str, str]:
    """Return ALFRED's domain and ALFWorld's grammar."""
    return Path(ALFRED_PDDL_PATH).read_text("utf-8"), Path(ALFRED_TWL2_PATH).read_text("utf-8")

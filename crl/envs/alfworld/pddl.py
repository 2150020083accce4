"""A `House` as a game of TextWorld's: ALFRED's domain, ALFWorld's grammar, and the house as a PDDL problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from alfworld.gen.constants import OPENABLE_CLASS_SET, VAL_ACTION_OBJECTS, VAL_RECEPTACLE_OBJECTS  # pyright: ignore[reportMissingImports]
from alfworld.gen.goal_library import gdict  # pyright: ignore[reportMissingImports]
from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH  # pyright: ignore[reportMissingImports]

from crl.envs.alfworld.house import LAMPS, Chore, House, numbered, phrase

GameData = Mapping[str, object]
"""A game.tw-pddl file's content."""

_NAMED_BY_DOMAIN = ("SinkBasin", "Microwave", "Fridge"), ("Knife", "ButterKnife")
"""Types of receptacles and of things that the domain's actions name; every problem must declare them."""

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
    places = [
        f"loc_bar_{i}" for i in range(len(receptacles) + 1)
    ]  # the agent starts at one of its own
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
    for name, (kind, home) in zip(things, house.things, strict=True):
        facts += [f"(objectType {name} {kind}Type)", f"(inReceptacle {name} {receptacles[home]})"]
        facts += [f"(objectAtLocation {name} {places[home]})"]
        facts += [] if kind in LAMPS else [f"(pickupable {name})"]
        facts += [
            f"({word} {name})"
            for group, word in _PROPERTIES.items()
            if kind in VAL_ACTION_OBJECTS[group]
        ]
    unique = "\n".join(dict.fromkeys(facts))
    listed = "\n".join(objects)
    return f"(define (problem house)\n(:domain alfred)\n(:objects\n{listed}\n)\n(:init\n{unique}\n)\n{_goal(house.chore)}"


def _goal(chore: Chore) -> str:
    """Closes the problem's parenthesis too, as ALFWorld's templates do."""
    names = {"obj": chore.thing, "recep": chore.receptacle, "toggle": chore.receptacle}
    return gdict[chore.kind]["pddl"].format(**names).replace("#", "-")


def _ids(types: Sequence[str]) -> list[str]:
    """Identifiers that ALFWorld's demangler turns into the names of `numbered`; it counts like ones downwards."""
    counts = Counter(types)
    return [_id(kind, counts[kind] + 1 - number) for kind, number in numbered(types)]


def _id(kind: str, number: int) -> str:
    """A basin is named by its whole and itself, as ALFRED does."""
    whole = kind.removesuffix("Basin")
    return f"{whole}_bar_{number:02d}" if whole == kind else f"{whole}_bar_{number:02d}_bar_{kind}"


@cache
def _texts() -> tuple[str, str]:
    """ALFRED's domain and ALFWorld's grammar."""
    return Path(ALFRED_PDDL_PATH).read_text("utf-8"), Path(ALFRED_TWL2_PATH).read_text("utf-8")

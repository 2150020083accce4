"""Scripted player of ALFWorld. It reads only the texts, in either rendering."""

from __future__ import annotations

import random
import re

from crl.envs.alfworld.house import APPLIANCES, read_chore
from crl.envs.alfworld.text import compact
from crl.types import COMMANDS

_TREATMENTS = {
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
}

_CLOSED_TYPES = ("cabinet", "drawer", "fridge", "microwave", "safe")
"""Receptacles that need two commands before their content is seen."""


class AlfworldPlayer:
    """Player that searches for the thing, treats it as the chore asks, and puts it down.

    It visits the receptacles in random order, open ones first. It takes the thing and brings it to
    the destination. `seen` maps receptacles to the things that were seen in them.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def begin(self, goal: str, observation: str) -> None:
        self._chore = read_chore(goal)
        self._receptacles = compact(observation.split(COMMANDS)[0]).removeprefix("see ").split(", ")
        self._rng.shuffle(self._receptacles)
        self._receptacles.sort(key=lambda receptacle: receptacle.startswith(_CLOSED_TYPES))
        self.seen: dict[str, list[str]] = {}
        self._closed: set[str] = set()
        self._delivered: list[str] = []
        self._location, self._held, self._treated, self._target = "", "", False, ""

    def act(self) -> str:
        self._last_command = self._next_command()
        return self._last_command

    def observe(self, observation: str) -> None:
        words = compact(observation.split(COMMANDS)[0])
        if match := re.fullmatch(r"(?:go to|open) (.+)", self._last_command):
            self._location = match[1]
            self._closed.discard(self._location)
            if words == f"{self._location} closed":
                self._closed.add(self._location)
            elif words.startswith(f"{self._location}: "):
                self.seen[self._location] = words.partition(": ")[2].split(", ")
        elif match := re.fullmatch(r"take (.+) from (.+)", self._last_command):
            self._held = match[1]
            self.seen[match[2]].remove(match[1])
        elif match := re.fullmatch(r"move (.+) to (.+)", self._last_command):
            self._delivered.append(match[1])
            self._held = ""
        elif self._last_command.split()[0] in _TREATMENTS.values():
            self._treated = True

    def _next_command(self) -> str:
        return self._bring() if self._held else self._fetch()

    def _fetch(self) -> str:
        """Return the next command towards a thing of the wanted type that is not delivered yet."""
        for receptacle, things in self.seen.items():
            for thing in things:
                if _is_type(thing, self._chore.thing) and thing not in self._delivered:
                    return self._go_and_open(receptacle) or f"take {thing} from {receptacle}"
        return self._explore()

    def _bring(self) -> str:
        appliance = APPLIANCES.get(self._chore.kind)
        if appliance and not self._treated:
            receptacle = self._first_of_type(appliance.lower())
            return (
                self._go_to(receptacle)
                or f"{_TREATMENTS[self._chore.kind]} {self._held} with {receptacle}"
            )
        if self._chore.kind == "look_at_obj_in_light":
            return self._use_lamp()
        self._target = self._target or self._first_of_type(self._chore.receptacle)
        return self._go_and_open(self._target) or f"move {self._held} to {self._target}"

    def _use_lamp(self) -> str:
        for receptacle, things in self.seen.items():
            for thing in things:
                if _is_type(thing, self._chore.receptacle):
                    return self._go_to(receptacle) or f"use {thing}"
        return self._explore()

    def _explore(self) -> str:
        unseen = [receptacle for receptacle in self._receptacles if receptacle not in self.seen]
        if not unseen:
            return "look"
        return self._go_and_open(unseen[0]) or f"examine {unseen[0]}"

    def _go_and_open(self, receptacle: str) -> str:
        """Return the next command towards standing at an open receptacle.

        Return an empty text if the player already does.
        """
        return self._go_to(receptacle) or (
            f"open {receptacle}" if receptacle in self._closed else ""
        )

    def _go_to(self, receptacle: str) -> str:
        return "" if self._location == receptacle else f"go to {receptacle}"

    def _first_of_type(self, kind: str) -> str:
        return next(receptacle for receptacle in self._receptacles if _is_type(receptacle, kind))


def _is_type(name: str, kind: str) -> bool:
    """Return whether a thing is of a kind: "mug 2" is a mug."""
    return name.rpartition(" ")[0] == kind

"""Scripted player of ALFWorld. It reads only the texts, in either rendering."""

from __future__ import annotations

import random
import re

from crl.envs.alfworld.house import APPLIANCES, read_chore
from crl.envs.alfworld.text import COMMANDS, compact

_DONE = {
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
}

_SHUT = ("cabinet", "drawer", "fridge", "microwave", "safe")
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
        self._places = compact(observation.split(COMMANDS)[0]).removeprefix("see ").split(", ")
        self._rng.shuffle(self._places)
        self._places.sort(key=lambda place: place.startswith(_SHUT))
        self.seen: dict[str, list[str]] = {}
        self._closed: set[str] = set()
        self._put: list[str] = []
        self._here, self._held, self._treated, self._target = "", "", False, ""

    def act(self) -> str:
        self._last = self._next()
        return self._last

    def observe(self, observation: str) -> None:
        words = compact(observation.split(COMMANDS)[0])
        if match := re.fullmatch(r"(?:go to|open) (.+)", self._last):
            self._here = match[1]
            self._closed.discard(self._here)
            if words == f"{self._here} closed":
                self._closed.add(self._here)
            elif words.startswith(f"{self._here}: "):
                self.seen[self._here] = words.partition(": ")[2].split(", ")
        elif match := re.fullmatch(r"take (.+) from (.+)", self._last):
            self._held = match[1]
            self.seen[match[2]].remove(match[1])
        elif match := re.fullmatch(r"move (.+) to (.+)", self._last):
            self._put.append(match[1])
            self._held = ""
        elif self._last.split()[0] in _DONE.values():
            self._treated = True

    def _next(self) -> str:
        return self._bring() if self._held else self._fetch()

    def _fetch(self) -> str:
        """Return the next command towards a thing of the wanted type that is not delivered yet."""
        for place, things in self.seen.items():
            for thing in things:
                if _is(thing, self._chore.thing) and thing not in self._put:
                    return self._at(place) or f"take {thing} from {place}"
        return self._explore()

    def _bring(self) -> str:
        appliance = APPLIANCES.get(self._chore.kind)
        if appliance and not self._treated:
            place = self._first(appliance.lower())
            return self._go(place) or f"{_DONE[self._chore.kind]} {self._held} with {place}"
        if self._chore.kind == "look_at_obj_in_light":
            return self._light()
        self._target = self._target or self._first(self._chore.receptacle)
        return self._at(self._target) or f"move {self._held} to {self._target}"

    def _light(self) -> str:
        for place, things in self.seen.items():
            for thing in things:
                if _is(thing, self._chore.receptacle):
                    return self._go(place) or f"use {thing}"
        return self._explore()

    def _explore(self) -> str:
        unseen = [place for place in self._places if place not in self.seen]
        if not unseen:
            return "look"
        return self._at(unseen[0]) or f"examine {unseen[0]}"

    def _at(self, place: str) -> str:
        """Return the next command towards standing at an open receptacle.

        Return an empty text if the player already does.
        """
        return self._go(place) or (f"open {place}" if place in self._closed else "")

    def _go(self, place: str) -> str:
        return "" if self._here == place else f"go to {place}"

    def _first(self, kind: str) -> str:
        return next(place for place in self._places if _is(place, kind))


def _is(name: str, kind: str) -> bool:
    """Return whether a thing is of a kind: "mug 2" is a mug."""
    return name.rpartition(" ")[0] == kind

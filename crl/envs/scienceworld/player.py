"""Scripted players of ScienceWorld."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any

from crl.envs.scienceworld import text
from crl.envs.scienceworld.tasks import variations_with_goal

LIFESPANS = (
    "baby elephant",
    "baby brown bear",
    "crocodile egg",
    "parrot egg",
    "giant tortoise egg",
    "chameleon egg",
    "baby wolf",
    "baby beaver",
    "baby rabbit",
    "baby hedgehog",
    "baby chipmunk",
    "frog egg",
    "baby mouse",
    "baby dragonfly",
    "baby ant",
)
"""Animals of the task lifespan-longest-lived, the longest-lived first."""

LOCATIONS = (
    "art studio",
    "bathroom",
    "bedroom",
    "foundry",
    "greenhouse",
    "hallway",
    "kitchen",
    "living room",
    "outside",
    "workshop",
)
NON_LIVING = "axe"
"""Non-living thing that is outside in every variation."""

_GOAL = re.compile(r"\w+ \d+: (?:(animal|non-living thing) to (.+) in (.+)|longest life outside)\.")


class GoldPlayer:
    """Player of the simulator's gold path: `scienceworld`.

    It finds the variation by its goal and its first observation. Variations that share both have
    different gold paths, and the player may then follow the wrong one.
    """

    def __init__(self, rng: random.Random) -> None:
        self._actions: list[str] = []

    def begin(self, goal: str, observation: str) -> None:
        simulator = _simulator()
        for task, variation in variations_with_goal(goal):
            location = simulator.load(task, variation)
            if observation == text.first(location, simulator.inventory(), "full"):
                simulator.load(task, variation, gold=True)
                self._actions = list(reversed(simulator.gold_path()))
                return
        raise ValueError(f"no variation has the goal {goal!r} and this first observation")

    def act(self) -> str:
        return self._actions.pop() if self._actions else "look around"

    def observe(self, observation: str) -> None:
        """Ignore the observation. The simulator is deterministic."""


@cache
def _simulator() -> Any:
    """Return the simulator of this process that finds gold paths."""
    from crl.envs.scienceworld.engine import Simulator

    return Simulator()


class SmallPlayer:
    """Player of the tasks for tiny models. It reads both renderings.

    It goes outside, focuses on the right thing, and brings it to the box if there is one.
    `location` is that of the agent, "" if unknown. `seen` maps locations to the things that were
    seen in them. `focused` is the thing in focus, "" if there is none.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def begin(self, goal: str, observation: str) -> None:
        match = _GOAL.fullmatch(goal)
        if match is None:
            raise ValueError(f"not a goal of ScienceWorld for tiny models: {goal!r}")
        self._kind, self._box, self._box_location = match.groups()
        self.location, self.focused, self._held = "", "", False
        self.seen: dict[str, list[str]] = {}
        self.observe(observation)

    def act(self) -> str:
        if not self.location:
            return "look around"
        return self._bring() if self.focused else self._search()

    def observe(self, observation: str) -> None:
        first = observation.partition("\nIn your inventory")[0]
        words = text.compact(first)
        if text.has_moved(observation):
            self.location = ""
        elif (parts := words.partition(": "))[0] in LOCATIONS:
            self.location = parts[0]
            self.seen[self.location] = parts[2].split(", ")
        elif match := re.fullmatch(r"focus on (.+)", words):
            self.focused = match[1]
        elif words.startswith("took "):
            self._held = True

    def _search(self) -> str:
        if self.location != "outside":
            return "teleport to outside"
        return f"focus on {self._choice(self.seen[self.location])}"

    def _choice(self, things: list[str]) -> str:
        """Return the thing to focus on, of those that are outside."""
        if self._kind == "non-living thing":
            return NON_LIVING
        animals = [thing for thing in things if is_animal(thing)]
        if self._kind == "animal":
            return self._rng.choice(animals)
        return min(animals, key=LIFESPANS.index)

    def _bring(self) -> str:
        if self.location == self._box_location:
            return f"move {self.focused} to {self._box}"
        return f"teleport to {self._box_location}" if self._held else f"pick up {self.focused}"


def is_animal(thing: str) -> bool:
    """Return whether a thing is an animal, by its name."""
    return thing.startswith("baby ") or thing.endswith(" egg")

"""Simulation of small houses without TextWorld.

The bundled models can therefore be made without ALFWorld, and a thousand houses take a second. The
texts are identical to those of `AlfworldGame` in the compact rendering; a test plays both games and
compares them.
"""

from __future__ import annotations

from collections.abc import Sequence

from crl.envs.alfworld import small
from crl.envs.alfworld.house import APPLIANCES, LAMPS, numbered
from crl.envs.alfworld.text import INVALID, WON, chosen
from crl.types import StepResult, Task

_SHUT = ("Cabinet", "Drawer", "Fridge", "Microwave", "Safe")
"""Receptacles that are closed at the start."""
_TREATMENTS = {
    "pick_clean_then_place_in_recep": ("clean", "clean"),
    "pick_heat_then_place_in_recep": ("heat", "hot"),
    "pick_cool_then_place_in_recep": ("cool", "cool"),
}
"""Command and resulting state of the thing, by kind of chore."""


class SmallHouse:
    """`Game` of alfworld_small, with only the commands that demonstrators use.

    Things cannot be examined or sliced, and cannot be moved to receptacles where `small` does not
    place them.
    """

    def reset(self, task: Task) -> str:
        house = small.house(int(task.params["lgen"]), int(task.params["core"]))
        self._chore = house.chore
        self._receptacles = dict(zip(_names(house.receptacles), house.receptacles, strict=True))
        homes, kinds = list(self._receptacles), [kind for kind, _ in house.things]
        self._things = dict(zip(_names(kinds), kinds, strict=True))
        self.where = {
            name: homes[home] for name, (_, home) in zip(self._things, house.things, strict=True)
        }
        self._shut = {name for name, kind in self._receptacles.items() if kind in _SHUT}
        self._states = {name: set[str]() for name in self._things}
        self._here = self._held = ""
        return f"see {', '.join(sorted(self._receptacles, key=_as_engine))}"

    def step(self, action: str) -> StepResult:
        command = chosen(action, self.admissible)
        if command is None:
            return StepResult(INVALID["compact"], valid=False)
        said, won = self._do(command), self._won()
        return StepResult(WON["compact"] if won else said, done=won, success=won)

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    @property
    def admissible(self) -> tuple[str, ...]:
        """Currently admissible commands, sorted."""
        here, held = self._here, self._held
        may = [
            "look",
            "inventory",
            *(f"go to {name}" for name in self._receptacles if name != here),
        ]
        if not here:
            return tuple(sorted(may))
        kind, things = self._receptacles[here], self._in(here)
        may += [
            f"examine {here}",
            *(f"use {name}" for name in things if self._things[name] in LAMPS),
        ]
        if kind in _SHUT:
            may.append(f"open {here}" if here in self._shut else f"close {here}")
        if here not in self._shut and not held:
            may += [
                f"take {name} from {here}" for name in things if self._things[name] not in LAMPS
            ]
        if here not in self._shut and held and self._things[held] in small.HOLDS[kind].split():
            may.append(f"move {held} to {here}")
        for chore, (verb, _) in _TREATMENTS.items():
            if (
                held
                and kind == APPLIANCES[chore]
                and self._things[held] in small.ABLE[chore].split()
            ):
                may.append(f"{verb} {held} with {here}")
        return tuple(sorted(may))

    def _do(self, command: str) -> str:
        verb, *rest = command.split()
        match verb:
            case "look":
                return f"at {self._here}" if self._here else "see nothing"
            case "inventory":
                return f"have {self._held or 'nothing'}"
            case "go" | "open" | "examine":
                self._here = " ".join(rest[-2:])
                if verb == "open":
                    self._shut.remove(self._here)
                return (
                    f"{self._here} closed"
                    if self._here in self._shut
                    else f"{self._here}: {', '.join(self._in(self._here)) or 'nothing'}"
                )
            case "close":
                self._shut.add(self._here)
                return f"{self._here} closed"
            case "take":
                self._held = " ".join(rest[:2])
                self.where[self._held] = ""
                return f"took {self._held}"
            case "move":
                thing, self._held = self._held, ""
                self.where[thing] = self._here
                return f"{thing} in {self._here}"
            case "use":
                lamp = " ".join(rest)
                self._states[lamp].add("on")
                return f"{lamp} on"
        state = dict(_TREATMENTS.values())[verb]
        self._states[self._held] = self._states[self._held] - (
            {"hot", "cool"} if state != "clean" else set()
        ) | {state}
        return f"{self._held} {state}"

    def _in(self, receptacle: str) -> list[str]:
        return sorted(
            (name for name, where in self.where.items() if where == receptacle), key=_as_engine
        )

    def _won(self) -> bool:
        chore = self._chore
        if chore.kind == "look_at_obj_in_light":
            lit = any(
                "on" in self._states[name]
                for name in self._in(self._here)
                if self._things[name] == chore.receptacle
            )
            return lit and self._things.get(self._held) == chore.thing
        state = _TREATMENTS[chore.kind][1] if chore.kind in _TREATMENTS else None
        needed = 2 if chore.kind == "pick_two_obj_and_place" else 1
        wanted = [
            name
            for name, kind in self._things.items()
            if kind == chore.thing and state in (None, *self._states[name])
        ]
        homes = [
            self.where[name]
            for name in wanted
            if self._receptacles.get(self.where[name]) == chore.receptacle
        ]
        return any(homes.count(home) >= needed for home in homes)


def _names(kinds: Sequence[str]) -> list[str]:
    return [f"{kind.lower()} {number}" for kind, number in numbered(kinds)]


def _as_engine(name: str) -> tuple[str, int]:
    """Return the sort key of the engine's lists: by kind, then by descending number."""
    kind, _, number = name.partition(" ")
    return kind, -int(number)

"""Simulation of small houses without TextWorld.

The bundled models can therefore be made without ALFWorld, and a thousand houses take a second. The
texts are identical to those of `AlfworldGame` in the compact rendering; a test plays both games and
compares them.
"""

from __future__ import annotations

from collections.abc import Sequence

from crl.envs.alfworld import small
from crl.envs.alfworld.house import APPLIANCES, LAMPS, numbered
from crl.envs.alfworld.text import INVALID, WON, chosen_command
from crl.types import StepResult, Task

_OPENABLE = ("Cabinet", "Drawer", "Fridge", "Microwave", "Safe")
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
        receptacles, kinds = list(self._receptacles), [kind for kind, _ in house.things]
        self._things = dict(zip(_names(kinds), kinds, strict=True))
        self.locations = {
            name: receptacles[index]
            for name, (_, index) in zip(self._things, house.things, strict=True)
        }
        self._closed = {name for name, kind in self._receptacles.items() if kind in _OPENABLE}
        self._states = {name: set[str]() for name in self._things}
        self._here = self._held = ""
        return f"see {', '.join(sorted(self._receptacles, key=_engine_order))}"

    def step(self, action: str) -> StepResult:
        command = chosen_command(action, self.admissible)
        if command is None:
            return StepResult(INVALID["compact"], valid=False)
        text, won = self._execute(command), self._is_won()
        return StepResult(WON["compact"] if won else text, done=won, success=won)

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    @property
    def admissible(self) -> tuple[str, ...]:
        """Currently admissible commands, sorted."""
        here, held = self._here, self._held
        commands = [
            "look",
            "inventory",
            *(f"go to {name}" for name in self._receptacles if name != here),
        ]
        if not here:
            return tuple(sorted(commands))
        kind, things = self._receptacles[here], self._things_in(here)
        commands += [
            f"examine {here}",
            *(f"use {name}" for name in things if self._things[name] in LAMPS),
        ]
        if kind in _OPENABLE:
            commands.append(f"open {here}" if here in self._closed else f"close {here}")
        if here not in self._closed and not held:
            commands += [
                f"take {name} from {here}" for name in things if self._things[name] not in LAMPS
            ]
        if here not in self._closed and held and self._things[held] in small.HOLDS[kind].split():
            commands.append(f"move {held} to {here}")
        for chore, (verb, _) in _TREATMENTS.items():
            if (
                held
                and kind == APPLIANCES[chore]
                and self._things[held] in small.SUITABLE_THINGS[chore].split()
            ):
                commands.append(f"{verb} {held} with {here}")
        return tuple(sorted(commands))

    def _execute(self, command: str) -> str:
        verb, *rest = command.split()
        match verb:
            case "look":
                return f"at {self._here}" if self._here else "see nothing"
            case "inventory":
                return f"have {self._held or 'nothing'}"
            case "go" | "open" | "examine":
                self._here = " ".join(rest[-2:])
                if verb == "open":
                    self._closed.remove(self._here)
                return (
                    f"{self._here} closed"
                    if self._here in self._closed
                    else f"{self._here}: {', '.join(self._things_in(self._here)) or 'nothing'}"
                )
            case "close":
                self._closed.add(self._here)
                return f"{self._here} closed"
            case "take":
                self._held = " ".join(rest[:2])
                self.locations[self._held] = ""
                return f"took {self._held}"
            case "move":
                thing, self._held = self._held, ""
                self.locations[thing] = self._here
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

    def _things_in(self, receptacle: str) -> list[str]:
        return sorted(
            (name for name, location in self.locations.items() if location == receptacle),
            key=_engine_order,
        )

    def _is_won(self) -> bool:
        chore = self._chore
        if chore.kind == "look_at_obj_in_light":
            lit = any(
                "on" in self._states[name]
                for name in self._things_in(self._here)
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
        receptacles = [
            self.locations[name]
            for name in wanted
            if self._receptacles.get(self.locations[name]) == chore.receptacle
        ]
        return any(receptacles.count(receptacle) >= needed for receptacle in receptacles)


def _names(kinds: Sequence[str]) -> list[str]:
    return [f"{kind.lower()} {number}" for kind, number in numbered(kinds)]


def _engine_order(name: str) -> tuple[str, int]:
    """Return the sort key of the engine's lists: by kind, then by descending number."""
    kind, _, number = name.partition(" ")
    return kind, -int(number)

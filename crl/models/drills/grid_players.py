"""Demonstrators of the grids: scripted players, weaker versions, and followers of advice."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from crl.envs.base import ScriptedPlayer
from crl.envs.keyroom.player import KeyRoomPlayer
from crl.envs.minihack.player import At, around, walk

LATE = range(1, 7)
"""Turns after which a late player becomes skilled."""
MEMORY = range(2, 6)
"""Turns after which a forgetful player forgets."""


class Drifter:
    """Player that keeps a direction until it no longer leads anywhere, then chooses another one."""

    def __init__(self, rng: random.Random, actions: Sequence[str]) -> None:
        self._rng, self._actions = rng, actions
        self._seen, self._direction = "", ""

    def begin(self, goal: str, observation: str) -> None:
        self._seen, self._direction = observation, self._rng.choice(self._actions)

    def act(self) -> str:
        return self._direction

    def observe(self, observation: str) -> None:
        if observation == self._seen:
            self._direction = self._rng.choice(self._actions)
        self._seen = observation


class Changing:
    """Player that plays as `first` for some turns, then as `then`.

    `then` does not know the observations before the change.
    """

    def __init__(self, first: ScriptedPlayer, then: ScriptedPlayer, turns: int) -> None:
        self._player, self._then, self._turns = first, then, turns
        self._goal = ""

    def begin(self, goal: str, observation: str) -> None:
        self._goal = goal
        self._player.begin(goal, observation)

    def act(self) -> str:
        return self._player.act()

    def observe(self, observation: str) -> None:
        self._turns -= 1
        if self._turns == 0:
            self._player = self._then
            self._player.begin(self._goal, observation)
        else:
            self._player.observe(observation)


class ForgetfulPlayer:
    """Player that plays as another one, and forgets its observations every `memory` turns."""

    def __init__(self, player: ScriptedPlayer, memory: int) -> None:
        self._player, self._memory = player, memory
        self._goal, self._turn = "", 0

    def begin(self, goal: str, observation: str) -> None:
        self._goal, self._turn = goal, 0
        self._player.begin(goal, observation)

    def act(self) -> str:
        return self._player.act()

    def observe(self, observation: str) -> None:
        self._turn += 1
        if self._turn % self._memory:
            self._player.observe(observation)
        else:
            self._player.begin(self._goal, observation)


class WayFollower:
    """Player that follows the advised way until its end or a wall, then plays as `then`."""

    def __init__(self, way: Sequence[str], then: ScriptedPlayer) -> None:
        self._told, self._player = way, then
        self._way: list[str] = []
        self._seen = ""

    def begin(self, goal: str, observation: str) -> None:
        self._way, self._seen = list(self._told), observation
        self._player.begin(goal, observation)

    def act(self) -> str:
        return self._way.pop(0) if self._way else self._player.act()

    def observe(self, observation: str) -> None:
        if observation == self._seen:
            self._way = []  # the way led against a wall
        self._seen = observation
        self._player.observe(observation)


class PlaceFollower(KeyRoomPlayer):
    """Player that goes to the advised positions of the key and then of the door.

    It ignores the advice once it has seen the real object, the stairs or the advised cell.
    """

    def __init__(self, key: At, door: At, rng: random.Random) -> None:
        super().__init__(rng)
        self._told = {"key": key, "door": door}

    def act(self) -> str:
        known, told = (
            (self.door, self._told["door"]) if self._holding else (self.key, self._told["key"])
        )
        if known or self._stairs or told in self._inspected:
            return super().act()
        path = walk(
            self._here,
            lambda at: at in around(told),
            lambda _, to: self._may_be_floor(to),
            self._rng,
        )
        return path[0] if path else super().act()

    def _may_be_floor(self, at: At) -> bool:
        return at in self._floor or (
            at not in self._inspected and 1 <= at[0] <= 5 and 1 <= at[1] <= 5
        )


def players(
    skilled: Callable[[random.Random], ScriptedPlayer], actions: Sequence[str]
) -> tuple[Callable[[random.Random], ScriptedPlayer], ...]:
    """Return makers of the skilled, late, forgetful and drifting player."""

    def late(rng: random.Random) -> ScriptedPlayer:
        return Changing(Drifter(rng, actions), skilled(rng), rng.choice(LATE))

    def forgetful(rng: random.Random) -> ScriptedPlayer:
        return ForgetfulPlayer(skilled(rng), rng.choice(MEMORY))

    def drifter(rng: random.Random) -> ScriptedPlayer:
        return Drifter(rng, actions)

    return skilled, late, forgetful, drifter

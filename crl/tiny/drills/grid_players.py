"""Demonstrators of the grids: scripted players, weaker versions, and followers of advice."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from crl.envs.curriculum import ScriptedPlayer
from crl.envs.keyroom.player import KeyRoomPlayer
from crl.envs.minihack.player import Point, neighbours, shortest_walk

LATE_TURNS = range(1, 7)
"""Turns after which a late player becomes skilled."""
MEMORY_TURNS = range(2, 6)
"""Turns after which a forgetful player forgets."""


class Drifter:
    """Player that keeps a direction until it no longer leads anywhere, then chooses another one."""

    def __init__(self, rng: random.Random, actions: Sequence[str]) -> None:
        self._rng, self._actions = rng, actions
        self._observation, self._direction = "", ""

    def begin(self, goal: str, observation: str) -> None:
        self._observation, self._direction = observation, self._rng.choice(self._actions)

    def act(self) -> str:
        return self._direction

    def observe(self, observation: str) -> None:
        if observation == self._observation:
            self._direction = self._rng.choice(self._actions)
        self._observation = observation


class SwitchingPlayer:
    """Player that plays as `first` for some turns, then as `second`.

    `second` does not know the observations before the change.
    """

    def __init__(self, first: ScriptedPlayer, second: ScriptedPlayer, turns: int) -> None:
        self._player, self._second, self._turns = first, second, turns
        self._goal = ""

    def begin(self, goal: str, observation: str) -> None:
        self._goal = goal
        self._player.begin(goal, observation)

    def act(self) -> str:
        return self._player.act()

    def observe(self, observation: str) -> None:
        self._turns -= 1
        if self._turns == 0:
            self._player = self._second
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
    """Player that follows the advised way until its end or a wall, then plays as `fallback`."""

    def __init__(self, way: Sequence[str], fallback: ScriptedPlayer) -> None:
        self._advised_way, self._fallback = way, fallback
        self._remaining: list[str] = []
        self._observation = ""

    def begin(self, goal: str, observation: str) -> None:
        self._remaining, self._observation = list(self._advised_way), observation
        self._fallback.begin(goal, observation)

    def act(self) -> str:
        return self._remaining.pop(0) if self._remaining else self._fallback.act()

    def observe(self, observation: str) -> None:
        if observation == self._observation:
            self._remaining = []  # the way led against a wall
        self._observation = observation
        self._fallback.observe(observation)


class PlaceFollower(KeyRoomPlayer):
    """Player that goes to the advised positions of the key and then of the door.

    It ignores the advice once it has seen the real object, the stairs or the advised cell.
    """

    def __init__(self, key: Point, door: Point, rng: random.Random) -> None:
        super().__init__(rng)
        self._advised = {"key": key, "door": door}

    def act(self) -> str:
        seen, target = (
            (self.door, self._advised["door"])
            if self._holding
            else (self.key, self._advised["key"])
        )
        if seen or self._stairs or target in self._inspected:
            return super().act()
        path = shortest_walk(
            self._position,
            lambda at: at in neighbours(target),
            lambda _, to: self._may_be_floor(to),
            self._rng,
        )
        return path[0] if path else super().act()

    def _may_be_floor(self, at: Point) -> bool:
        return at in self._floor or (
            at not in self._inspected and 1 <= at[0] <= 5 and 1 <= at[1] <= 5
        )


def player_factories(
    skilled: Callable[[random.Random], ScriptedPlayer], actions: Sequence[str]
) -> tuple[Callable[[random.Random], ScriptedPlayer], ...]:
    """Return makers of the skilled, late, forgetful and drifting player."""

    def late(rng: random.Random) -> ScriptedPlayer:
        return SwitchingPlayer(Drifter(rng, actions), skilled(rng), rng.choice(LATE_TURNS))

    def forgetful(rng: random.Random) -> ScriptedPlayer:
        return ForgetfulPlayer(skilled(rng), rng.choice(MEMORY_TURNS))

    def drifter(rng: random.Random) -> ScriptedPlayer:
        return Drifter(rng, actions)

    return skilled, late, forgetful, drifter

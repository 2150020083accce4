"""A scripted player of the room that sees only its texts, in either rendering."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Sequence

from crl.envs.actions import COMPASS, parse_choice

At = tuple[int, int]

_SIZE = 5
_CELLS = frozenset((x, y) for x in range(_SIZE) for y in range(_SIZE))
_MAP = re.compile(r"^Map:\n(.+?)\nLegend: (.+)$", re.MULTILINE | re.DOTALL)
_AT = re.compile(r"^at (\d) (\d)$", re.MULTILINE)
_STAIRS = re.compile(r"^stairs (\w+)$", re.MULTILINE)
_TRAP = re.compile(r"^trap (\w+)$", re.MULTILINE)


class RoomPlayer:
    """Goes to the stairs when it has seen them, else to the nearest cell it has not, around traps.

    Remembers what it has seen, where it has been, and where the traps are; `here` and `stairs` (the cells that may be them)
    are (x, y) from the top left.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._forget()

    def begin(self, goal: str, observation: str) -> None:
        self._forget()
        self.observe(observation)

    def observe(self, observation: str) -> None:
        map_ = _MAP.search(observation)
        at = _AT.search(observation)
        if map_:
            self._read_map(map_[1].splitlines(), map_[2].splitlines()[0])
        elif at:
            self._read_words((int(at[2]) - 1, int(at[1]) - 1), observation)
        self._visited.add(self.here)

    def act(self) -> str:
        for wanted in (self.stairs, _CELLS - self._seen, _CELLS - self._visited):
            if wanted:
                step = self._first_step(wanted, avoid=self._traps) or self._first_step(wanted, avoid=set())
                if step:
                    return step
        return self._rng.choice(list(COMPASS))

    def _forget(self) -> None:
        self.here: At = (0, 0)
        self._seen: set[At] = set()
        self._visited: set[At] = set()
        self._traps: set[At] = set()
        self.stairs: set[At] = set()

    def _read_map(self, rows: list[str], legend: str) -> None:
        symbols = {entry[0]: entry[2:] for entry in legend.split("; ")}
        cells = {(x, y): symbol for y, row in enumerate(rows) for x, symbol in enumerate(row)}
        self.here = next(at for at, symbol in cells.items() if symbol == "@")
        self._seen = {at for at, symbol in cells.items() if symbols[symbol] != "not seen yet"}
        self._traps |= {at for at, symbol in cells.items() if "trap" in symbols[symbol]}
        self.stairs = {at for at, symbol in cells.items() if symbols[symbol] == "staircase down"}

    def _read_words(self, here: At, words: str) -> None:
        self.here = here
        near = {at for at in _CELLS if max(abs(at[0] - here[0]), abs(at[1] - here[1])) <= 1}
        fresh = near - self._seen
        self._seen |= near
        self._traps |= {_beside(here, name) for name in _TRAP.findall(words)}
        stairs = _STAIRS.search(words)
        if stairs:
            dx, dy = COMPASS[stairs[1]]
            possible = {at for at in self._seen if (_sign(at[0] - here[0]), _sign(at[1] - here[1])) == (dx, dy)}
            # stairs that show for the first time are not where there were none before
            self.stairs = (self.stairs & possible) or (fresh & possible) or possible

    def _first_step(self, wanted: set[At] | frozenset[At], avoid: set[At]) -> str | None:
        """The first step of a shortest walk to the nearest of `wanted`, ties at random; None when there is no way."""
        order = list(COMPASS)
        self._rng.shuffle(order)
        first: dict[At, str | None] = {self.here: None}
        queue = deque([self.here])
        while queue:
            at = queue.popleft()
            if at in wanted and first[at]:
                return first[at]
            for name in order:
                there = _beside(at, name)
                if there in _CELLS and there not in first and (there not in avoid or there in wanted):
                    first[there] = first[at] or name
                    queue.append(there)
        return None


def possible_stairs(turns: Sequence[tuple[bool, str]]) -> frozenset[At]:
    """The cells that may be the stairs, as far as an episode's compact texts tell; empty when they were never seen.

    turns: (whether the agent said it, text) in order; the last text may say that the stairs were reached. That alone does not tell
    where they are: who comes to stairs that it did not see beside it stepped on a teleporter.
    """
    player, last_action = RoomPlayer(random.Random(0)), None
    for said, words in turns:
        if said:
            last_action = parse_choice(words, tuple(COMPASS))
        elif words.startswith("stairs reached") and last_action:
            return frozenset(player.stairs & {_beside(player.here, last_action)} or player.stairs)
        else:
            player.observe(words)
    return frozenset(player.stairs)


def _beside(at: At, name: str) -> At:
    dx, dy = COMPASS[name]
    return (at[0] + dx, at[1] + dy)


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)

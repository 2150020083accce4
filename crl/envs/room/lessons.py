"""What can be said about a room in one sentence, for the bundled tiny models: lessons, the episode in few words, and the truth
that diagnostics hold them against.

A lesson must be copyable: an agent that is told "from the start go southeast." can do it as it stands. The other kinds are true,
useless or misleading; which of them are worth writing is what an extractor has to learn.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from functools import cache

from crl.envs.actions import COMPASS
from crl.envs.base import Verdict
from crl.envs.room.player import possible_stairs
from crl.types import Segment, Task

Cell = tuple[int, int]

LESSONS = {
    "exit": "from the start go {direction}.",
    "walk": "walk {direction} until the wall.",
    "explore": "look at dark cells first.",
    "stay": "stay near the start.",
    "back": "go back the way you came.",
    "lead": "stairs lead down.",
    "careful": "be careful.",
    "time": "every move takes time.",
}
"""The kinds of lesson, and their wording."""

FROM_HERE = "from here go {direction}."
"""What an agent that asks on its way is told. No kind of lesson: an episode teaches nothing that begins in the middle of it."""

_PATTERNS = {
    kind: re.compile(re.escape(text).replace(r"\{direction\}", "([a-z]+)"))
    for kind, text in LESSONS.items()
}
_CLOCKWISE = ("east", "southeast", "south", "southwest", "west", "northwest", "north", "northeast")


def lesson(kind: str, direction: str = "") -> str:
    """The lesson of this kind; `direction` is a name of `COMPASS`."""
    return LESSONS[kind].format(direction=direction)


def from_here(direction: str) -> str:
    """The answer to an agent on its way; `direction` is a name of `COMPASS`."""
    return FROM_HERE.format(direction=direction)


def bearing(start: Cell, end: Cell) -> str | None:
    """The compass direction nearest to the line from start to end, (x, y) with y growing to the south; None when they are equal."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    return _CLOCKWISE[round(math.atan2(dy, dx) / (math.pi / 4)) % 8] if dx or dy else None


def read(text: str) -> tuple[str, str | None]:
    """(kind, direction) of a lesson; kind "other" when it is none of these."""
    for kind, pattern in _PATTERNS.items():
        if match := pattern.fullmatch(text):
            direction = match[1] if match.groups() else None
            return (
                (kind, direction) if direction is None or direction in COMPASS else ("other", None)
            )
    return "other", None


# ── the episode in few words ────────────────────────────────────────────────────────────────────────────────────────

_AT = re.compile(r"^at (\d) (\d)$", re.MULTILINE)


def digest(segments: Sequence[Segment]) -> str:
    """What an episode of the compact room comes to, read off its texts alone: the moves, and where the stairs are from the start.

    moves east southeast / stairs southeast of the start        (or: stairs not seen)
    """
    moves = [segment.text.strip() for segment in segments if segment.origin == "policy"]
    seen = stairs_direction(segments)
    return f"moves {' '.join(moves)}\nstairs {f'{seen} of the start' if seen else 'not seen'}"


def stairs_direction(segments: Sequence[Segment]) -> str | None:
    """Where the stairs are from the start, as far as the episode's texts tell; None when they were not seen."""
    start = next(places(segments), None)
    if start is None:
        return None
    cells = possible_stairs(
        [
            (segment.origin == "policy", segment.text)
            for segment in segments
            if segment.origin in ("policy", "env")
        ]
    )
    if not cells:
        return None
    return bearing(start, min(cells, key=lambda at: (math.dist(at, start), at)))


def places(segments: Sequence[Segment]) -> Iterator[Cell]:
    """Where an episode's texts say that the agent is, in order: (x, y) from the room's top left."""
    found = (_AT.search(segment.text) for segment in segments if segment.origin == "env")
    return ((int(at[2]) - 1, int(at[1]) - 1) for at in found if at)


# ── the truth, for diagnostics alone ────────────────────────────────────────────────────────────────────────────────


class RoomAdvisor:
    """`Advisor` of the room: right advice is the direction of the stairs from the start."""

    def right(self, task: Task) -> str:
        direction = true_bearing(int(task.params["lgen"]))
        if direction is None:
            raise LookupError(f"nobody knows where the stairs of {task.params['place']} are")
        return lesson("exit", direction)

    def wrong(self, task: Task, rng: random.Random) -> str:
        right = true_bearing(int(task.params["lgen"]))
        return lesson("exit", rng.choice([name for name in COMPASS if name != right]))

    def judge(self, task: Task, text: str) -> Verdict:
        kind, direction = read(text)
        if kind != "exit":
            return Verdict(kind, correct=False)
        correct = direction == true_bearing(int(task.params["lgen"]))
        return Verdict("exit" if correct else "wrong exit", correct)

    def informative(self, segments: Sequence[Segment]) -> bool:
        return stairs_direction(segments) is not None


@cache
def true_bearing(lgen: int, here: Cell | None = None) -> str | None:
    """The direction of a layout's stairs from its start, or from `here`; None on them, and when they were never seen.

    Plays the game to find out.
    """
    from crl.envs.room.game import true_exit, true_start

    try:
        return bearing(here or true_start(lgen), true_exit(lgen))
    except LookupError:
        return None

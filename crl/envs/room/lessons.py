"""Lessons about a room for the bundled tiny models, episode digests, and the ground truth.

A lesson is one sentence. Diagnostics compare lessons with the ground truth. A useful lesson can be
followed literally: an agent that reads "from the start go southeast." can do exactly that. The
other kinds are true, useless or misleading. An extractor has to learn which kinds are worth
writing.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from functools import cache

from crl.envs.actions import COMPASS
from crl.envs.curriculum import LessonVerdict
from crl.envs.room.player import possible_stairs
from crl.types import Segment, Task

Point = tuple[int, int]

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
"""Kinds of lesson → their wording."""

FROM_HERE = "from here go {direction}."
"""Answer to an agent that asks in the middle of an episode.

It is not a kind of lesson, because no episode can teach a way that begins in its middle.
"""

_PATTERNS = {
    kind: re.compile(re.escape(text).replace(r"\{direction\}", "([a-z]+)"))
    for kind, text in LESSONS.items()
}
_CLOCKWISE = ("east", "southeast", "south", "southwest", "west", "northwest", "north", "northeast")


def lesson(kind: str, direction: str = "") -> str:
    """Return the lesson of this kind. `direction` is a name of `COMPASS`."""
    return LESSONS[kind].format(direction=direction)


def from_here(direction: str) -> str:
    """Return the answer to an agent that asks on its way. `direction` is a name of `COMPASS`."""
    return FROM_HERE.format(direction=direction)


def bearing(start: Point, end: Point) -> str | None:
    """Return the compass direction that is closest to the line from `start` to `end`.

    Return None if the cells are equal. Cells are (x, y), where y grows to the south.
    """
    dx, dy = end[0] - start[0], end[1] - start[1]
    return _CLOCKWISE[round(math.atan2(dy, dx) / (math.pi / 4)) % 8] if dx or dy else None


def read(text: str) -> tuple[str, str | None]:
    """Return (kind, direction) of a lesson. The direction is None if the lesson names none.

    The kind is "other" if the text is not one of `LESSONS`, or if its direction is not in
    `COMPASS`.
    """
    for kind, pattern in _PATTERNS.items():
        if match := pattern.fullmatch(text):
            direction = match[1] if match.groups() else None
            return (
                (kind, direction) if direction is None or direction in COMPASS else ("other", None)
            )
    return "other", None


# ── episode digests ───────────────────────────────────────────────────────────────────────────────

_POSITION = re.compile(r"^at (\d) (\d)$", re.MULTILINE)


def digest(segments: Sequence[Segment]) -> str:
    """Summarise an episode of the compact room, from its texts alone.

    The digest holds the moves, and the direction of the stairs from the start:

        moves east southeast
        stairs southeast of the start        (or: stairs not seen)
    """
    moves = [segment.text.strip() for segment in segments if segment.origin == "policy"]
    seen = stairs_direction(segments)
    return f"moves {' '.join(moves)}\nstairs {f'{seen} of the start' if seen else 'not seen'}"


def stairs_direction(segments: Sequence[Segment]) -> str | None:
    """Return the direction of the stairs from the start, as far as the episode's texts show it.

    Return None if the stairs were not seen.
    """
    start = next(visited_cells(segments), None)
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
    return bearing(start, min(cells, key=lambda point: (math.dist(point, start), point)))


def visited_cells(segments: Sequence[Segment]) -> Iterator[Point]:
    """Yield the cells where the agent was, according to an episode's texts, in order.

    Cells are (x, y) from the room's top left.
    """
    matches = (_POSITION.search(segment.text) for segment in segments if segment.origin == "env")
    return ((int(match[2]) - 1, int(match[1]) - 1) for match in matches if match)


# ── ground truth, for diagnostics only ────────────────────────────────────────────────────────────


class RoomAdvisor:
    """`Advisor` of the room. Right advice is the direction of the stairs from the start."""

    def right(self, task: Task) -> str:
        direction = true_stairs_direction(int(task.params["lgen"]))
        if direction is None:
            raise LookupError(f"the stairs of {task.params['place']} were not found")
        return lesson("exit", direction)

    def wrong(self, task: Task, rng: random.Random) -> str:
        right = true_stairs_direction(int(task.params["lgen"]))
        return lesson("exit", rng.choice([name for name in COMPASS if name != right]))

    def judge(self, task: Task, text: str) -> LessonVerdict:
        kind, direction = read(text)
        if kind != "exit":
            return LessonVerdict(kind, correct=False)
        correct = direction == true_stairs_direction(int(task.params["lgen"]))
        return LessonVerdict("exit" if correct else "wrong exit", correct)

    def informative(self, segments: Sequence[Segment]) -> bool:
        return stairs_direction(segments) is not None


@cache
def true_stairs_direction(lgen: int, origin: Point | None = None) -> str | None:
    """Return the direction of a layout's stairs from its start, or from `origin`.

    Return None if that cell holds the stairs, or if the stairs were not found. The function plays
    the game to find them.
    """
    from crl.envs.room.oracle import true_stairs, true_start

    try:
        return bearing(origin or true_start(lgen), true_stairs(lgen))
    except LookupError:
        return None

"""Lessons about a key room for the bundled tiny models, episode digests, and the ground truth.

A lesson is one sentence that gives the cells of the key and the door. The ground truth is only for
diagnostics. Lessons and digests give cells as row and column from 1, where 1 1 is the corner of the
outer wall, as in the compact texts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from crl.envs.actions import COMPASS, moves
from crl.envs.curriculum import LessonVerdict
from crl.envs.keyroom.player import KeyRoomPlayer
from crl.envs.minihack.player import Point
from crl.types import Segment, Task

_LESSON = re.compile(r"key at (\d) (\d), door at (\d) (\d)\.")


def lesson(key: Point, door: Point) -> str:
    """Return the lesson that gives the cells of the key and the door, as (x, y) from 0."""
    return f"key at {_row_column(key)}, door at {_row_column(door)}."


def read(text: str) -> tuple[Point, Point] | None:
    """Return the cells of the key and the door in a lesson, or None if it gives none."""
    match = _LESSON.fullmatch(text)
    if match is None:
        return None
    key_y, key_x, door_y, door_x = (int(number) - 1 for number in match.groups())
    return (key_x, key_y), (door_x, door_y)


def digest(segments: Sequence[Segment]) -> str:
    """Summarise an episode of the compact key room, from its texts alone.

    The digest holds the moves, and the cells of the key and the door:

        moves east pickup
        key at 2 5
        door not seen
    """
    seen = zip(("key", "door"), found_cells(segments), strict=True)
    lines = (
        f"{name} {f'at {_row_column(point)}' if point else 'not seen'}" for name, point in seen
    )
    return "\n".join([moves(segments, (*COMPASS, "pickup", "apply")), *lines])


def found_cells(segments: Sequence[Segment]) -> tuple[Point | None, Point | None]:
    """Return the cells of the key and the door, as far as an episode's compact texts show them.

    The key's cell is where the key lay before it was taken.
    """
    player = KeyRoomPlayer(random.Random(0))
    for segment in segments:
        if segment.origin == "env":
            player.observe(segment.text)
    return player.key, player.door


class KeyRoomAdvisor:
    """`Advisor` of the key room. Right advice gives the cells of the key and the door."""

    def right(self, task: Task) -> str:
        return lesson(*_truth(task))

    def wrong(self, task: Task, rng: random.Random) -> str:
        right = _truth(task)
        cells = [(x, y) for x in range(1, 6) for y in range(1, 6) if (x, y) not in right]
        key, door = rng.sample(cells, 2)
        return lesson(key, door)

    def judge(self, task: Task, text: str) -> LessonVerdict:
        cells = read(text)
        if cells is None:
            return LessonVerdict("other", correct=False)
        correct = cells == _truth(task)
        return LessonVerdict("places" if correct else "wrong places", correct)

    def informative(self, segments: Sequence[Segment]) -> bool:
        return None not in found_cells(segments)


def _truth(task: Task) -> tuple[Point, Point]:
    from crl.envs.keyroom.oracle import true_cells

    return true_cells(int(task.params["lgen"]))


def _row_column(point: Point) -> str:
    return f"{point[1] + 1} {point[0] + 1}"

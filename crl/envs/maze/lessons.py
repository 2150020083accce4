"""Lessons about a maze for the bundled tiny models, episode digests, and the ground truth.

A lesson is one sentence that describes the way to the stairs. The ground truth is only for
diagnostics.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from crl.envs.actions import COMPASS, moves, parse_choice
from crl.envs.curriculum import LessonVerdict
from crl.envs.maze.layout import SIZE
from crl.envs.maze.player import MazePlayer
from crl.envs.minihack.player import neighbour, read_position
from crl.types import Segment, Task

_LESSON = re.compile(r"from the start go ([a-z]+(?: [a-z]+)*)\.")


def lesson(way: Sequence[str]) -> str:
    """Return the lesson that describes a way, given step by step."""
    return f"from the start go {' '.join(way)}."


def read(text: str) -> list[str] | None:
    """Return the way that a lesson describes, step by step, or None if it describes none."""
    match = _LESSON.fullmatch(text)
    way = match[1].split() if match else []
    return way if way and set(way) <= set(COMPASS) else None


def digest(segments: Sequence[Segment]) -> str:
    """Summarise an episode of the compact maze, from its texts alone.

    The digest holds the moves, and the way to the stairs that they show:

        moves east east south north
        way east south south        (or: way not found)
    """
    way = found_way(segments)
    return f"{moves(segments, tuple(COMPASS))}\nway {' '.join(way) if way else 'not found'}"


def found_way(segments: Sequence[Segment]) -> list[str] | None:
    """Return the shortest way from the start to the stairs that an episode's compact texts show.

    Return None if they show none.
    """
    player, start, action = MazePlayer(random.Random(0)), None, None
    for segment in segments:
        if segment.origin == "policy":
            action = parse_choice(segment.text, tuple(COMPASS))
        elif segment.origin == "env" and segment.text.startswith("stairs reached") and action:
            player.stairs.add(neighbour(player.position, action))
        elif segment.origin == "env":
            player.observe(segment.text)
            start = start or read_position(segment.text)
    return player.way_to_stairs(start) if start else None


class MazeAdvisor:
    """`Advisor` of a maze of `size` cells.

    Right advice is a way from the start to the stairs.
    """

    def __init__(self, size: int = SIZE) -> None:
        self._size = size

    def right(self, task: Task) -> str:
        from crl.envs.maze.oracle import true_way

        return lesson(true_way(int(task.params["lgen"]), self._size))

    def wrong(self, task: Task, rng: random.Random) -> str:
        """Return a way with as many steps as the right one.

        Its first step leads into a wall.
        """
        from crl.envs.maze.oracle import true_maze, true_way

        start, corridors, _ = true_maze(int(task.params["lgen"]), self._size)
        first = rng.choice([name for name in COMPASS if neighbour(start, name) not in corridors])
        return lesson([first, *true_way(int(task.params["lgen"]), self._size)[1:]])

    def judge(self, task: Task, text: str) -> LessonVerdict:
        from crl.envs.maze.oracle import true_maze

        way = read(text)
        if way is None:
            return LessonVerdict("other", correct=False)
        point, corridors, stairs = true_maze(int(task.params["lgen"]), self._size)
        for name in way:
            point = end if (end := neighbour(point, name)) in corridors else point
            if point == stairs:
                return LessonVerdict("way", correct=True)
        return LessonVerdict("wrong way", correct=False)

    def informative(self, segments: Sequence[Segment]) -> bool:
        return found_way(segments) is not None

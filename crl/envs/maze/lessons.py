"""What can be said about a maze in one sentence, for the bundled tiny models: the way; and the truth, for diagnostics alone."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from crl.envs.actions import COMPASS, moves, parse_choice
from crl.envs.base import Verdict
from crl.envs.maze.player import SIZE, MazePlayer
from crl.envs.minihack.player import beside, read_at
from crl.types import Segment, Task

_LESSON = re.compile(r"from the start go ([a-z]+(?: [a-z]+)*)\.")


def lesson(way: Sequence[str]) -> str:
    """The lesson that tells a way, given step by step."""
    return f"from the start go {' '.join(way)}."


def read(text: str) -> list[str] | None:
    """The way that a lesson tells, step by step; None when it tells none."""
    match = _LESSON.fullmatch(text)
    way = match[1].split() if match else []
    return way if way and set(way) <= set(COMPASS) else None


def digest(segments: Sequence[Segment]) -> str:
    """What an episode of the compact maze comes to, read off its texts alone: the moves, and the way that it found.

    moves east east south north / way east south south        (or: way not found)
    """
    way = found_way(segments)
    return f"{moves(segments, tuple(COMPASS))}\nway {' '.join(way) if way else 'not found'}"


def found_way(segments: Sequence[Segment]) -> list[str] | None:
    """The shortest way from the start to the stairs in what an episode's compact texts tell; None when they do not tell it."""
    player, start, action = MazePlayer(random.Random(0)), None, None
    for segment in segments:
        if segment.origin == "policy":
            action = parse_choice(segment.text, tuple(COMPASS))
        elif segment.origin == "env" and segment.text.startswith("stairs reached") and action:
            player.stairs.add(beside(player.here, action))
        elif segment.origin == "env":
            player.observe(segment.text)
            start = start or read_at(segment.text)
    return player.way_to_stairs(start) if start else None


class MazeAdvisor:
    """`Advisor` of the maze of this size: right advice is a way from the start to the stairs."""

    def __init__(self, size: int = SIZE) -> None:
        self._size = size

    def right(self, task: Task) -> str:
        from crl.envs.maze.game import true_way

        return lesson(true_way(int(task.params["lgen"]), self._size))

    def wrong(self, task: Task, rng: random.Random) -> str:
        """As many steps as the right way has, the first of them not a way of the maze."""
        from crl.envs.maze.game import true_maze, true_way

        start, corridors, _ = true_maze(int(task.params["lgen"]), self._size)
        first = rng.choice([name for name in COMPASS if beside(start, name) not in corridors])
        return lesson([first, *true_way(int(task.params["lgen"]), self._size)[1:]])

    def judge(self, task: Task, text: str) -> Verdict:
        from crl.envs.maze.game import true_maze

        way = read(text)
        if way is None:
            return Verdict("other", correct=False)
        at, corridors, stairs = true_maze(int(task.params["lgen"]), self._size)
        for name in way:
            at = to if (to := beside(at, name)) in corridors else at
            if at == stairs:
                return Verdict("way", correct=True)
        return Verdict("wrong way", correct=False)

    def informative(self, segments: Sequence[Segment]) -> bool:
        return found_way(segments) is not None

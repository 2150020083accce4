"""What can be said about a key room in one sentence, for the bundled tiny models: where the key and the door are; and the truth, for
diagnostics alone.

Cells are row and column from 1, the corner of the outer wall being 1 1, as in the compact texts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from crl.envs.actions import COMPASS, moves
from crl.envs.base import Verdict
from crl.envs.keyroom.player import KeyRoomPlayer
from crl.envs.minihack.player import At
from crl.types import Segment, Task

_LESSON = re.compile(r"key at (\d) (\d), door at (\d) (\d)\.")


def lesson(key: At, door: At) -> str:
    """The lesson that tells where the key and the door are, (x, y) from 0."""
    return f"key at {_told(key)}, door at {_told(door)}."


def read(text: str) -> tuple[At, At] | None:
    """The key's and the door's cell in a lesson; None when it tells none."""
    match = _LESSON.fullmatch(text)
    if match is None:
        return None
    key_y, key_x, door_y, door_x = (int(number) - 1 for number in match.groups())
    return (key_x, key_y), (door_x, door_y)


def digest(segments: Sequence[Segment]) -> str:
    """What an episode of the compact key room comes to, read off its texts alone: the moves, and where the key and the door are.

    moves east pickup / key at 2 5 / door not seen
    """
    seen = zip(("key", "door"), found(segments), strict=True)
    places = (f"{name} {f'at {_told(at)}' if at else 'not seen'}" for name, at in seen)
    return "\n".join([moves(segments, (*COMPASS, "pickup", "apply")), *places])


def found(segments: Sequence[Segment]) -> tuple[At | None, At | None]:
    """Where the key lay and where the door is, as far as an episode's compact texts tell."""
    player = KeyRoomPlayer(random.Random(0))
    for segment in segments:
        if segment.origin == "env":
            player.observe(segment.text)
    return player.key, player.door


class KeyRoomAdvisor:
    """`Advisor` of the key room: right advice is where the key and the door are."""

    def right(self, task: Task) -> str:
        return lesson(*_truth(task))

    def wrong(self, task: Task, rng: random.Random) -> str:
        right = _truth(task)
        cells = [(x, y) for x in range(1, 6) for y in range(1, 6) if (x, y) not in right]
        key, door = rng.sample(cells, 2)
        return lesson(key, door)

    def judge(self, task: Task, text: str) -> Verdict:
        told = read(text)
        if told is None:
            return Verdict("other", correct=False)
        correct = told == _truth(task)
        return Verdict("places" if correct else "wrong places", correct)

    def informative(self, segments: Sequence[Segment]) -> bool:
        return None not in found(segments)


def _truth(task: Task) -> tuple[At, At]:
    from crl.envs.keyroom.game import true_places

    return true_places(int(task.params["lgen"]))


def _told(at: At) -> str:
    return f"{at[1] + 1} {at[0] + 1}"

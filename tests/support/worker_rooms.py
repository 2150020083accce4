"""The room with games in worker processes, for the bundled models."""

from __future__ import annotations

from dataclasses import replace

from crl.envs.base import Rendering, Runtime
from crl.envs.room import SPEC as ROOM
from crl.types import StepResult, Task

SPEC = replace(ROOM, runtime=Runtime("processes"))
SETTING = f"tasks.room.env={__name__}:SPEC"


class Broken:
    """Game whose steps raise."""

    def reset(self, task: Task) -> str:
        return "at 2 3"

    def step(self, action: str) -> StepResult:
        raise OSError("the game is broken")

    def close(self) -> None: ...


def make_broken(rendering: Rendering) -> Broken:
    return Broken()


BROKEN = replace(SPEC, make_game=make_broken)
BROKEN_SETTING = f"tasks.room.env={__name__}:BROKEN"

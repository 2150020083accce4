"""Game that every text plays: the number of its letters decides. For models without any skill."""

from __future__ import annotations

from crl.envs.actions import COMPASS
from crl.envs.base import ActionSpace, EnvSpec
from crl.envs.places import Places
from crl.types import StepResult, Task

PLACES = Places("letters", "Letters: the {place}. Say something even.")


class Letters:
    """Game of one or two turns. An even number of letters wins; an odd one may try again."""

    def reset(self, task: Task) -> str:
        self.turns = 0
        return "Say something."

    def step(self, action: str) -> StepResult:
        self.turns += 1
        even = sum(map(str.isalpha, action)) % 2 == 0
        return StepResult(
            "Even." if even else "Odd.", reward=float(even), done=even or self.turns == 2,
            success=even,
        )  # fmt: skip

    def close(self) -> None: ...


SPEC = EnvSpec(
    name="letters",
    make_game=lambda rendering: Letters(),
    tasks=PLACES.tasks,
    actions=ActionSpace(tuple(COMPASS)),
    turns=2,
)

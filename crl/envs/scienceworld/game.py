"""Game of ScienceWorld: an experiment in its simulator, played in text."""

from __future__ import annotations

from crl.envs.base import Rendering
from crl.envs.scienceworld import text
from crl.envs.scienceworld.engine import Simulator
from crl.types import StepResult, Task


class ScienceWorldGame:
    """`Game` of ScienceWorld. Not thread-safe.

    The rewards of an episode sum to its last score divided by 100. A failure has the score 0: the
    original's is -100. The first reward includes the points of the start position.
    """

    def __init__(self, rendering: Rendering) -> None:
        self._rendering: Rendering = rendering
        self._simulator = Simulator()
        self._rewarded = 0.0
        self._over = True

    def reset(self, task: Task) -> str:
        """Start the game that the task's params name. Raise `KeyError` if they name none."""
        location = self._simulator.load(str(task.params["task"]), int(task.params["variation"]))
        self._rewarded, self._over = 0.0, False
        return text.first(location, self._simulator.inventory(), self._rendering)

    def step(self, action: str) -> StepResult:
        """Play one action.

        Raise `RuntimeError` outside an episode, and `JvmEnded` if the JVM has ended.
        """
        if self._over:
            raise RuntimeError("the episode is over: call reset first")
        words = text.action(action, self._rendering)
        if words is None:
            return self._result(text.INVALID[self._rendering], valid=False)
        answer = self._simulator.step(words)
        return self._result(self._rendered(answer), valid=text.is_valid(answer))

    def close(self) -> None:
        self._over = True
        self._simulator.close()

    def _result(self, shown: str, *, valid: bool) -> StepResult:
        points = self._simulator.score
        score = max(points, 0) / 100
        reward, self._rewarded = score - self._rewarded, score
        won = points >= 100
        self._over = won or points < 0 or self._simulator.completed
        if self._over:
            shown = self._last_text(shown, won)
        return StepResult(shown, reward, self._over, won, valid, score)

    def _rendered(self, answer: str) -> str:
        if self._rendering == "full":
            return answer.strip()
        if text.has_moved(answer):  # saves tiny models an action
            return text.compact_location(self._simulator.look())
        return text.compact(answer)

    def _last_text(self, shown: str, won: bool) -> str:
        last = (text.WON if won else text.FAILED)[self._rendering]
        return last if self._rendering == "compact" else f"{shown}\n{last}"

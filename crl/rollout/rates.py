"""Success rate of the actor without experience: r̄_θ of CRL appendix B.1."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from crl.protocols import State
from crl.types import Task, Trajectory

MAX_GOALS = 4096
"""Maximal number of stored goals; the most recently seen ones are kept."""


class SuccessRates:
    """Success rates over the last `window` free episodes of a goal.

    Until a goal has `min_episodes` free episodes, the rate of its task is used. **Ours**: the paper
    accumulates all episodes. Here old episodes are dropped, because the actor changes as it learns.
    """

    def __init__(self, *, min_episodes: int, window: int) -> None:
        self._min_episodes, self._window = min_episodes, window
        self._tasks: dict[str, deque[bool]] = {}
        self._goals: dict[tuple[str, str], deque[bool]] = {}

    def observe(self, trajectories: Sequence[Trajectory]) -> int:
        """Record the free episodes of a finished batch, in order, and return their number.

        Episodes with an error are ignored.
        """
        free = [t for t in trajectories if t.condition == "free" and t.error is None]
        for t in free:
            goal = t.task.name, t.task.goal
            self._tasks.setdefault(t.task.name, self._new_outcomes()).append(t.success)
            self._goals[goal] = self._goals.pop(goal, self._new_outcomes())
            self._goals[goal].append(t.success)
        while len(self._goals) > MAX_GOALS:
            del self._goals[next(iter(self._goals))]
        return len(free)

    def rate(self, task: Task) -> float | None:
        """Return the rate in [0, 1], or None before the task's first free episode."""
        outcomes = self._goals.get((task.name, task.goal), ())
        if len(outcomes) < self._min_episodes:
            outcomes = self._tasks.get(task.name, ())
        return sum(outcomes) / len(outcomes) if outcomes else None

    def metrics(self) -> dict[str, float]:
        """Return the rate of each task."""
        return {
            name: sum(outcomes) / len(outcomes) for name, outcomes in sorted(self._tasks.items())
        }

    def state(self) -> State:
        """Return the outcomes of every task and goal, each as a string of 0 and 1."""
        goals = [
            [task, goal, _outcomes_text(outcomes)] for (task, goal), outcomes in self._goals.items()
        ]
        return {
            "tasks": {name: _outcomes_text(outcomes) for name, outcomes in self._tasks.items()},
            "goals": goals,
        }

    def load_state(self, state: State) -> None:
        self._tasks = {name: self._parse_outcomes(text) for name, text in state["tasks"].items()}
        self._goals = {
            (task, goal): self._parse_outcomes(text) for task, goal, text in state["goals"]
        }

    def _new_outcomes(self) -> deque[bool]:
        return deque(maxlen=self._window)

    def _parse_outcomes(self, text: str) -> deque[bool]:
        return deque((outcome == "1" for outcome in text), maxlen=self._window)


def _outcomes_text(outcomes: Sequence[bool] | deque[bool]) -> str:
    return "".join("1" if outcome else "0" for outcome in outcomes)

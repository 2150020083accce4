"""Train streams of environments with a fixed set of training tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from crl.protocols import State
from crl.seeds import generator
from crl.types import Task, Trajectory


class RoundStream:
    """`TaskSource` of a fixed number of tasks, in shuffled rounds.

    `make_task(number)` returns one of `size` tasks. `name` and the run's seed address the draws.
    """

    def __init__(self, name: str, seed: int, size: int, make_task: Callable[[int], Task]) -> None:
        self._name, self._seed, self._size, self._make_task = name, seed, size, make_task
        self._drawn = 0

    def __len__(self) -> int:
        """Return the number of tasks of a round."""
        return self._size

    def draw(self, n: int) -> Sequence[Task]:
        tasks = [self._task_at(self._drawn + i) for i in range(n)]
        self._drawn += n
        return tasks

    def _task_at(self, k: int) -> Task:
        number, position = divmod(k, self._size)
        order = list(range(self._size))
        generator(self._seed, f"{self._name}/round", number).shuffle(order)
        return self._make_task(order[position])

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        """Ignore the trajectories. The stream does not depend on them."""

    def state(self) -> State:
        return {"drawn": self._drawn}

    def load_state(self, state: State) -> None:
        self._drawn = int(state["drawn"])

"""Task streams whose episodes differ by a seed alone, for environments without persistent places.

Draws are addressed by (run seed, name, number), so task k of a stream is a pure function of k.
"""

from __future__ import annotations

from collections.abc import Sequence

from crl.envs.base import EnvTasks, StreamSettings
from crl.protocols import State
from crl.seeds import derive_seed
from crl.types import Split, Task, Trajectory

TRAIN_SEEDS = range(0, 1 << 30)
UNSEEN_SEEDS = range(1 << 30, 1 << 31)
"""Seeds of the unseen split, the same in every run. All seeds fit into numpy's 32 bits."""


class SeededTasks:
    """Tasks of an environment, all with the same goal. `tasks` is the value for its `EnvSpec`."""

    def __init__(self, env: str, goal: str) -> None:
        self._env, self._goal = env, goal

    @property
    def tasks(self) -> EnvTasks:
        """Train stream and eval tasks."""
        return EnvTasks(self.stream, self.eval_tasks)

    def stream(self, seed: int, settings: StreamSettings) -> SeedStream:
        """Return the train stream of the run with `seed`."""
        return SeedStream(self._env, self._goal, seed)

    def eval_tasks(
        self, split: Split, n: int, seed: int, settings: StreamSettings
    ) -> tuple[Task, ...]:
        """Return the first n tasks of the unseen split.

        Raise `ValueError` for the seen split, which does not exist.
        """
        if split != "unseen":
            raise ValueError(
                f"{self._env} has no persistent places, so it cannot be evaluated "
                "on the seen split: set eval.seen to 0"
            )
        return tuple(Task(self._env, s, "unseen", self._goal) for s in UNSEEN_SEEDS[:n])


class SeedStream:
    """`TaskSource` that draws a seed for every task."""

    def __init__(self, env: str, goal: str, seed: int) -> None:
        self._env, self._goal, self._seed = env, goal, seed
        self._drawn = 0

    def draw(self, n: int) -> Sequence[Task]:
        numbers = range(self._drawn, self._drawn + n)
        self._drawn += n
        return [
            Task(
                self._env,
                TRAIN_SEEDS[derive_seed(self._seed, self._env, k) % len(TRAIN_SEEDS)],
                "train",
                self._goal,
            )
            for k in numbers
        ]

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        """Ignore the trajectories. The stream does not depend on them."""

    def state(self) -> State:
        return {"drawn": self._drawn}

    def load_state(self, state: State) -> None:
        self._drawn = int(state["drawn"])

"""Cost of a run's training episodes so far. It allows comparisons of runs at equal budgets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from crl.types import Minibatch, Trajectory


@dataclass
class Totals:
    """Sums over all training episodes, including failed ones and the critic's warm-up.

    Evaluations and advice probes are not counted: they measure a run and do not train it.
    """

    env_turns: int = 0
    """Environment turns, overtime included."""
    overtime_turns: int = 0
    """Environment turns in overtime."""
    actor_tokens: int = 0
    """Tokens sampled by the actor, in episodes (overtime included) and as a critic."""
    actor_trained_tokens: int = 0
    """Tokens of the sequences on which the actor was trained: prompts and answers."""
    errors: int = 0
    """Episodes that failed with an error."""
    step_seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Wall time of the steps without evaluations and probes, and a part of it.

    In this part the model that writes the bank was asked, or tasks were retrieved.
    """
    attempted: int = 0
    """Groups whose members were attempts, one after the other."""
    solved: list[int] = field(default_factory=list)
    """Number of these groups that succeeded within 1, 2, … attempts."""

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        for trajectory in trajectories:
            activity = trajectory.activity
            self.env_turns += activity.turns + activity.overtime_turns
            self.overtime_turns += activity.overtime_turns
            self.actor_tokens += activity.sampled_tokens
            self.errors += trajectory.error is not None

    def add_training(self, minibatches: Iterable[Minibatch]) -> None:
        self.actor_trained_tokens += sum(minibatch.sequence_tokens for minibatch in minibatches)

    def add_attempts(self, groups: int, solved: Sequence[int]) -> None:
        """Add the groups of a step. `solved`: how many succeeded within 1, 2, … attempts."""
        self.attempted += groups
        self.solved = [a + b for a, b in zip_longest(self.solved, solved, fillvalue=0)]

    def add_step(self, seconds: float, distil_seconds: float) -> None:
        """Add the wall time of a step, and the part of it that was used for the bank."""
        self.step_seconds[0] += seconds
        self.step_seconds[1] += distil_seconds

    def metrics(self) -> dict[str, float]:
        return {
            "total/env_turns": self.env_turns,
            "total/env_turns/overtime": self.overtime_turns,
            "total/sampled_tokens/actor": self.actor_tokens,
            "total/trained_tokens/actor": self.actor_trained_tokens,
        }

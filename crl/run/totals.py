"""Cost of a run's training episodes so far. It allows comparisons of runs at equal budgets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from crl.types import Minibatch, RoleName, Trajectory
from crl.wording import counted


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

    def attempts_line(self) -> str:
        """Return the line of a run's summary on attempts; empty without any."""
        if not self.attempted:
            return ""
        shares = ", ".join(f"{n / self.attempted:.3f}" for n in self.solved)
        within = counted(len(self.solved), "attempt")
        return f"success within 1 to {within}, {counted(self.attempted, 'task')}: {shares}"

    def time_line(self) -> str:
        """Return the line of a run's summary on the time of the steps; empty without any."""
        seconds, distil_seconds = self.step_seconds
        if not seconds:
            return ""
        return (
            f"time of the steps: {seconds:.0f} s; calls of the model that writes the "
            f"bank were in progress in {distil_seconds / seconds:.1%} of it"
        )

    def line(self, bank_tokens: int | None = None, writer: RoleName = "extractor") -> str:
        """Return the budget line of a run's summary.

        `bank_tokens`: tokens that the writer of the bank sampled; None without a bank.
        """
        name = "extractor" if writer == "extractor" else "actor for the bank"
        extractor = "" if bank_tokens is None else f", {name} {bank_tokens:,}"
        return (
            f"environment turns: {self.env_turns:,} ({self.overtime_turns:,} in overtime); "
            f"sampled tokens: actor {self.actor_tokens:,}{extractor}"
        )

"""Staleness gate: it decides which groups may start.

The gate is a pure state machine without clock and event loop. Batch s consists of groups
s·G … (s+1)·G − 1. Group i may start when completed_steps ≥ ⌊i/G⌋ − max_staleness. A step completes
when all its groups have finished and the trainer has processed it. Failed groups and a step without
training count too. Therefore the gate always opens again, and a trajectory of batch s is sampled
with a policy that has completed at least s − max_staleness steps.
"""

from __future__ import annotations

from crl.wording import counted


class StalenessGate:
    """State machine of the gate.

    `groups_per_step`: G. `max_staleness`: steps that rollouts may run ahead of training; 0 means
    synchronous.
    """

    def __init__(self, groups_per_step: int, max_staleness: int, completed_steps: int = 0) -> None:
        if groups_per_step < 1 or max_staleness < 0 or completed_steps < 0:
            raise ValueError(
                "groups_per_step must be at least 1, max_staleness and completed_steps at least 0, "
                f"not {groups_per_step}, {max_staleness} and {completed_steps}"
            )
        self.groups_per_step, self.max_staleness = groups_per_step, max_staleness
        self.completed_steps = completed_steps
        self._next_group = completed_steps * groups_per_step
        self.running: set[int] = set()
        """Groups that have started and not finished."""

    def may_start(self, group: int) -> bool:
        return self.completed_steps >= group // self.groups_per_step - self.max_staleness

    def details(self) -> str:
        """Return a line on the groups that have started and that may start."""
        last = (self.completed_steps + self.max_staleness + 1) * self.groups_per_step - 1
        return (
            f"the next group is {self._next_group}; groups up to {last} may start "
            f"({counted(self.completed_steps, 'step')} completed, "
            f"max_staleness {self.max_staleness})"
        )

    def start(self, group: int) -> None:
        """Record the start of a group. Groups start in order, each once.

        Raise `ValueError` if the group may not start now.
        """
        if group != self._next_group or not self.may_start(group):
            raise ValueError(
                f"group {group} may not start: the next group is {self._next_group}, and "
                f"{self.completed_steps} steps are completed"
            )
        self._next_group += 1
        self.running.add(group)

    def finish(self, group: int) -> None:
        """Record the end of a group, with or without success."""
        self.running.remove(group)

    def ready(self, step: int) -> bool:
        """Return whether all groups of `step` have started and finished."""
        groups = range(step * self.groups_per_step, (step + 1) * self.groups_per_step)
        return self._next_group >= groups.stop and self.running.isdisjoint(groups)

    def complete(self, step: int) -> None:
        """Record that the trainer has processed `step`.

        Raise `ValueError` if `step` is out of order or has unfinished groups.
        """
        if step != self.completed_steps or not self.ready(step):
            raise ValueError(
                f"step {step} cannot complete: {self.completed_steps} steps are completed, "
                f"and ready({step}) is {self.ready(step)}"
            )
        self.completed_steps += 1

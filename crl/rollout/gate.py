"""The staleness gate: which groups may start. A pure state machine; it knows no clock and no event loop.

Batch s is groups s·G … (s+1)·G − 1. Group i may start when completed_steps ≥ ⌊i/G⌋ − max_staleness. A step completes when all
its groups have finished, whatever became of them, and the trainer is done with it, whether or not it could train. So the
gate always opens again, and what a trajectory was sampled with is never older than max_staleness steps plus its own.
"""

from __future__ import annotations


class StalenessGate:
    """groups_per_step: G; max_staleness: steps that rollouts may run ahead of training, 0 = synchronous."""

    def __init__(self, groups_per_step: int, max_staleness: int, completed_steps: int = 0) -> None:
        if groups_per_step < 1 or max_staleness < 0 or completed_steps < 0:
            raise ValueError(
                f"bad gate: G={groups_per_step}, max_staleness={max_staleness}, completed_steps={completed_steps}"
            )
        self.groups_per_step, self.max_staleness = groups_per_step, max_staleness
        self.completed_steps = completed_steps
        self._next = completed_steps * groups_per_step
        self._running: set[int] = set()

    def may_start(self, group: int) -> bool:
        return self.completed_steps >= group // self.groups_per_step - self.max_staleness

    def start(self, group: int) -> None:
        """Groups start in order, each once. Raises `ValueError` for one that may not start now."""
        if group != self._next or not self.may_start(group):
            raise ValueError(
                f"group {group} may not start: next is {self._next}, completed steps {self.completed_steps}"
            )
        self._next += 1
        self._running.add(group)

    def finish(self, group: int) -> None:
        """The group is over: trained on or not, failed or not."""
        self._running.remove(group)

    def ready(self, step: int) -> bool:
        """All groups of `step` have started and finished."""
        groups = range(step * self.groups_per_step, (step + 1) * self.groups_per_step)
        return self._next >= groups.stop and self._running.isdisjoint(groups)

    def complete(self, step: int) -> None:
        """The trainer is done with `step`. Raises `ValueError` out of order or while groups of it run."""
        if step != self.completed_steps or not self.ready(step):
            raise ValueError(
                f"step {step} cannot complete: {self.completed_steps} completed, ready: {self.ready(step)}"
            )
        self.completed_steps += 1

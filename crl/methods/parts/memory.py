"""Parts of methods whose memory guides whole steps (EMPO²)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crl.protocols import Rerender
from crl.seeds import generator
from crl.types import GUIDANCE_ORIGINS, OldPolicy, RolloutPlan, Task, TokenTrace, Trajectory


@dataclass(frozen=True)
class MemorySteps:
    """`RolloutPlanner` that draws one mode for all groups of a step.

    The draw depends only on seed, name and step, so it is the same after a resumption.
    """

    share: float
    """Probability that a step has the mode."""
    seed: int
    """Root of the random draws."""
    name: str
    """Name of the random draws."""

    def __contains__(self, step: int) -> bool:
        """Return whether the step has the mode."""
        return generator(self.seed, self.name, step).random() < self.share

    def plan(self, task: Task, members: int, step: int) -> Sequence[RolloutPlan]:
        return [RolloutPlan("guided" if step in self else "free")] * members


@dataclass(frozen=True)
class StrippedView:
    """`TrainView` that renders the guided trajectories of off-policy steps without guidance.

    All other trajectories keep the prompts that the policy saw. Free trajectories, guided ones and
    those rendered again are the three cases of EMPO² (appendix C).
    """

    off_policy: MemorySteps
    """Steps whose guided trajectories are rendered again without guidance."""
    old: OldPolicy
    """Old log-probs of these trajectories."""
    mask_truncated: bool
    """True if truncated trajectories are excluded."""

    def __call__(self, trajectory: Trajectory, rerender: Rerender) -> Sequence[TokenTrace]:
        if self.mask_truncated and trajectory.truncated:
            return ()
        if trajectory.used and trajectory.address.step in self.off_policy:
            return rerender.without(trajectory, GUIDANCE_ORIGINS, version=self.old)
        return trajectory.traces

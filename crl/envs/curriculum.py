"""Interfaces for the training and the measurement of tiny models in an environment.

An environment may declare a `Curriculum`: a scripted player, a digest of episodes and an advisor.
`crl.tiny`, the advice probe, the diagnostics of lessons and `crl play --scripted` use it. The
games, tasks and texts of an environment never do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from crl.types import Segment, Task


class ScriptedPlayer(Protocol):
    """Player that uses the text interface alone.

    It proves that a task can be solved, and it plays demonstrations.
    """

    def begin(self, goal: str, observation: str) -> None:
        """Forget all earlier episodes and read the first observation."""
        ...

    def act(self) -> str:
        """Return the next action, written as an agent would write it."""
        ...

    def observe(self, observation: str) -> None:
        """Read the observation that follows the last action."""
        ...


@dataclass(frozen=True, slots=True)
class LessonVerdict:
    """Classification of a lesson for one place."""

    kind: str
    """Kind of the lesson. Every environment has its own kinds."""
    correct: bool
    """True if the lesson is right advice for the place."""


class Advisor(Protocol):
    """Ground truth about an environment's places. Never used by rollouts.

    The advice probe and the diagnostics of lessons use it. Methods may play the game to find the
    truth, so they block.
    """

    def right(self, task: Task) -> str:
        """Return the most helpful lesson for the task's place, worded as a good extractor would."""
        ...

    def wrong(self, task: Task, rng: random.Random) -> str:
        """Return a lesson with the same wording that misleads."""
        ...

    def judge(self, task: Task, text: str) -> LessonVerdict:
        """Classify a lesson about the task's place."""
        ...

    def informative(self, segments: Sequence[Segment]) -> bool:
        """Return whether an episode shows the information that right advice needs."""
        ...


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Parts of an environment for tiny models and diagnostics. All of them are optional."""

    scripted_player: Callable[[random.Random], ScriptedPlayer] | None = None
    """`scripted_player(rng)` returns a player that reads both renderings."""
    digest: Callable[[Sequence[Segment]], str] | None = None
    """`digest(segments)` summarises an episode from its texts alone, for tiny extractors.

    None: the extractor reads the complete texts.
    """
    advisor: Advisor | None = None
    """Ground truth for diagnostics and the advice probe."""
    probe_tasks: Callable[[int], tuple[Task, ...]] = lambda n: ()
    """`probe_tasks(n)` returns n tasks of the advice probe, which needs an advisor."""
    small: str = ""
    """Name of the environment that tiny models play instead. Empty if they can play this one."""

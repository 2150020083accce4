"""Parts that shape rollouts: who sees what, how prompts are written and read, what is rewarded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from crl.prompts import fill
from crl.protocols import Hit, Response
from crl.types import Observation, RolloutPlan, Segment, StepResult, Task, Trajectory


@dataclass(frozen=True)
class GuidedShare:
    """`RolloutPlanner`: the first members of every group, `share` of them rounded down, are guided by experience, the others free.

    0 is plain RL, 1/2 CRL's K/2 and K/2 (eq. 5).
    """

    share: float

    def plan(self, task: Task, members: int, step: int) -> Sequence[RolloutPlan]:
        guided = int(members * self.share)
        return [RolloutPlan("guided")] * guided + [RolloutPlan("free")] * (members - guided)


@dataclass(frozen=True)
class ChatContext:
    """`ContextProvider` of a plain conversation: instructions and goal, then one observation a turn.

    By task name: `instructions` come first, as the system's message, empty ones are left out; `introductions` are templates
    with an `{experience}`, without one an experience's text stands alone. It is a segment of its own: guided and free prompts
    differ by that one. observed: the tasks whose first observation belongs to the retrieval query.
    """

    instructions: Mapping[str, str]
    introductions: Mapping[str, str] = field(default_factory=dict)
    observed: frozenset[str] = frozenset()

    def query(self, task: Task, observation: Observation) -> str:
        return f"{task.goal}\n{observation.text}" if task.name in self.observed else task.goal

    def opening(self, task: Task, observation: Observation, experience: Hit | None) -> Sequence[Segment]:
        instructions = self.instructions[task.name]
        return [
            *([Segment("system", instructions, "task")] if instructions else []),
            Segment("user", task.goal, "task"),
            *([self._introduced(task, experience)] if experience else []),
            Segment("user", observation.text, "env"),
        ]

    def _introduced(self, task: Task, experience: Hit) -> Segment:
        template = self.introductions.get(task.name, "{experience}")
        return Segment("user", fill(template, experience=experience.text), "experience")

    def following(self, result: StepResult) -> Sequence[Segment]:
        return [Segment("user", result.text, "env")]

    def parse(self, completion: str) -> Response:
        """The action is what follows the thinking, if there was any."""
        thinking, closed, answer = completion.rpartition("</think>")
        if not closed and "<think>" in completion:
            return Response("", {"thinking": completion})  # cut off in thought: nothing was decided
        return Response(answer.strip(), {"thinking": thinking} if closed else {})


@dataclass(frozen=True)
class OutcomeReward:
    """`RewardShaper`: the environment's own reward is the only channel."""

    def shape(self, trajectory: Trajectory) -> Mapping[str, float]:
        return dict(trajectory.rewards)

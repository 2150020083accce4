"""Parts that shape rollouts: who sees what, how prompts are written and read, what is rewarded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from crl.methods.parts.asking import AskTool
from crl.methods.parts.records import RecordWriter
from crl.prompts import fill
from crl.protocols import Hit, Response
from crl.types import Observation, RolloutPlan, Segment, StepResult, Task, Trajectory


@dataclass(frozen=True)
class GuidedShare:
    """`RolloutPlanner`: the first members of every group, `share` of them, are guided by experience, the others free.

    0 is plain RL, 1/2 CRL's K/2 and K/2 (eq. 5).
    """

    share: float

    def plan(self, task: Task, members: int, step: int) -> Sequence[RolloutPlan]:
        guided = round(members * self.share)
        return [RolloutPlan("guided")] * guided + [RolloutPlan("free")] * (members - guided)


@dataclass(frozen=True)
class ChatContext:
    """`ContextProvider` of a plain conversation: instructions and goal, then one observation a turn.

    By task name: `instructions` come first, as the system's message, empty ones are left out; `introductions` are templates
    with an `{experience}`, without one an experience's text stands alone. It is a segment of its own: guided and free prompts
    differ by that one, and by that of the tool where they may ask: `tools`. observed: the tasks whose first observation belongs to the
    retrieval query; goal_keys: experiences are found by their goal, so a question is too; records: what adds an experience's record to
    its text, for tasks whose agents are told it. Words that are not the experience's own have no record.
    """

    instructions: Mapping[str, str]
    introductions: Mapping[str, str] = field(default_factory=dict)
    tools: Mapping[str, AskTool] = field(default_factory=dict)
    observed: frozenset[str] = frozenset()
    goal_keys: bool = False
    records: Mapping[str, RecordWriter] = field(default_factory=dict)

    def query_observes(self, task: Task) -> bool:
        return task.name in self.observed

    def query(self, task: Task, observation: Observation | None) -> str:
        if not self.query_observes(task):
            return task.goal
        assert observation is not None, "the query depends on it"
        return f"{task.goal}\n{observation.text}"

    def asked(self, task: Task, query: str) -> str:
        return task.goal if self.goal_keys or not query else query

    def opening(
        self, task: Task, observation: Observation, experience: Hit | None, *, asks: int = 0
    ) -> Sequence[Segment]:
        instructions = self.instructions[task.name]
        return [
            *([Segment("system", instructions, "task")] if instructions else []),
            Segment("user", task.goal, "task"),
            *(
                [Segment("user", self._introduced(task, experience), "experience")]
                if experience
                else []
            ),
            *(
                [Segment("user", fill(self.tools[task.name].offer, limit=asks), "tool_spec")]
                if asks
                else []
            ),
            Segment("user", observation.text, "env"),
        ]

    def _introduced(self, task: Task, experience: Hit) -> str:
        write = self.records.get(task.name)
        text = (
            write(experience.text, experience.record)
            if write and not experience.use.reworded
            else experience.text
        )
        return fill(self.introductions.get(task.name, "{experience}"), experience=text)

    def reply(self, task: Task, found: Hit | None) -> Sequence[Segment]:
        return [
            Segment(
                "user",
                self._introduced(task, found) if found else self.tools[task.name].nothing,
                "tool_result",
            )
        ]

    def following(self, result: StepResult) -> Sequence[Segment]:
        return [Segment("user", result.text, "env")]

    def parse(self, task: Task, completion: str) -> Response:
        """The action, or the question, is in what follows the thinking, if there was any."""
        thinking, closed, answer = completion.rpartition("</think>")
        if not closed and "<think>" in completion:
            return Response("", {"thinking": completion})  # cut off in thought: nothing was decided
        tool = self.tools.get(task.name)
        return Response(
            answer.strip(),
            {"thinking": thinking} if closed else {},
            tool.query(answer) if tool else None,
        )


@dataclass(frozen=True)
class OutcomeReward:
    """`RewardShaper`: the environment's own reward is the only channel."""

    def shape(self, trajectory: Trajectory) -> Mapping[str, float]:
        return dict(trajectory.rewards)

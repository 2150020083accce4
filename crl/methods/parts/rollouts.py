"""Parts that shape rollouts: group plans, prompts, parsing of completions, rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from crl.manager.keys import StateKey, newest_state
from crl.methods.parts.asking import AskTool
from crl.methods.parts.predicting import without_predictions
from crl.methods.parts.records import RecordWriter
from crl.modeling.thinking import answer_start
from crl.prompts import fill
from crl.protocols import Hit, Response
from crl.types import Observation, RolloutPlan, Segment, StepResult, Task, Trajectory


@dataclass(frozen=True)
class GuidedShare:
    """`RolloutPlanner` that guides the first members of every group; the others are free.

    A share of 0 is plain RL. A share of 1/2 gives the halves K/2 and K/2 of CRL eq. 5.
    """

    share: float
    """Share of guided members, in [0, 1]. The number of guided members is rounded."""

    def plan(self, task: Task, members: int, step: int) -> Sequence[RolloutPlan]:
        guided = round(members * self.share)
        return [RolloutPlan("guided")] * guided + [RolloutPlan("free")] * (members - guided)


@dataclass(frozen=True)
class ChatContext:
    """`ContextProvider` of a plain conversation: instructions, goal, then one observation per turn.

    The experience is a separate segment. Guided and free prompts differ only by this segment, and
    by the tool's segment if the agent may ask.
    """

    instructions: Mapping[str, str]
    """System message at the start of the prompt, by task name; omitted if empty."""
    introductions: Mapping[str, str] = field(default_factory=dict)
    """Template with an `{experience}` slot, by task name; without one the text is used alone."""
    tools: Mapping[str, AskTool] = field(default_factory=dict)
    """Tool search_and_ask, by task name."""
    observation_in_query: frozenset[str] = frozenset()
    """Tasks whose retrieval query includes the first observation."""
    retrieve_by_goal: bool = False
    """True if experience is retrieved by goal; the goal then also replaces a question's text."""
    state: StateKey | None = None
    """State of an episode by which experience is retrieved, without the goal."""
    records: Mapping[str, RecordWriter] = field(default_factory=dict)
    """Writer of an experience's record, by task name; without one the record is not shown.

    Reworded experiences have no record.
    """
    predictions: Mapping[str, str] = field(default_factory=dict)
    """Request to predict the next states, by task name; without one no prediction is asked for."""

    def with_predictions(self, requests: Mapping[str, str]) -> ChatContext:
        """Return this context with these requests to predict the next states, by task name."""
        return replace(self, predictions=requests)

    def without_records(self) -> ChatContext:
        """Return this context without the records of experiences."""
        return replace(self, records={})

    def query_needs_observation(self, task: Task) -> bool:
        return self.state is not None or task.name in self.observation_in_query

    def query(self, task: Task, observation: Observation | None) -> str:
        if not self.query_needs_observation(task):
            return task.goal
        assert observation is not None, "the query of this task needs the first observation"
        return self.turn_query(task, self.opening(task, observation, ()))

    def question_query(self, task: Task, query: str) -> str:
        return task.goal if self.retrieve_by_goal or not query else query

    def opening(
        self,
        task: Task,
        observation: Observation,
        experiences: Sequence[Hit],
        *,
        max_questions: int = 0,
    ) -> Sequence[Segment]:
        parts = [self.instructions[task.name], self.predictions.get(task.name, "")]
        instructions = "\n\n".join(part for part in parts if part)
        return [
            *([Segment("system", instructions, "task")] if instructions else []),
            Segment("user", task.goal, "task"),
            *self.advice(task, experiences),
            *(
                [
                    Segment(
                        "user", fill(self.tools[task.name].offer, limit=max_questions), "tool_spec"
                    )
                ]
                if max_questions
                else []
            ),
            Segment("user", observation.text, "env"),
        ]

    def turn_query(self, task: Task, segments: Sequence[Segment]) -> str:
        if self.state:
            return self.state.text(segments)
        return f"{task.goal}\n{newest_state(segments)}"

    def advice(self, task: Task, experiences: Sequence[Hit]) -> Sequence[Segment]:
        if not experiences:
            return []
        return [Segment("user", self._experience_text(task, experiences), "experience")]

    def _experience_text(self, task: Task, experiences: Sequence[Hit]) -> str:
        write = self.records.get(task.name)
        texts = [
            write(hit.text, hit.record) if write and not hit.use.reworded else hit.text
            for hit in experiences
        ]
        introduction = self.introductions.get(task.name, "{experience}")
        return fill(introduction, experience="\n".join(texts))

    def reply(self, task: Task, found: Hit | None) -> Sequence[Segment]:
        text = self._experience_text(task, [found]) if found else self.tools[task.name].no_result
        return [Segment("user", text, "tool_result")]

    def feedback(self, result: StepResult) -> Sequence[Segment]:
        return [Segment("user", result.text, "env")]

    def parse(self, task: Task, completion: str) -> Response:
        """Return the action or the question of a completion.

        Only the text after the thinking is read, if the completion contains thinking.
        """
        start = answer_start(completion)
        if start is None:
            # The completion ended during the thinking, so it contains no decision.
            return Response("")
        answer = completion[start:]
        if task.name in self.predictions:
            answer = without_predictions(answer)
        tool = self.tools.get(task.name)
        return Response(answer.strip(), tool.parse_query(answer) if tool else None)


@dataclass(frozen=True)
class OutcomeReward:
    """`RewardShaper` with the environment's reward as the only channel."""

    def shape(self, trajectory: Trajectory) -> Mapping[str, float]:
        return dict(trajectory.rewards)

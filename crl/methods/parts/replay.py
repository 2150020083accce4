"""Agent-in-World (Role-Agent §3.3): repetition of training tasks with similar failures."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from crl.errors import RolloutError
from crl.manager.failure_notes import read_note
from crl.methods.parts.distilling import quoted
from crl.prompts import fill, prompt
from crl.protocols import Failure, FailureLibrary, Metrics, State, TaskReplay, TurnSource
from crl.seeds import generator
from crl.types import Segment, Task, Trajectory

if TYPE_CHECKING:
    from crl.config.schema import RunConfig
    from crl.methods.role_agent import RoleAgentSection

MAX_LISTED = 30
"""Maximum number of failures among which the model chooses."""

FailedTask = tuple[Task, Failure]
"""Task that can be drawn again, and a failure at it."""

RetrievedTask = tuple[int, Task]
"""Number of a retrieval and a task that it found."""

_INDEX = re.compile(r"^\W*INDEX\W*?(\d{1,9})(?!\d)", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """Settings of a `FailureReplay`."""

    ratio: float
    """Probability that a drawn task is a retrieved one, if one of this name waits."""
    matches: int
    """Maximum number of tasks that are retrieved for a failure pattern."""
    history: int
    """Number of last drawn tasks that can be retrieved."""
    waiting: int
    """Maximum number of retrieved tasks that wait to be drawn. The oldest are dropped.

    All tasks of the last retrieval wait, even if they are more.
    """
    min_similarity: float
    """Minimum cosine similarity of a retrieved failure and the query."""
    template: str = ""
    """Text of the prompt `retrieve`, with which the model chooses. Empty: the nearest are taken."""
    max_tokens: int = sys.maxsize
    """Maximum number of tokens of this prompt: the model's context less its response limit."""


class FailureReplay:
    """`TaskReplay`: a train stream in which retrieved tasks replace a share of the draws.

    The stream remembers the training tasks that it has drawn, and only these can return. Each call
    of `draw` is for one step of the run, and gives the tasks of its groups in order (`Collector`).
    Evaluations draw their tasks from elsewhere.

    Failures of the same group and mode are one failure pattern. For each new pattern, tasks with
    similar failures are retrieved, and wait to be drawn. The patterns accumulate, as in Algorithm 1
    of the paper. A task that was retrieved several times is drawn with a higher probability. A
    retrieved task takes the turn of a task with the same name, so the shares of a mixture do not
    change. It does not advance the stream of this task, so none of the stream's tasks is lost.
    """

    def __init__(self, source: TurnSource, settings: ReplaySettings, seed: int) -> None:
        self._source, self._settings, self._seed = source, settings, seed
        self._steps = 0
        """Number of steps that have been drawn."""
        self._history: dict[tuple[int, int], Task] = {}
        """Drawn training tasks by step and group."""
        self._waiting: list[RetrievedTask] = []
        """Retrieved tasks that were not drawn again, with repetitions, the oldest first."""
        self._retrieved = list[RetrievedTask]()
        """The last retrieved tasks, drawn again or not, the oldest first."""
        self._retrievals = 0
        """Number of retrievals that found tasks."""
        self._patterns = set[tuple[tuple[int, int], str]]()
        """Group address and mode of the failure patterns that were handled."""
        self._counts = Counter[str]()
        """Counts since the last `take_metrics`."""

    def draw(self, n: int) -> Sequence[Task]:
        tasks = [self._draw(group) for group in range(self._steps * n, (self._steps + 1) * n)]
        self._steps += 1
        return tasks

    def _draw(self, group: int) -> Task:
        # The generator depends on the address alone, so it is the same after a resumption.
        rng = generator(self._seed, "replay", self._steps, group)
        name = self._source.next_name()
        tasks = [task for _, task in self._waiting if task.name == name]
        if tasks and rng.random() < self._settings.ratio:
            task = rng.choice(tasks)
            self._waiting = [other for other in self._waiting if _key(other[1]) != _key(task)]
            self._source.skip()
            self._counts["replayed"] += 1
        else:
            (task,) = self._source.draw(1)
        if task.split == "train":
            self._history[self._steps, group] = task
        self._counts["drawn"] += 1
        while len(self._history) > self._settings.history:
            del self._history[next(iter(self._history))]
        return task

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        self._source.observe(trajectories)

    async def retrieve(self, library: FailureLibrary) -> None:
        new = library.new()
        modes = {failure.uid: read_note(failure.text).mode for failure in new}
        patterns = {(f.address, modes[f.uid]): f for f in new}
        for known in self._patterns & patterns.keys():  # other failures of them came before
            del patterns[known]
        found = [(failure, await self._similar(failure, library)) for failure in patterns.values()]
        if self._settings.template:
            chosen = await asyncio.gather(
                *(self._chosen(failure, others, library) for failure, others in found if others)
            )
        else:
            chosen = [others for _, others in found]
        retrieved = [task for others in chosen for task, _ in others[: self._settings.matches]]
        self._counts["patterns"] += len(patterns)
        self._counts["retrieved"] += len(retrieved)
        known = self._patterns | patterns.keys()
        self._patterns = {pattern for pattern in known if pattern[0] in self._history}
        library.mark_retrieved(new)  # only now: a retrieval that is cancelled begins again
        if retrieved:
            self._retrievals += 1
            added = [(self._retrievals, task) for task in retrieved]
            self._retrieved = self._newest([*self._retrieved, *added])
            self._waiting = self._newest([*self._waiting, *added])

    def _newest(self, tasks: list[RetrievedTask]) -> list[RetrievedTask]:
        """Return the newest of `tasks`, the oldest first.

        At most `waiting` are kept, but always all tasks of the last retrieval.
        """
        last = sum(number == tasks[-1][0] for number, _ in tasks)
        return tasks[-max(last, self._settings.waiting) :]

    async def _similar(self, failure: Failure, library: FailureLibrary) -> list[FailedTask]:
        """Return other tasks with failures like this one, the most similar first."""
        own = self._history.get(failure.address)
        found: dict[Hashable, FailedTask] = {}
        for other, similarity in await library.similar(failure, self._history):
            task = self._task(other)
            if similarity >= self._settings.min_similarity and task and task != own:
                found.setdefault(_key(task), (task, other))
        return list(found.values())

    def _task(self, failure: Failure) -> Task | None:
        """Return the task of a failure; None if this stream did not draw it, or too long ago."""
        task = self._history.get(failure.address)
        same = task is not None and (task.name, task.goal) == (failure.task, failure.goal)
        return task if same else None

    async def _chosen(
        self, failure: Failure, candidates: Sequence[FailedTask], library: FailureLibrary
    ) -> list[FailedTask]:
        """Return the candidates that the model chooses (Role-Agent, Figure 9).

        At most `MAX_LISTED` are listed, and no more than fit into the context of the model.
        """
        candidates = candidates[:MAX_LISTED]
        prompt = self._prompt(failure, candidates)
        while candidates and (tokens := await library.tokens(prompt)) > self._settings.max_tokens:
            fitting = len(candidates) * self._settings.max_tokens // tokens
            candidates = candidates[: min(fitting, len(candidates) - 1)]
            prompt = self._prompt(failure, candidates)
        answer = ""
        if candidates:
            with suppress(RolloutError):
                answer = await library.ask(f"retrieve/{failure.uid}", prompt)
        numbers = dict.fromkeys(int(found[1]) for found in _INDEX.finditer(answer))
        chosen = [candidates[n - 1] for n in numbers if 1 <= n <= len(candidates)]
        self._counts["unanswered"] += not chosen
        return chosen

    def _prompt(self, failure: Failure, candidates: Sequence[FailedTask]) -> list[Segment]:
        listed = [
            f"[{number}]\n{_described(other)}"
            for number, (_, other) in enumerate(candidates, start=1)
        ]
        text = fill(
            self._settings.template,
            failure=_described(failure),
            candidates="\n".join(listed),
            matches=self._settings.matches,
        )
        return [Segment("user", text, "task")]

    def take_metrics(self, library: FailureLibrary) -> Metrics:
        counts, self._counts = self._counts, Counter[str]()
        modes = library.modes()
        return {
            **({"replay/share": counts["replayed"] / n} if (n := counts["drawn"]) else {}),
            "replay/patterns": counts["patterns"],
            "replay/retrieved": counts["retrieved"],
            "replay/waiting": len(self._waiting),
            **({"replay/unanswered": counts["unanswered"]} if self._settings.template else {}),
            **{f"failures/{mode}": number for mode, number in sorted(modes.items())},
        }

    def state(self) -> State:
        return {
            "source": self._source.state(),
            "steps": self._steps,
            "history": [[*address, _fields(task)] for address, task in self._history.items()],
            "waiting": _states(self._waiting),
            "retrievals": self._retrievals,
        }

    def load_state(self, state: State) -> None:
        self._source.load_state(state["source"])
        self._steps = state["steps"]
        self._history = {(step, group): Task(**task) for step, group, task in state["history"]}
        self._waiting = _retrieved_tasks(state["waiting"])
        self._retrievals = state["retrievals"]

    def retrieval(self) -> State:
        return {
            "tasks": _states(self._retrieved),
            "patterns": [[*address, mode] for address, mode in sorted(self._patterns)],
        }

    def load_retrieval(self, state: State) -> None:
        self._retrieved = _retrieved_tasks(state["tasks"])
        self._patterns = {((step, group), mode) for step, group, mode in state["patterns"]}
        # All draws after these retrievals are repeated.
        if later := [task for task in self._retrieved if task[0] > self._retrievals]:
            self._waiting = self._newest([*self._waiting, *later])
            self._retrievals = later[-1][0]


def failure_replay(
    config: RunConfig, settings: RoleAgentSection
) -> Callable[[TurnSource], TaskReplay] | None:
    """Return the function that wraps the training stream; None if no tasks are drawn again."""
    if not settings.replay_ratio:
        return None
    replay = ReplaySettings(
        ratio=settings.replay_ratio,
        matches=settings.matches,
        history=settings.history,
        waiting=settings.matches * config.rollout.groups,
        min_similarity=config.retrieval.min_similarity,
        template=prompt("retrieve", config.prompts.files) if settings.retrieval == "model" else "",
        max_tokens=getattr(config, config.writer).max_context_tokens
        - config.extractor.max_response_tokens,
    )
    return partial(FailureReplay, settings=replay, seed=config.run.seed)


def _described(failure: Failure) -> str:
    note = read_note(failure.text)
    parts = (("Task", failure.goal), ("Failure mode", note.mode), ("Lesson", note.lesson))
    return "\n".join(quoted(f"{name}: {' '.join(text.split())}") for name, text in parts)


def _key(task: Task) -> Hashable:
    params: Iterable[tuple[str, Any]] = sorted(task.params.items())
    return task.name, task.seed, task.split, task.goal, tuple(params)


def _fields(task: Task) -> Mapping[str, Any]:
    return {name: getattr(task, name) for name in Task.__dataclass_fields__}


def _states(tasks: Iterable[RetrievedTask]) -> list[Any]:
    return [[number, _fields(task)] for number, task in tasks]


def _retrieved_tasks(states: Iterable[Any]) -> list[RetrievedTask]:
    return [(number, Task(**task)) for number, task in states]

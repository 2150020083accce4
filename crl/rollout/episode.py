"""Episodes: an agent and an environment take turns until one of them ends the episode.

`EpisodeRunner.play` is the boundary at which failures become data. A `RolloutError` becomes an
error trajectory; in overtime it only ends the record. After a `TransientError` the episode is first
retried once. All other exceptions (a lost engine, a bug) pass through and end the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from crl.errors import RolloutError, TransientError
from crl.modeling.tokens import Conversation
from crl.protocols import (
    Advice,
    ContextProvider,
    Environment,
    EnvironmentPool,
    Hit,
    Question,
    Retriever,
    RewardShaper,
    SearchRequest,
)
from crl.rollout.decoding import Decoding
from crl.types import (
    Activity,
    EpisodeAddress,
    Guidance,
    Observation,
    Outcome,
    RolloutPlan,
    StepResult,
    Task,
    Trajectory,
    Verdict,
)

A = TypeVar("A")
B = TypeVar("B")

Report = Callable[[RolloutError | None], object]
"""Function that is called once at the end of an episode, with its error."""


def _unobserved(task: str) -> AbstractContextManager[Report]:
    return nullcontext(lambda error: None)


@dataclass(frozen=True)
class Limits:
    """Limits of an episode of one task."""

    max_turns: int
    """Environment turns that count."""
    max_response_tokens: int
    """Sampled tokens per turn."""
    window: int | None = None
    """Turns in the prompt; None for all."""
    extra_turns: int = 0
    """Further turns of an episode that is unfinished at the limit.

    They are only recorded: they change neither reward nor success, and are not trained on.
    """
    max_questions: int = 0
    """Questions that a guided episode may ask before the turn limit; with 0 it has no tool."""
    advice: Advice = field(default_factory=Advice)
    """Number of experiences that guide an episode, and the turns before which they are searched."""


@dataclass(frozen=True)
class EpisodeKey:
    """Address of an episode in its run. Random draws are derived from it."""

    purpose: str
    """`train`, or the name of an eval set."""
    step: int
    group: int
    member: int
    arm: str = ""
    """Name that distinguishes episodes with the same draws that may be in flight together."""

    @property
    def address(self) -> EpisodeAddress:
        """Address without purpose and arm."""
        return EpisodeAddress(self.step, self.group, self.member)

    @property
    def group_session(self) -> str:
        purpose = f"{self.purpose}@{self.arm}" if self.arm else self.purpose
        return f"{purpose}/{self.step:08d}/{self.group:08d}"

    @property
    def session(self) -> str:
        """Name of the episode's session. The order of the names is the order of the addresses."""
        return f"{self.group_session}/{self.member:04d}"

    @property
    def draw_name(self) -> str:
        """Name of the random draws: the session without the arm."""
        return replace(self, arm="").session

    def __str__(self) -> str:
        return f"{self.purpose}/{self.step}/{self.group}/{self.member}"


class NullRetriever:
    """`Retriever` of a run without experience. Every search returns None."""

    async def search(self, requests: Sequence[SearchRequest]) -> list[Hit | None]:
        return [None] * len(requests)

    async def refine(self, question: Question, hit: Hit) -> Hit:
        return hit


class Judge(Protocol):
    """Interface of critics, which decide whether a retrieved experience guides an episode.

    Episodes call `join` before any member of their group runs, and `leave` at the end.
    """

    @property
    def verdict_on_asked(self) -> Verdict | None:
        """Verdict on experience that an agent asked for.

        With it, all experience that guides an episode is rewarded on the same scale.
        """
        ...

    def join(self, key: EpisodeKey) -> None: ...
    def leave(self, key: EpisodeKey) -> None: ...
    async def judge(self, key: EpisodeKey, task: Task, hit: Hit) -> Hit:
        """Return the hit with its verdict and, after refine, with another text."""
        ...


class AcceptAll:
    """`Judge` of a run without critic: every retrieved experience guides its episode."""

    verdict_on_asked: Verdict | None = None

    def join(self, key: EpisodeKey) -> None:
        """Do nothing."""

    def leave(self, key: EpisodeKey) -> None:
        """Do nothing."""

    async def judge(self, key: EpisodeKey, task: Task, hit: Hit) -> Hit:
        return hit


def _no_turn(key: EpisodeKey, share: float) -> None:
    """Ignore a turn."""


@dataclass(frozen=True)
class Observer:
    """Functions that are told of episodes."""

    episode: Callable[[str], AbstractContextManager[Report]] = _unobserved
    """Function that is called with the task's name at the start of every episode.

    The context lasts until the end of the episode.
    """
    turn: Callable[[EpisodeKey, float], object] = _no_turn
    """Function that is called at the start of an episode and after each of its turns.

    Its second argument is the share of the episode that is played, below 1: the start and each turn
    up to the limit count equally.
    """


@dataclass(frozen=True)
class EpisodeRunner:
    """Player of episodes."""

    decoding: Decoding
    """Decoding of the actor."""
    pool: EnvironmentPool
    """Source of environments."""
    context: ContextProvider
    """Writer of prompts and parser of answers."""
    shaper: RewardShaper
    """Source of the reward channels of a finished episode."""
    retriever: Retriever
    """Source of experience."""
    limits: dict[str, Limits]
    """Limits by task name."""
    judge: Judge = field(default_factory=AcceptAll)
    """Critic of retrieved experience."""
    observer: Observer = field(default_factory=Observer)
    """Functions that are told of episodes."""

    def with_turns(self, turn: Callable[[EpisodeKey, float], object]) -> EpisodeRunner:
        """Return a runner that calls `turn` as `Observer` describes."""
        return replace(self, observer=replace(self.observer, turn=turn))

    def join(self, key: EpisodeKey) -> None:
        """Register an episode for which `play` will be called."""
        self.decoding.sampler.join(key.session)
        self.judge.join(key)

    async def play(self, key: EpisodeKey, task: Task, plan: RolloutPlan) -> Trajectory:
        """Play an episode to the end and return its trajectory.

        The caller must `join` all episodes that run together before the first `play`. After a
        temporary failure (for example an engine that died and was restarted), the episode is
        retried once from the start.

        Raise every exception that is not a `RolloutError`.
        """
        try:
            with self.observer.episode(task.name) as report:
                try:
                    conversation, record = await self._attempt(key, task, plan, report)
                except TransientError:
                    conversation, record = await self._attempt(
                        key, task, plan, report, last_attempt=True
                    )
        finally:
            self.decoding.sampler.leave(key.session)
            self.judge.leave(key)
        trajectory = Trajectory(
            task, key.address, plan.condition, conversation.segments, conversation.traces,
            record.outcome(), record.activity(), record.guidance(),
        )  # fmt: skip
        return (
            trajectory
            if trajectory.error
            else trajectory.with_rewards(self.shaper.shape(trajectory))
        )

    async def _attempt(
        self, key: EpisodeKey, task: Task, plan: RolloutPlan, report: Report,
        *, last_attempt: bool = False,
    ) -> tuple[Conversation, EpisodeRecord]:  # fmt: skip
        """Return the episode as far as it was played, after a report of its end.

        Raise `TransientError`, unless this is the last attempt or the episode is in overtime.
        """
        limits = self.limits[task.name]
        conversation = Conversation(self.decoding.renderer, limits.window)
        record = EpisodeRecord(limits.max_turns)
        async with AsyncExitStack() as stack:
            try:
                environment = await self.pool.acquire(task)
                stack.push_async_callback(self.pool.release, environment)
                await self._play(key, task, plan, environment, conversation, record)
            except RolloutError as error:
                # In overtime the episode is already finished. Only its record ends here.
                if isinstance(error, TransientError) and not (last_attempt or record.in_overtime):
                    raise
                record.error = None if record.in_overtime else error
            report(record.error)  # before the release, which may take long
        return conversation, record

    async def _play(
        self,
        key: EpisodeKey,
        task: Task,
        plan: RolloutPlan,
        environment: Environment,
        conversation: Conversation,
        record: EpisodeRecord,
    ) -> None:
        observation, hits = await self._start(key, task, plan, environment, record)
        self.observer.turn(key, record.share)
        await self.decoding.turnstile.pass_through()
        limits = (
            self.limits[task.name]
            if plan.condition == "guided"
            else replace(self.limits[task.name], max_questions=0)
        )
        conversation.add(
            self.context.opening(task, observation, hits, max_questions=limits.max_questions)
        )
        every_turn = plan.condition == "guided" and limits.advice.every_turn
        await self._play_turns(
            key, task, limits, environment, conversation, record, advised=every_turn
        )

    async def _start(
        self,
        key: EpisodeKey,
        task: Task,
        plan: RolloutPlan,
        environment: Environment,
        record: EpisodeRecord,
    ) -> tuple[Observation, Sequence[Hit]]:
        """Reset the environment and, for a guided episode, retrieve experience.

        Both happen at the same time if the query does not depend on the first observation.
        """
        if plan.condition == "free":
            return await environment.reset(task), ()
        if self.context.query_needs_observation(task):
            observation = await environment.reset(task)
            return observation, await self._choose_experience(
                key, task, self.context.query(task, observation), record
            )
        return await _await_both(
            environment.reset(task),
            self._choose_experience(key, task, self.context.query(task, None), record),
        )

    async def _choose_experience(
        self, key: EpisodeKey, task: Task, query: str, record: EpisodeRecord, *, turn: int = 0
    ) -> Sequence[Hit]:
        """Return the experiences that guide the episode: those that are found and accepted."""
        accepted: list[Hit] = []
        for hit in await self._retrieve(key, task, query, record, turn=turn):
            judged = await self.judge.judge(key, task, hit)
            if judged.use.verdict == "reject":
                record.rejected.append(judged)
            else:
                accepted.append(judged)
        record.hits += [(turn, hit) for hit in accepted]
        return accepted

    async def _retrieve(
        self, key: EpisodeKey, task: Task, query: str, record: EpisodeRecord,
        *, question: int = 0, turn: int = 0,
    ) -> list[Hit]:  # fmt: skip
        """Return the experiences for a question, or those before a turn that are still unknown."""
        await self.decoding.sampler.wait_turn(key.session)
        window = self.limits[task.name].window
        shown = () if question else record.shown(window)
        request = SearchRequest(query, task, key.group, key.member, question, turn, shown)
        count = 1 if question else self.limits[task.name].advice.count
        return [hit for hit in await self.retriever.search([request] * count) if hit]

    async def _play_turns(
        self,
        key: EpisodeKey,
        task: Task,
        limits: Limits,
        environment: Environment,
        conversation: Conversation,
        record: EpisodeRecord,
        *,
        advised: bool,
    ) -> None:
        """Play turns until the end. `advised`: experience is searched before every turn."""
        while not record.done:
            in_overtime = record.in_overtime
            record.truncated |= in_overtime
            if len(record.results) == limits.max_turns + limits.extra_turns:
                return
            if advised and record.results and not in_overtime:
                query = self.context.turn_query(task, conversation.segments)
                found = await self._choose_experience(
                    key, task, query, record, turn=len(record.results)
                )
                conversation.add(self.context.advice(task, found))
            prompt = (
                await asyncio.to_thread(conversation.prompt)
                if conversation.is_long
                else conversation.prompt()
            )
            completion = await self.decoding.complete(
                prompt,
                limits.max_response_tokens,
                session=key.session,
                draw=("sampling", key.draw_name, len(record.results) + record.questions),
            )
            if completion is None:
                record.truncated = True
                return
            await self.decoding.turnstile.pass_through()
            record.sampled_tokens += len(completion.ids)
            record.truncated |= completion.finish == "length"
            text = conversation.add_completion(completion, trained=not in_overtime)
            response = self.context.parse(task, text)
            if (
                response.query is not None
                and record.questions < limits.max_questions
                and not in_overtime
            ):
                await self._ask(key, task, response.query, conversation, record)
                continue
            result = await environment.step(response.action)
            record.results.append(result)
            self.observer.turn(key, record.share)
            conversation.add(self.context.feedback(result))

    async def _ask(
        self,
        key: EpisodeKey,
        task: Task,
        query: str,
        conversation: Conversation,
        record: EpisodeRecord,
    ) -> None:
        """Answer a question with search_and_ask (CRL §3.2.2).

        The retrieved experience is refined for the situation. A question takes no environment turn.
        """
        conversation.mark_tool_call()
        record.questions += 1
        found = await self._retrieve(
            key, task, self.context.question_query(task, query), record, question=record.questions
        )
        hit = found[0] if found else None
        if hit:
            await self.decoding.sampler.wait_turn(
                key.session
            )  # requests to the extractor are ordered too
            hit = await self.retriever.refine(
                Question(f"{key}/{record.questions}", task, query, conversation.segments), hit
            )
        if hit:
            use = replace(hit.use, verdict=self.judge.verdict_on_asked)
            record.hits.append((len(record.results), replace(hit, use=use)))
        conversation.add(self.context.reply(task, hit))


@dataclass
class EpisodeRecord:
    """Record of an episode so far."""

    max_turns: int
    """Environment turns that count; those after them are overtime."""
    results: list[StepResult] = field(default_factory=list)
    """Result of every environment turn, overtime included."""
    hits: list[tuple[int, Hit]] = field(default_factory=list)
    """Experience that guided the episode, with the number of turns before it."""
    rejected: list[Hit] = field(default_factory=list)
    """Experience that the actor rejected."""
    questions: int = 0
    """Number of questions that the agent has asked."""
    sampled_tokens: int = 0
    """Tokens that the actor sampled, including overtime."""
    truncated: bool = False
    """True if the episode reached its turn limit, a generation limit or the context limit."""
    error: RolloutError | None = None
    """Error of a failed episode."""

    @property
    def share(self) -> float:
        """Share of a started episode that is played, below 1: its start, and its turns."""
        return (1 + min(len(self.results), self.max_turns)) / (self.max_turns + 2)

    def shown(self, window: int | None) -> tuple[str, ...]:
        """Return the uids of experiences that a prompt with a window of turns still contains."""
        oldest = 0 if window is None else len(self.results) - window + 1
        return tuple(hit.use.uid for turn, hit in self.hits if turn == 0 or turn >= oldest)

    @property
    def in_overtime(self) -> bool:
        """True if the next turn does not count."""
        return len(self.results) >= self.max_turns

    @property
    def done(self) -> bool:
        """True if the environment has ended the episode."""
        return bool(self.results) and self.results[-1].done

    @property
    def counted(self) -> list[StepResult]:
        """Results without overtime."""
        return self.results[: self.max_turns]

    def outcome(self) -> Outcome:
        """Return the outcome, with the environment's reward as the only channel."""
        counted = self.counted
        return Outcome(
            {"outcome": sum((result.reward for result in counted), 0.0)},
            success=any(result.success for result in counted),
            score=counted[-1].score if counted else None,
            truncated=self.truncated,
            error=None if self.error is None else str(self.error),
        )

    def activity(self) -> Activity:
        counted = self.counted
        return Activity(
            tuple(result.reward for result in counted),
            overtime_turns=len(self.results) - len(counted),
            invalid_actions=sum(not result.valid for result in counted),
            sampled_tokens=self.sampled_tokens,
        )

    def guidance(self) -> Guidance:
        return Guidance(
            used=tuple(hit.use for _, hit in self.hits),
            shown=tuple(hit.text for _, hit in self.hits),
            rejected=tuple(hit.use for hit in self.rejected),
        )


async def _await_both(one: Coroutine[Any, Any, A], other: Coroutine[Any, Any, B]) -> tuple[A, B]:
    """Await two coroutines at the same time and return their results.

    If one fails, the other still runs to its end: side effects of a search must not depend on
    timing. If both fail, an error that ends the run takes precedence over a `RolloutError`.
    """
    tasks = asyncio.create_task(one), asyncio.create_task(other)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    if errors := [outcome for outcome in outcomes if isinstance(outcome, BaseException)]:
        raise min(errors, key=lambda error: isinstance(error, RolloutError))
    return tasks[0].result(), tasks[1].result()

"""One episode: an agent and an environment, turn by turn, until one of them is done.

`EpisodeRunner.play` is the boundary at which a failed episode turns into data: a `RolloutError` becomes an error trajectory,
or in overtime the end of the record; after a `TransientError` the episode is played once more before that. Everything else (a dead
engine, a bug) passes through and ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from crl.errors import RolloutError, TransientError
from crl.protocols import (
    ContextProvider,
    Environment,
    EnvironmentPool,
    Hit,
    Question,
    Retriever,
    RewardShaper,
    SearchRequest,
)
from crl.rollout.turnstile import Turnstile
from crl.rollout.waves import Sampler
from crl.seeds import derive_seed
from crl.tokens import ChatRenderer, Conversation
from crl.types import Observation, RolloutPlan, Sampling, StepResult, Task, Trajectory, Verdict

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Limits:
    """A task's bounds: turns of an episode, sampled tokens of a turn, turns in view (None: all).

    overtime: turns for which an episode that is not over at the limit goes on, for the record alone: they change neither its
    reward nor its success, and are not trained on. asks: questions that a guided episode may ask before that; 0 = it has no tool.
    """

    turns: int
    max_response_tokens: int
    window: int | None = None
    overtime: int = 0
    asks: int = 0


@dataclass(frozen=True)
class EpisodeKey:
    """Address of an episode in its run, and of its random draws."""

    purpose: str
    """`train`, or the name of an eval set."""
    step: int
    group: int
    member: int
    arm: str = ""
    """Tells apart episodes that have the same draws and may be in flight together."""

    @property
    def group_session(self) -> str:
        purpose = f"{self.purpose}@{self.arm}" if self.arm else self.purpose
        return f"{purpose}/{self.step:08d}/{self.group:08d}"

    @property
    def session(self) -> str:
        """Sorts as the addresses do."""
        return f"{self.group_session}/{self.member:04d}"

    @property
    def draws(self) -> str:
        """Name of the random draws: the session, whatever the arm."""
        return replace(self, arm="").session

    def __str__(self) -> str:
        return f"{self.purpose}/{self.step}/{self.group}/{self.member}"


class Nothing:
    """`Retriever` of a run without experience: it finds nothing."""

    async def search(self, requests: Sequence[SearchRequest]) -> list[Hit | None]:
        return [None] * len(requests)

    async def refine(self, question: Question, hit: Hit) -> Hit:
        return hit


class Judge(Protocol):
    """Says of what was found for an episode whether it guides it. Episodes `join` before any of their group runs, and `leave`.

    of_asked: the verdict on what an agent asked for, so that all that guides an episode earns on one scale.
    """

    @property
    def of_asked(self) -> Verdict | None: ...
    def join(self, key: EpisodeKey) -> None: ...
    def leave(self, key: EpisodeKey) -> None: ...
    async def judge(self, key: EpisodeKey, task: Task, hit: Hit) -> Hit:
        """The hit with its verdict and, where that is to refine, with another text."""
        ...


class Unasked:
    """`Judge` of a run in which all that is found guides."""

    of_asked: Verdict | None = None

    def join(self, key: EpisodeKey) -> None:
        """Nothing is remembered."""

    def leave(self, key: EpisodeKey) -> None:
        """Nothing is remembered."""

    async def judge(self, key: EpisodeKey, task: Task, hit: Hit) -> Hit:
        return hit


@dataclass(frozen=True)
class EpisodeRunner:
    """Plays episodes. limits: by task name; max_context: tokens of one sequence; seed: the root of all sampling draws."""

    sampler: Sampler
    pool: EnvironmentPool
    context: ContextProvider
    shaper: RewardShaper
    retriever: Retriever
    renderer: ChatRenderer
    limits: dict[str, Limits]
    max_context: int
    temperature: float
    seed: int
    judge: Judge = field(default_factory=Unasked)
    turnstile: Turnstile = field(default_factory=Turnstile)

    def join(self, key: EpisodeKey) -> None:
        """`play` will be called for it."""
        self.sampler.join(key.session)
        self.judge.join(key)

    async def play(self, key: EpisodeKey, task: Task, plan: RolloutPlan) -> Trajectory:
        """Plays to the end; the caller has `join`ed all that play with it. Raises what is not a `RolloutError`.

        What may go well when it is tried again (an engine that died and was started anew) is played once more, from the start.
        """
        try:
            try:
                conversation, record = await self._attempt(key, task, plan)
            except TransientError:
                conversation, record = await self._attempt(key, task, plan, last=True)
        finally:
            self.sampler.leave(key.session)
            self.judge.leave(key)
        trajectory = Trajectory(
            task, key.step, key.group, key.member, plan.condition, conversation.segments, conversation.traces,
            rewards={"outcome": record.reward}, reward=record.reward, success=record.success, score=record.score,
            turns=record.turns, overtime_turns=record.played - record.turns, invalid_actions=record.invalid,
            sampled_tokens=record.sampled_tokens,
            used=tuple(hit.use for hit in record.hits), shown=tuple(hit.text for hit in record.hits),
            rejected=tuple(hit.use for hit in record.rejected), truncated=record.truncated, error=record.error,
        )  # fmt: skip
        return (
            trajectory
            if trajectory.error
            else trajectory.with_rewards(self.shaper.shape(trajectory))
        )

    async def _attempt(
        self, key: EpisodeKey, task: Task, plan: RolloutPlan, *, last: bool = False
    ) -> tuple[Conversation, Record]:
        """The episode as far as it went. Raises `TransientError`, unless it is the last attempt."""
        limits = self.limits[task.name]
        conversation, record = Conversation(self.renderer, limits.window), Record()
        try:
            await self._play(key, task, plan, conversation, record)
        except RolloutError as error:
            late = (
                record.played >= limits.turns
            )  # in overtime the episode is finished, and its record ends here
            if isinstance(error, TransientError) and not (last or late):
                raise
            record.error = None if late else str(error)
        return conversation, record

    async def _play(
        self,
        key: EpisodeKey,
        task: Task,
        plan: RolloutPlan,
        conversation: Conversation,
        record: Record,
    ) -> None:
        environment = await self.pool.acquire(task)
        try:
            observation, hit = await self._begin(key, task, plan, environment, record)
            await self.turnstile.passed()
            limits = (
                self.limits[task.name]
                if plan.condition == "guided"
                else replace(self.limits[task.name], asks=0)
            )
            conversation.add(self.context.opening(task, observation, hit, asks=limits.asks))
            await self._converse(key, task, limits, environment, conversation, record)
        finally:
            await self.pool.release(environment)

    async def _begin(
        self,
        key: EpisodeKey,
        task: Task,
        plan: RolloutPlan,
        environment: Environment,
        record: Record,
    ) -> tuple[Observation, Hit | None]:
        """Resets the environment; for a guided episode looks for experience, meanwhile where the query can be told before."""
        if plan.condition == "free":
            return await environment.reset(task), None
        if self.context.query_observes(task):
            observation = await environment.reset(task)
            return observation, await self._guide(
                key, task, self.context.query(task, observation), record
            )
        return await _both(
            environment.reset(task), self._guide(key, task, self.context.query(task, None), record)
        )

    async def _guide(self, key: EpisodeKey, task: Task, query: str, record: Record) -> Hit | None:
        """What is found for the episode, unless the agent rejects it."""
        hit = await self._retrieve(key, task, query)
        if hit is None:
            return None
        judged = await self.judge.judge(key, task, hit)
        if judged.use.verdict == "reject":
            record.rejected.append(judged)
            return None
        record.hits.append(judged)
        return judged

    async def _retrieve(
        self, key: EpisodeKey, task: Task, query: str, *, asked: int = 0
    ) -> Hit | None:
        await self.sampler.turn(key.session)
        (hit,) = await self.retriever.search(
            [SearchRequest(query, task, key.group, key.member, asked)]
        )
        return hit

    async def _converse(
        self,
        key: EpisodeKey,
        task: Task,
        limits: Limits,
        environment: Environment,
        conversation: Conversation,
        record: Record,
    ) -> None:
        while not record.over:
            late = record.played >= limits.turns
            record.truncated |= late
            if record.played == limits.turns + limits.overtime:
                return
            prompt = conversation.prompt()
            room = self.max_context - len(prompt)
            if room < 1:
                record.truncated = True
                return
            sampling = Sampling(
                min(limits.max_response_tokens, room), self.renderer.stop_ids, self.temperature
            )
            draw = derive_seed(self.seed, "sampling", key.draws, record.played + record.asked)
            completion = await self.sampler.generate(
                prompt, sampling, session=key.session, rng=draw
            )
            await self.turnstile.passed()
            record.sampled_tokens += len(completion.ids)
            record.truncated |= completion.finish == "length"
            response = self.context.parse(task, conversation.sampled(completion, trained=not late))
            if response.query is not None and record.asked < limits.asks and not late:
                await self._ask(key, task, response.query, conversation, record)
                continue
            result = await environment.step(response.action)
            record.add(result, late=late)
            conversation.add(self.context.following(result))

    async def _ask(
        self, key: EpisodeKey, task: Task, query: str, conversation: Conversation, record: Record
    ) -> None:
        """search_and_ask (CRL §3.2.2): what is found is refined for the situation. Takes no turn of the game."""
        conversation.asked()
        record.asked += 1
        hit = await self._retrieve(key, task, self.context.asked(task, query), asked=record.asked)
        if hit:
            await self.sampler.turn(key.session)  # the extractor too is asked in order
            hit = await self.retriever.refine(
                Question(f"{key}/{record.asked}", task, query, conversation.segments), hit
            )
        if hit:
            record.hits.append(replace(hit, use=replace(hit.use, verdict=self.judge.of_asked)))
        conversation.add(self.context.reply(task, hit))


@dataclass
class Record:
    """What an episode has come to so far."""

    hits: list[Hit] = field(default_factory=list)
    rejected: list[Hit] = field(default_factory=list)
    asked: int = 0
    played: int = 0
    reward: float = 0.0
    success: bool = False
    score: float | None = None
    over: bool = False
    turns: int = 0
    invalid: int = 0
    sampled_tokens: int = 0
    truncated: bool = False
    error: str | None = None

    def add(self, result: StepResult, *, late: bool) -> None:
        """late: played in overtime, which does not count."""
        self.played += 1
        self.over = result.done
        if late:
            return
        self.turns += 1
        self.reward += result.reward
        self.success |= result.success
        self.score = result.score
        self.invalid += not result.valid


async def _both(one: Coroutine[Any, Any, A], other: Coroutine[Any, Any, B]) -> tuple[A, B]:
    """What the two come to at the same time. Neither is given up when the other fails: what was searched for must not depend on timing."""
    tasks = asyncio.create_task(one), asyncio.create_task(other)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    if errors := [outcome for outcome in outcomes if isinstance(outcome, BaseException)]:
        raise min(
            errors, key=lambda error: isinstance(error, RolloutError)
        )  # what ends the run comes first
    return tasks[0].result(), tasks[1].result()

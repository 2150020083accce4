"""One episode: an agent and an environment, turn by turn, until one of them is done.

`EpisodeRunner.play` is the boundary at which a failed episode turns into data: a `RolloutError` becomes an error trajectory,
or in overtime the end of the record. Everything else (a dead engine, a bug) passes through and ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crl.errors import RolloutError
from crl.protocols import ContextProvider, Environment, EnvironmentPool, Hit, Retriever, RewardShaper, SearchRequest
from crl.rollout.waves import Sampler
from crl.seeds import derive_seed
from crl.tokens import ChatRenderer, Conversation
from crl.types import Observation, RolloutPlan, Sampling, StepResult, Task, Trajectory


@dataclass(frozen=True)
class Limits:
    """A task's bounds: turns of an episode, sampled tokens of a turn, turns in view (None: all).

    overtime: turns for which an episode that is not over at the limit goes on, for the record alone: they change neither its
    reward nor its success, and are not trained on.
    """

    turns: int
    max_response_tokens: int
    window: int | None = None
    overtime: int = 0


@dataclass(frozen=True)
class EpisodeKey:
    """Where an episode stands in its run: the address of its random draws. `purpose`: train, or the name of an eval set."""

    purpose: str
    step: int
    group: int
    member: int

    @property
    def session(self) -> str:
        return f"{self.purpose}/{self.step:08d}/{self.group:08d}/{self.member:04d}"


class Nothing:
    """`Retriever` of a run without experience: it finds nothing."""

    async def search(self, requests: Sequence[SearchRequest]) -> list[Hit | None]:
        return [None] * len(requests)


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

    async def play(self, key: EpisodeKey, task: Task, plan: RolloutPlan) -> Trajectory:
        """Plays to the end; the caller has joined `key.session` at the sampler, this leaves it. Raises what is not a `RolloutError`."""
        limits = self.limits[task.name]
        conversation = Conversation(self.renderer, limits.window)
        record = Record()
        try:
            await self._play(key, task, plan, conversation, record)
        except RolloutError as error:
            if record.played < limits.turns:  # in overtime the episode is finished, and its record ends here
                record.error = str(error)
        finally:
            self.sampler.leave(key.session)
        hit = record.hit
        trajectory = Trajectory(
            task, key.step, key.group, key.member, plan.condition, conversation.segments, conversation.traces,
            rewards={"outcome": record.reward}, reward=record.reward, success=record.success, turns=record.turns,
            invalid_actions=record.invalid, used=(hit.use,) if hit else (), shown=(hit.text,) if hit else (),
            truncated=record.truncated, error=record.error,
        )  # fmt: skip
        return trajectory if trajectory.error else trajectory.with_rewards(self.shaper.shape(trajectory))

    async def _play(self, key: EpisodeKey, task: Task, plan: RolloutPlan, conversation: Conversation, record: Record) -> None:
        environment = await self.pool.acquire(task)
        try:
            observation = await environment.reset(task)
            if plan.condition == "guided":
                record.hit = await self._retrieve(key, task, observation)
            conversation.add(self.context.opening(task, observation, record.hit))
            await self._converse(key, self.limits[task.name], environment, conversation, record)
        finally:
            await self.pool.release(environment)

    async def _retrieve(self, key: EpisodeKey, task: Task, observation: Observation) -> Hit | None:
        await self.sampler.turn(key.session)
        (hit,) = await self.retriever.search([SearchRequest(self.context.query(task, observation), task, key.group, key.member)])
        return hit

    async def _converse(
        self, key: EpisodeKey, limits: Limits, environment: Environment, conversation: Conversation, record: Record
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
            sampling = Sampling(min(limits.max_response_tokens, room), self.renderer.stop_ids, self.temperature)
            draw = derive_seed(self.seed, "sampling", key.session, record.played)
            completion = await self.sampler.generate(prompt, sampling, session=key.session, rng=draw)
            record.truncated |= completion.finish == "length"
            response = self.context.parse(conversation.sampled(completion, trained=not late))
            result = await environment.step(response.action)
            record.add(result, late=late)
            conversation.add(self.context.following(result))


@dataclass
class Record:
    """What an episode has come to so far."""

    hit: Hit | None = None
    played: int = 0
    reward: float = 0.0
    success: bool = False
    over: bool = False
    turns: int = 0
    invalid: int = 0
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
        self.invalid += not result.valid

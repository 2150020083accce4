"""One episode: an agent and an environment, turn by turn, until one of them is done.

`EpisodeRunner.play` is the boundary at which a failed episode turns into data: a `RolloutError` becomes an error trajectory.
Everything else (a dead engine, a bug) passes through and ends the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from crl.errors import RolloutError
from crl.protocols import ContextProvider, Environment, EnvironmentPool, Hit, RewardShaper
from crl.rollout.waves import Sampler
from crl.seeds import derive_seed
from crl.tokens import ChatRenderer, Conversation
from crl.types import RolloutPlan, Sampling, StepResult, Task, Trajectory


@dataclass(frozen=True)
class Limits:
    """A task's bounds: turns of an episode, sampled tokens of a turn, turns in view (None: all)."""

    turns: int
    max_response_tokens: int
    window: int | None = None


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


@dataclass(frozen=True)
class EpisodeRunner:
    """Plays episodes. limits: by task name; max_context: tokens of one sequence; seed: the root of all sampling draws."""

    sampler: Sampler
    pool: EnvironmentPool
    context: ContextProvider
    shaper: RewardShaper
    renderer: ChatRenderer
    limits: dict[str, Limits]
    max_context: int
    temperature: float
    seed: int

    async def play(self, key: EpisodeKey, task: Task, plan: RolloutPlan, hit: Hit | None = None) -> Trajectory:
        """Plays to the end; the caller has joined `key.session` at the sampler, this leaves it. Raises what is not a `RolloutError`."""
        conversation = Conversation(self.renderer, self.limits[task.name].window)
        record = Record()
        try:
            await self._play(key, task, hit, conversation, record)
        except RolloutError as error:
            record.error = str(error)
        finally:
            self.sampler.leave(key.session)
        trajectory = Trajectory(
            task, key.step, key.group, key.member, plan.condition, conversation.segments, conversation.traces,
            rewards={"outcome": record.reward}, reward=record.reward, success=record.success, turns=record.turns,
            invalid_actions=record.invalid, used=(hit.use,) if hit else (), shown=(hit.text,) if hit else (),
            truncated=record.truncated, error=record.error,
        )  # fmt: skip
        return trajectory if trajectory.error else trajectory.with_rewards(self.shaper.shape(trajectory))

    async def _play(self, key: EpisodeKey, task: Task, hit: Hit | None, conversation: Conversation, record: Record) -> None:
        environment = await self.pool.acquire(task)
        try:
            conversation.add(self.context.opening(task, await environment.reset(task), hit))
            await self._converse(key, self.limits[task.name], environment, conversation, record)
        finally:
            await self.pool.release(environment)

    async def _converse(
        self, key: EpisodeKey, limits: Limits, environment: Environment, conversation: Conversation, record: Record
    ) -> None:
        while not record.over:
            if record.turns == limits.turns:
                record.truncated = True
                return
            prompt = conversation.prompt()
            room = self.max_context - len(prompt)
            if room < 1:
                record.truncated = True
                return
            sampling = Sampling(min(limits.max_response_tokens, room), self.renderer.stop_ids, self.temperature)
            draw = derive_seed(self.seed, "sampling", key.session, record.turns)
            completion = await self.sampler.generate(prompt, sampling, session=key.session, rng=draw)
            record.truncated |= completion.finish == "length"
            result = await environment.step(self.context.parse(conversation.sampled(completion)).action)
            record.add(result)
            conversation.add(self.context.following(result))


@dataclass
class Record:
    """What an episode has come to so far."""

    reward: float = 0.0
    success: bool = False
    over: bool = False
    turns: int = 0
    invalid: int = 0
    truncated: bool = False
    error: str | None = None

    def add(self, result: StepResult) -> None:
        self.turns += 1
        self.reward += result.reward
        self.success |= result.success
        self.over = result.done
        self.invalid += not result.valid

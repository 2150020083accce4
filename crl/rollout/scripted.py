"""Demonstrations: episodes in which a scripted player answers instead of a model.

Prompts, limits and records are those of all other episodes. A demonstration is never guided,
because a scripted player reads no experience.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from crl.envs.curriculum import ScriptedPlayer
from crl.modeling.tokens import Conversation
from crl.protocols import Environment
from crl.rollout.decoding import Decoding
from crl.rollout.episode import EpisodeKey, EpisodeRecord, EpisodeRunner
from crl.seeds import generator
from crl.types import Completion, Observation, RolloutPlan, StepResult, Task


class NoSampler:
    """`Sampler` of episodes without a model."""

    def join(self, session: str) -> None:
        """Do nothing: episodes do not wait for each other."""

    def leave(self, session: str) -> None:
        """Do nothing: episodes do not wait for each other."""

    async def wait_turn(self, session: str) -> None:
        """Do nothing: episodes do not wait for each other."""

    async def generate(self, *args: object, **options: object) -> Completion:
        raise AssertionError("there is no model")


class FreePlanner:
    """`RolloutPlanner` without guided episodes."""

    def plan(self, task: Task, members: int, step: int) -> Sequence[RolloutPlan]:
        return [RolloutPlan("free")] * members


@dataclass(frozen=True)
class ScriptedRunner(EpisodeRunner):
    """Player of demonstrations."""

    players: Mapping[str, Callable[[random.Random], ScriptedPlayer]] = field(default_factory=dict)
    """Maker of scripted players, by task name."""

    async def _play(
        self,
        key: EpisodeKey,
        task: Task,
        plan: RolloutPlan,
        environment: Environment,
        conversation: Conversation,
        record: EpisodeRecord,
    ) -> None:
        draws = generator(self.decoding.seed, "scripted player", key.draw_name)
        player = self.players[task.name](draws)
        decoding = _ScriptedDecoding(
            **{part.name: getattr(self.decoding, part.name) for part in fields(self.decoding)},
            player=player,
        )
        runner = EpisodeRunner(
            decoding, self.pool, self.context, self.shaper, self.retriever, self.limits,
            observer=self.observer,
        )  # fmt: skip
        watched = _WatchedEnvironment(environment, player)
        await runner._play(key, task, RolloutPlan("free"), watched, conversation, record)


@dataclass(frozen=True)
class _ScriptedDecoding(Decoding):
    """Decoding of a scripted player: its next action."""

    player: ScriptedPlayer = field(kw_only=True)

    async def complete(
        self, prompt: Sequence[int], max_tokens: int, *, session: str,
        draw: tuple[str, *tuple[str | int, ...]],
    ) -> Completion | None:  # fmt: skip
        limit = min(max_tokens, self.max_context - len(prompt))
        if limit < 1:
            return None
        ids = self.renderer.answer_ids(self.player.act())
        finish = "stop" if len(ids) <= limit else "length"
        ids = ids[:limit]
        return Completion(ids, (0.0,) * len(ids), (0,) * len(ids), finish)


@dataclass(frozen=True)
class _WatchedEnvironment:
    """`Environment` that shows all observations to a scripted player."""

    environment: Environment
    player: ScriptedPlayer

    async def reset(self, task: Task) -> Observation:
        observation = await self.environment.reset(task)
        self.player.begin(task.goal, observation.text)
        return observation

    async def step(self, text: str) -> StepResult:
        result = await self.environment.step(text)
        self.player.observe(result.text)
        return result

    async def aclose(self) -> None:
        """Do nothing: the episode releases the environment."""

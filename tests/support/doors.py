"""Game in which the agent decides how each turn ends, and parts that let agents play it.

Both serve tests of the code above environments and engines. The engine is scripted. The host, the
renderer and the runner are real.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Container, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from functools import cache
from typing import Any

from crl.config.models import resolve_model
from crl.engines.scripted import ScriptedEngine
from crl.envs.base import ActionSpace, EnvSpec, EnvTasks, Game
from crl.envs.curriculum import Curriculum
from crl.envs.hosting.threads import ThreadHost
from crl.envs.places import PlaceStream
from crl.envs.room.player import RoomPlayer
from crl.methods.parts.rollouts import ChatContext, OutcomeReward
from crl.modeling.loading import load_tokenizer, stop_ids
from crl.modeling.tokens import ChatRenderer
from crl.protocols import Engine, EnvironmentPool, Hit, Question, SearchRequest
from crl.rollout.decoding import Decoding
from crl.rollout.episode import EpisodeRunner, Limits, NullRetriever
from crl.rollout.waves import DirectSampler
from crl.types import ExperienceUse, StepResult, Task

RULES = "Find the right door."
TASK = Task("doors", seed=1, split="train", goal="Open it.")

RESULTS = {
    "open": StepResult("It opens.", reward=1.0, done=True, success=True),
    "lose": StepResult("You fall.", done=True),
    "wait": StepResult("Nothing happens."),
    "peek": StepResult("You see it.", success=True),
    "polish": StepResult("It shines.", score=0.4),
    "coin": StepResult("You find a coin.", reward=0.5),
}


class Doors:
    """Game that follows its agent, including the actions `crash` and `hang`.

    Tasks with a seed in `broken` fail at the reset. `actions` lists all actions since the game was
    created.
    """

    def __init__(self, broken: Container[int] = ()) -> None:
        self.broken = broken
        self.actions: list[str] = []
        self.closed = False
        self.end_hang = threading.Event()

    def reset(self, task: Task) -> str:
        if task.seed in self.broken:
            raise ValueError("the hinges are rusty")
        return "A door."

    def step(self, action: str) -> StepResult:
        self.actions.append(action)
        if action == "crash":
            raise ValueError("the door fell off")
        if action == "hang":
            self.end_hang.wait(30)
        return RESULTS.get(action) or StepResult("You cannot do that.", valid=False)

    def close(self) -> None:
        self.closed = True


def doors_spec(make: Callable[[], Game]) -> EnvSpec:
    return EnvSpec(
        name="doors",
        make_game=lambda rendering: make(),
        tasks=EnvTasks(
            lambda seed, settings: PlaceStream("doors", "{place}", seed, settings),
            lambda split, n, seed, settings: (),
        ),
        actions=ActionSpace(tuple(RESULTS), "one word"),
        turns=3,
        reward_range=(0.0, 3.0),  # for agents that take coins and open the door
        curriculum=Curriculum(RoomPlayer),
    )


class OpenHost:
    """Real `ThreadHost` of the game, and all games that the host created."""

    def __init__(self, host: ThreadHost, games: list[Doors]) -> None:
        self.host, self.games = host, games


@asynccontextmanager
async def open_host(
    *, timeout: float = 30.0, broken: Container[int] = ()
) -> AsyncIterator[OpenHost]:
    games: list[Doors] = []

    def make() -> Doors:
        games.append(Doors(broken))
        return games[-1]

    host = ThreadHost({"doors": (doors_spec(make), "compact")}, threads=4, timeout=timeout)
    try:
        yield OpenHost(host, games)
    finally:
        for game in games:
            game.end_hang.set()
        await host.aclose()


@cache
def renderer() -> ChatRenderer:
    path = resolve_model("tiny-actor")
    tokenizer = load_tokenizer(path)
    return ChatRenderer(tokenizer, stop_ids(path, tokenizer))


def script(*actions: str) -> Callable[[str], str]:
    """Return an agent that takes `actions` turn by turn and then repeats the last one.

    The agent reads the number of the turn from the prompt.
    """
    return lambda prompt: actions[min(prompt.count("<|im_start|>assistant\n"), len(actions)) - 1]


def dice(prompt: str) -> str:
    """Return a random action that depends only on the whole prompt."""
    return random.Random(prompt).choice(list(RESULTS))


def scripted(*actions: str) -> ScriptedEngine:
    return ScriptedEngine(renderer(), script(*actions))


HIT = Hit("Open means open.", ExperienceUse("e1", 1, "g1", "start"))


class RecordingRetriever:
    """`Retriever` that returns the same hit for every request and records the requests."""

    def __init__(self, hit: Hit | None = HIT) -> None:
        self.hit = hit
        self.requests: list[SearchRequest] = []

    async def search(self, requests: Sequence[SearchRequest]) -> list[Hit | None]:
        self.requests += requests
        return [self.hit] * len(requests)

    async def refine(self, question: Question, hit: Hit) -> Hit:
        return hit


def runner(engine: Engine, pool: EnvironmentPool, **changes: Any) -> EpisodeRunner:
    """Return a runner of the doors. `changes` names fields of the runner or of its decoding."""
    names = {field.name for field in fields(Decoding)} & changes.keys()
    decoding = Decoding(DirectSampler(engine), renderer(), 512, temperature=1.0, seed=0)
    parts: dict[str, Any] = {
        "decoding": replace(decoding, **{name: changes.pop(name) for name in names}),
        "pool": pool,
        "context": ChatContext({"doors": RULES}),
        "shaper": OutcomeReward(),
        "retriever": NullRetriever(),
        "limits": {"doors": Limits(max_turns=3, max_response_tokens=32)},
    }
    return EpisodeRunner(**{**parts, **changes})


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` is true, then a little longer for events that must not happen."""
    while not condition():  # noqa: ASYNC110  (no code would set an event)
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)

"""Runs games for the rollouts: those of `hosting="threads"` environments here, the others through `crl.envs.processes`.

`ThreadHost` lends `ThreadEnvironment`s: async fronts of one game each. A game's calls run on one of a bounded number of
threads, each call under a deadline. An episode whose game raises, or hangs, ends in a `RolloutError` of kind env and
costs nothing else: the game is never lent again, and a hung thread is left to itself and replaced.

`Hosts` is one pool of several; `CheckedGame` is what it and everybody else plays a game through. This module imports no environment.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from crl.envs.base import EnvSpec, Game, Rendering, readable
from crl.errors import CrlError, RolloutError
from crl.protocols import Environment, EnvironmentPool
from crl.scratch import scratch_folder
from crl.types import Observation, StepResult, Task

_Key = tuple[EnvSpec, Rendering]


class ThreadHost:
    """An `EnvironmentPool` of games that live in this process.

    `tasks` maps a task's name to its environment and rendering. At most `threads` calls run at a time; each may take
    `deadline` seconds, the making of a game included. What killed processes left among temporary files is swept now.

    `failures` counts calls that raised or overran; `replaced` those of them whose thread was abandoned.
    """

    def __init__(
        self,
        tasks: Mapping[str, tuple[EnvSpec, Rendering]],
        *,
        threads: int = 8,
        deadline: float = 60.0,
    ) -> None:
        misplaced = sorted({spec.name for spec, _ in tasks.values() if spec.hosting != "threads"})
        if misplaced:
            raise ValueError(f"not hosted by threads: {', '.join(misplaced)}")
        if threads < 1 or not deadline > 0:
            raise ValueError(
                f"needs at least one thread and a positive deadline, not {threads} and {deadline}"
            )
        self.failures = 0
        self.replaced = 0
        self._tasks = dict(tasks)
        self.crew = _Crew(threads, deadline)
        self._free: defaultdict[_Key, list[Game]] = defaultdict(list)
        self._lent: set[ThreadEnvironment] = set()
        self._closed = False
        scratch_folder()

    async def acquire(self, task: Task) -> ThreadEnvironment:
        """Lends a game of the task's environment: the one given back last, else a new one.

        Raises `RolloutError` when none can be made; a `ConfigError` of the environment passes through.
        """
        if self._closed:
            raise RolloutError("env", "the host is closed")
        spec, rendering = self._tasks[task.name]
        environment = ThreadEnvironment(self, spec, rendering)
        free = self._free[spec, rendering]
        if free:
            environment.game = free.pop()
        else:
            environment.game = await environment.make()
        self._lent.add(environment)
        return environment

    async def release(self, environment: Environment) -> None:
        """Takes a lent environment back; its game is kept for the next episode unless it failed."""
        assert isinstance(environment, ThreadEnvironment)
        self._lent.discard(environment)
        game, environment.game = environment.game, None
        if game is None:
            return
        if self._closed:
            await self.discard(game)
        else:
            self._free[environment.spec, environment.rendering].append(game)

    async def aclose(self) -> None:
        """Closes every game, the lent ones too. Nothing can be acquired afterwards."""
        self._closed = True
        games = [game for free in self._free.values() for game in free]
        self._free.clear()
        lent = list(self._lent)
        await asyncio.gather(
            *(self.discard(game) for game in games), *(environment.aclose() for environment in lent)
        )
        self.crew.dismiss()

    async def discard(self, game: Game) -> None:
        """Closes a game for good; what goes wrong with that concerns nobody any more."""
        left = [game]
        with suppress(TimeoutError):
            await self.crew.run(
                lambda: left.pop().close(), abandoned=lambda: [game.close() for game in left]
            )


class Host(EnvironmentPool, Protocol):
    """failures: calls that failed; replaced: threads, or workers, that were given up."""

    failures: int
    replaced: int


class Hosts:
    """An `EnvironmentPool` of several: each task's environments are lent by its own host. hosts: by the task's name."""

    def __init__(self, hosts: Mapping[str, Host]) -> None:
        self._hosts = dict(hosts)
        self._lenders: dict[Environment, Host] = {}

    def figures(self) -> dict[str, float]:
        """env/failures and env/replaced, of all hosts since they began."""
        hosts = set(self._hosts.values())
        return {
            "env/failures": sum(host.failures for host in hosts),
            "env/replaced": sum(host.replaced for host in hosts),
        }

    async def acquire(self, task: Task) -> Environment:
        host = self._hosts[task.name]
        environment = await host.acquire(task)
        self._lenders[environment] = host
        return environment

    async def release(self, environment: Environment) -> None:
        await self._lenders.pop(environment).release(environment)

    async def aclose(self) -> None:
        await asyncio.gather(*(host.aclose() for host in set(self._hosts.values())))


class ThreadEnvironment:
    """One lent game. Every error of it is a `RolloutError` of kind env, after which the game is gone."""

    def __init__(self, host: ThreadHost, spec: EnvSpec, rendering: Rendering) -> None:
        self.spec = spec
        self.rendering: Rendering = rendering
        self.game: Game | None = None
        self._host = host

    async def make(self) -> Game:
        """A new game, not yet lent. One that is made too late is closed at once."""
        made: list[Game] = []

        def make() -> Game:
            made.append(CheckedGame(self.spec.make_game(self.rendering), self.spec.reward_range))
            return made[0]

        return await self._call("make", make, abandoned=lambda: [game.close() for game in made])

    async def reset(self, task: Task) -> Observation:
        game = self._alive()
        return Observation(
            await self._call("reset", lambda: game.reset(task), abandoned=game.close)
        )

    async def step(self, text: str) -> StepResult:
        game = self._alive()
        return await self._call("step", lambda: game.step(text), abandoned=game.close)

    async def aclose(self) -> None:
        """Closes the game for good."""
        game, self.game = self.game, None
        if game is not None:
            await self._host.discard(game)

    async def _call(
        self, what: str, function: Callable[[], Any], abandoned: Callable[[], object]
    ) -> Any:
        """Runs `function` under the deadline. On any error the game is given up: closed, or left to its hung thread."""
        host = self._host
        try:
            outcome = await host.crew.run(function, abandoned)
        except TimeoutError:
            self.game = None
            host.failures += 1
            host.replaced += 1
            raise RolloutError(
                "env", f"{self.spec.name}: {what} overran its deadline of {host.crew.deadline:g} s"
            ) from None
        except asyncio.CancelledError:
            self.game = None
            raise
        if outcome.error is None:
            return outcome.value
        await self.aclose()
        if isinstance(outcome.error, CrlError) and not isinstance(outcome.error, RolloutError):
            raise outcome.error
        host.failures += 1
        raise RolloutError(
            "env", f"{self.spec.name}: {what}: {describe(outcome.error)}"
        ) from outcome.error

    def _alive(self) -> Game:
        if self.game is None:
            raise RolloutError(
                "env", f"{self.spec.name}: this game has failed, was closed or given back"
            )
        return self.game


@dataclass(frozen=True, slots=True)
class _Outcome:
    value: Any = None
    error: BaseException | None = None


class _Crew:
    """At most `limit` threads that run one call at a time each; one that hangs no longer counts.

    Bound to the event loop that first uses it.
    """

    def __init__(self, limit: int, deadline: float) -> None:
        self._slots = asyncio.Semaphore(limit)
        self.deadline = deadline
        self._idle: list[_Worker] = []

    async def run(self, function: Callable[[], Any], abandoned: Callable[[], object]) -> _Outcome:
        """Runs `function` on a thread and returns what came of it. The deadline counts from when a thread takes it.

        Raises `TimeoutError` on an overrun. Then, and when the caller is cancelled, the thread is abandoned: once its
        call does return, it runs `abandoned` and ends. When no thread has taken the call yet, one is made that runs `abandoned` alone.
        """
        worker = None
        try:
            async with self._slots:
                worker = self._idle.pop() if self._idle else _Worker()
                async with asyncio.timeout(self.deadline):
                    outcome = await worker.run(function)
                self._idle.append(worker)
                return outcome
        except BaseException:
            (worker or _Worker()).retire(abandoned)
            raise

    def dismiss(self) -> None:
        while self._idle:
            self._idle.pop().retire(lambda: None)


class _Worker:
    """One daemon thread and the queue of its jobs (a daemon, so that a hung call cannot keep the process alive)."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="crl-game", daemon=True).start()

    async def run(self, function: Callable[[], Any]) -> _Outcome:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Outcome] = loop.create_future()

        def job() -> None:
            outcome = _attempt(function)
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_deliver, future, outcome)

        self._jobs.put(job)
        return await future

    def retire(self, last: Callable[[], object]) -> None:
        self._jobs.put(lambda: _attempt(last))
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # an idle thread keeps no game alive


def _attempt(function: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(value=function())
    except (
        BaseException
    ) as error:  # whatever a game raises, SystemExit too, costs its episode and not the thread
        return _Outcome(error=error)


def _deliver(future: asyncio.Future[_Outcome], outcome: _Outcome) -> None:
    if not future.done():
        future.set_result(outcome)


def describe(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class CheckedGame:
    """A `Game` that plays another one, `game`, and lets nothing through that a run could not go on with.

    What is no answer, or would bring the episode's reward out of `reward_range`, raises `TypeError` or `ValueError`.
    """

    def __init__(self, game: Game, reward_range: tuple[float, float]) -> None:
        self.game = game
        self._low, self._high = reward_range
        self._reward = 0.0

    def reset(self, task: Task) -> str:
        self._reward = 0.0
        text = self.game.reset(task)
        if not isinstance(text, str):
            raise TypeError(f"reset must return the observation's text, not {type(text).__name__}")
        return readable(text)

    def step(self, action: str) -> StepResult:
        result = _checked(self.game.step(action))
        self._reward += result.reward
        if not self._low - _ROUNDING <= self._reward <= self._high + _ROUNDING:
            raise ValueError(
                f"an episode's reward must be in [{self._low:g}, {self._high:g}], not {self._reward:g}"
            )
        return result

    def close(self) -> None:
        self.game.close()


_ROUNDING = 1e-6
"""What a sum of rewards may be off."""

_PARTS = {
    "text": (str, "a str"),
    "reward": (int | float, "a float"),
    "done": (bool, "a bool"),
    "success": (bool, "a bool"),
    "valid": (bool, "a bool"),
    "score": (int | float | None, "a float or None"),
}
"""The parts of a `StepResult` and what they are."""


def _checked(result: object) -> StepResult:
    if not isinstance(result, StepResult):
        raise TypeError(f"step must return a StepResult, not {type(result).__name__}")
    for name, (form, words) in _PARTS.items():
        if not isinstance(part := getattr(result, name), form):
            raise TypeError(f"a result's {name} must be {words}, not {type(part).__name__}")
    if not math.isfinite(result.reward):
        raise ValueError(f"a reward must be finite, not {result.reward}")
    if result.score is not None and not 0 <= result.score <= 1:
        raise ValueError(f"a score must be in [0, 1], not {result.score}")
    text = readable(result.text)
    return result if text == result.text else replace(result, text=text)

"""Hosts that run games for the rollouts.

`ThreadHost` runs `hosting="threads"` environments in this process. `crl.envs.hosting.processes`
runs the others. `ThreadHost` provides `ThreadEnvironment`s: async wrappers of one game each. A
game's calls run on a bounded number of threads, each call under a timeout. If a game raises or
hangs, its episode ends in a `RolloutError` of kind env. Nothing else is affected: the game is never
used again, and a hung thread is abandoned and replaced.

`Hosts` combines several hosts into one pool. `CheckedGame` validates a game's results; every host
plays games through it. This module imports no environment.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Protocol

from crl.envs.base import EnvSpec, Game, Rendering, replace_surrogates
from crl.errors import CrlError, RolloutError, TransientError
from crl.protocols import Environment, EnvironmentPool
from crl.scratch import scratch_folder
from crl.types import Observation, StepResult, Task
from crl.wording import counted

_Key = tuple[EnvSpec, Rendering]


class ThreadHost:
    """`EnvironmentPool` of games that run in this process.

    `tasks` maps a task's name to its environment and rendering. At most `threads` calls run at a
    time. Each call may take `timeout` seconds, including the creation of a game. The constructor
    removes temporary files that killed processes have left. Raise `ValueError` if an environment
    has another hosting, or if a limit is not positive.

    `failures` counts calls that raised or timed out. `replaced` counts the timeouts among them,
    after which the thread was abandoned.
    """

    def __init__(
        self,
        tasks: Mapping[str, tuple[EnvSpec, Rendering]],
        *,
        threads: int = 8,
        timeout: float = 60.0,
    ) -> None:
        misplaced = sorted(
            {spec.name for spec, _ in tasks.values() if spec.runtime.hosting != "threads"}
        )
        if misplaced:
            raise ValueError(
                "ThreadHost runs only environments whose hosting is 'threads', "
                f"not: {', '.join(misplaced)}"
            )
        if threads < 1 or not timeout > 0:
            raise ValueError(
                f"threads must be at least 1 and timeout must be positive, "
                f"not {threads} and {timeout}"
            )
        self.failures = 0
        self.replaced = 0
        self._tasks = dict(tasks)
        self.thread_pool = _ThreadPool(threads, timeout)
        self._free: defaultdict[_Key, list[Game]] = defaultdict(list)
        self._acquired: set[ThreadEnvironment] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        scratch_folder()

    async def acquire(self, task: Task) -> ThreadEnvironment:
        """Acquire a game of the task's environment: the last one released, or else a new one.

        Raise `RolloutError` if no game can be created. Re-raise any other `CrlError` of the
        environment, such as a `ConfigError`.
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
        self._acquired.add(environment)
        return environment

    async def release(self, environment: Environment) -> None:
        """Release an acquired environment.

        Its game is reused by the next episode unless it failed.
        """
        assert isinstance(environment, ThreadEnvironment)
        self._acquired.discard(environment)
        game, environment.game = environment.game, None
        if game is None:
            return
        if self._closed:
            await self.discard(game)
        else:
            self._free[environment.spec, environment.rendering].append(game)

    async def aclose(self) -> None:
        """Close every game, including acquired ones. Nothing can be acquired afterwards."""
        self._closed = True
        games = [game for free in self._free.values() for game in free]
        self._free.clear()
        acquired = list(self._acquired)
        await asyncio.gather(
            *(self.discard(game) for game in games),
            *(environment.aclose() for environment in acquired),
        )
        while self._closing:  # a call may fail meanwhile
            await asyncio.gather(*self._closing)
        self.thread_pool.shut_down()

    def discard_later(self, game: Game) -> None:
        """Close a game permanently, without waiting for it."""
        task = asyncio.create_task(self.discard(game), name="close game")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def discard(self, game: Game) -> None:
        """Close a game permanently. Errors and timeouts are ignored."""
        unclosed = [game]
        with suppress(TimeoutError):
            await self.thread_pool.run(
                lambda: unclosed.pop().close(),
                on_abandoned=lambda: [game.close() for game in unclosed],
            )


BETWEEN_CALLS = "between calls"
"""State of an environment that waits for its agent."""


class Calls:
    """Record of an environment's running call, for the report of a stall."""

    def __init__(self) -> None:
        self.state, self.since = BETWEEN_CALLS, monotonic()

    @contextmanager
    def running(self, call: str) -> Iterator[None]:
        """Record that `call` (make, reset or step) runs inside the context."""
        self.state, self.since = f"in {call}", monotonic()
        try:
            yield
        finally:
            self.state, self.since = BETWEEN_CALLS, monotonic()


class HostedEnvironment(Environment, Protocol):
    """`Environment` with a record of its calls."""

    calls: Calls


class Host(EnvironmentPool, Protocol):
    """`EnvironmentPool` that counts its failures."""

    async def acquire(self, task: Task) -> HostedEnvironment: ...

    failures: int
    """Number of calls that failed."""
    replaced: int
    """Number of threads or worker processes that were given up."""


class Hosts:
    """`EnvironmentPool` that combines several hosts.

    `hosts` maps a task's name to the host that provides its environments.
    """

    def __init__(self, hosts: Mapping[str, Host]) -> None:
        self._hosts = dict(hosts)
        self._owners: dict[Environment, tuple[Host, Calls]] = {}
        self._in_use: dict[Calls, str] = {}
        """Task of every environment that is in use or being created, by the record of its calls."""
        self._before = {"env/failures": 0.0, "env/replaced": 0.0}

    def metrics(self) -> dict[str, float]:
        """Return the metrics env/failures and env/replaced, summed over all hosts.

        They include those of `resume`.
        """
        hosts = set(self._hosts.values())
        return {
            "env/failures": self._before["env/failures"] + sum(host.failures for host in hosts),
            "env/replaced": self._before["env/replaced"] + sum(host.replaced for host in hosts),
        }

    def resume(self, metrics: Mapping[str, float]) -> None:
        """Continue to count from the metrics of an earlier process."""
        self._before = dict(metrics)

    def details(self) -> list[str]:
        """Return lines on the environments in use, for the report of a stall."""
        hosts = set(self._hosts.values())
        since: defaultdict[str, list[float]] = defaultdict(list)
        for calls, task in self._in_use.items():
            since[f"{task}: {{}} {calls.state}"].append(calls.since)
        now = monotonic()
        return [
            f"{counted(len(self._owners), 'environment')} in use, "
            f"{sum(host.failures for host in hosts)} failed, "
            f"{sum(host.replaced for host in hosts)} replaced",
            *(
                f"{state.format(len(times))}, the longest for {now - min(times):.0f} s"
                for state, times in sorted(since.items())
            ),
        ]

    async def acquire(self, task: Task) -> Environment:
        host, creation = self._hosts[task.name], Calls()
        self._in_use[creation] = task.name
        try:
            with creation.running("make"):
                environment = await host.acquire(task)
        finally:
            del self._in_use[creation]
        self._owners[environment] = host, environment.calls
        self._in_use[environment.calls] = task.name
        return environment

    async def release(self, environment: Environment) -> None:
        host, calls = self._owners.pop(environment)
        del self._in_use[calls]
        await host.release(environment)

    async def aclose(self) -> None:
        await asyncio.gather(*(host.aclose() for host in set(self._hosts.values())))


class ThreadEnvironment:
    """Acquired game.

    Its errors are raised as `RolloutError` of kind env; a `TransientError` stays one. Any other
    `CrlError` is re-raised. After an error the game cannot be used again.
    """

    def __init__(self, host: ThreadHost, spec: EnvSpec, rendering: Rendering) -> None:
        self.spec = spec
        self.rendering: Rendering = rendering
        self.game: Game | None = None
        self.calls = Calls()
        self._host = host

    async def make(self) -> Game:
        """Create a game and return it.

        If the creation takes too long, the game is closed as soon as it exists.
        """
        made: list[Game] = []

        def make() -> Game:
            made.append(CheckedGame(self.spec.make_game(self.rendering), self.spec.reward_range))
            return made[0]

        return await self._call("make", make, on_abandoned=lambda: [game.close() for game in made])

    async def reset(self, task: Task) -> Observation:
        game = self._usable_game()
        return Observation(
            await self._call("reset", lambda: game.reset(task), on_abandoned=game.close)
        )

    async def step(self, text: str) -> StepResult:
        game = self._usable_game()
        return await self._call("step", lambda: game.step(text), on_abandoned=game.close)

    async def aclose(self) -> None:
        """Close the game permanently."""
        game, self.game = self.game, None
        if game is not None:
            await self._host.discard(game)

    async def _call(
        self, operation: str, function: Callable[[], Any], on_abandoned: Callable[[], object]
    ) -> Any:
        """Run `function` under the timeout and return its value.

        On any error the game is given up. After a timeout or a cancellation, its thread runs
        `on_abandoned` when the hung call returns. After any other error the host closes the game
        in the background: the error must not wait for a slow end of the game.
        """
        host = self._host
        try:
            with self.calls.running(operation):
                outcome = await host.thread_pool.run(function, on_abandoned)
        except TimeoutError:
            self.game = None
            host.failures += 1
            host.replaced += 1
            raise RolloutError(
                "env",
                f"{self.spec.name}: {operation} exceeded its timeout "
                f"(rollout.env_timeout = {host.thread_pool.timeout:g} s)",
            ) from None
        except asyncio.CancelledError:
            self.game = None
            raise
        if outcome.error is None:
            return outcome.value
        game, self.game = self.game, None
        if game is not None:
            host.discard_later(game)
        if isinstance(outcome.error, CrlError) and not isinstance(outcome.error, RolloutError):
            raise outcome.error
        host.failures += 1
        kind = TransientError if isinstance(outcome.error, TransientError) else RolloutError
        raise kind(
            "env", f"{self.spec.name}: {operation}: {describe_error(outcome.error)}"
        ) from outcome.error

    def _usable_game(self) -> Game:
        if self.game is None:
            raise RolloutError(
                "env",
                f"{self.spec.name}: the game has failed, or was closed or released",
            )
        return self.game


@dataclass(frozen=True, slots=True)
class _Outcome:
    value: Any = None
    error: BaseException | None = None


class _ThreadPool:
    """Pool of at most `limit` threads that run one call at a time each.

    Hung threads are not counted. The pool is bound to the event loop that first uses it.
    """

    def __init__(self, limit: int, timeout: float) -> None:
        self._slots = asyncio.Semaphore(limit)
        self.timeout = timeout
        self._idle: list[_WorkerThread] = []

    async def run(
        self, function: Callable[[], Any], on_abandoned: Callable[[], object]
    ) -> _Outcome:
        """Run `function` on a thread and return its outcome.

        The timeout starts when a thread takes the call. Raise `TimeoutError` when it is exceeded.

        After a timeout or a cancellation of the caller, the thread is abandoned: when its call
        returns, the thread runs `on_abandoned` and ends. If no thread has taken the call yet, a new
        thread runs `on_abandoned` alone.
        """
        worker = None
        try:
            async with self._slots:
                worker = self._idle.pop() if self._idle else _WorkerThread()
                async with asyncio.timeout(self.timeout):
                    outcome = await worker.run(function)
                self._idle.append(worker)
                return outcome
        except BaseException:
            (worker or _WorkerThread()).retire(on_abandoned)
            raise

    def shut_down(self) -> None:
        """End all idle threads."""
        while self._idle:
            self._idle.pop().retire(lambda: None)


class _WorkerThread:
    """Daemon thread with a queue of jobs.

    The thread is a daemon, so that a hung call cannot keep the process alive.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run_jobs, name="crl-game", daemon=True).start()

    async def run(self, function: Callable[[], Any]) -> _Outcome:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Outcome] = loop.create_future()

        def job() -> None:
            outcome = _attempt(function)
            with suppress(RuntimeError):  # the event loop is closed, so no caller is waiting
                loop.call_soon_threadsafe(_deliver, future, outcome)

        self._jobs.put(job)
        return await future

    def retire(self, final_job: Callable[[], object]) -> None:
        """Run `final_job` after the current job, then end the thread."""
        self._jobs.put(lambda: _attempt(final_job))
        self._jobs.put(None)

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # an idle thread must not keep a game alive


def _attempt(function: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(value=function())
    except BaseException as error:  # even SystemExit must fail only the episode, not the thread
        return _Outcome(error=error)


def _deliver(future: asyncio.Future[_Outcome], outcome: _Outcome) -> None:
    if not future.done():
        future.set_result(outcome)


def describe_error(error: BaseException) -> str:
    """Return a description of an exception in one line. A `RolloutError` is its own description."""
    if isinstance(error, RolloutError):
        return str(error).removeprefix(f"{error.kind}: ")
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class CheckedGame:
    """`Game` that plays another one, `game`, and validates its results.

    Raise `TypeError` or `ValueError` for a result of the wrong form, and for a reward that moves
    the episode's total out of `reward_range`. Lone surrogates in texts are replaced.
    """

    def __init__(self, game: Game, reward_range: tuple[float, float]) -> None:
        self.game = game
        self._low, self._high = reward_range
        self._reward = 0.0

    def reset(self, task: Task) -> str:
        self._reward = 0.0
        text = self.game.reset(task)
        if not isinstance(text, str):
            raise TypeError(
                f"reset must return the observation as a str, not {type(text).__name__}"
            )
        return replace_surrogates(text)

    def step(self, action: str) -> StepResult:
        result = _validated(self.game.step(action))
        self._reward += result.reward
        if not self._low - _REWARD_TOLERANCE <= self._reward <= self._high + _REWARD_TOLERANCE:
            raise ValueError(
                f"the total reward of an episode must be in [{self._low:g}, {self._high:g}], "
                f"not {self._reward:g}"
            )
        return result

    def close(self) -> None:
        self.game.close()


_REWARD_TOLERANCE = 1e-6
"""Tolerance for rounding errors in a sum of rewards."""

_RESULT_FIELDS = {
    "text": (str, "a str"),
    "reward": (int | float, "a float"),
    "done": (bool, "a bool"),
    "success": (bool, "a bool"),
    "valid": (bool, "a bool"),
    "score": (int | float | None, "a float or None"),
}
"""Fields of a `StepResult` → (accepted types, their description in messages)."""


def _validated(result: object) -> StepResult:
    """Return the result without lone surrogates.

    Raise `TypeError` or `ValueError` if the result is invalid.
    """
    if not isinstance(result, StepResult):
        raise TypeError(f"step must return a StepResult, not {type(result).__name__}")
    for name, (accepted, description) in _RESULT_FIELDS.items():
        if not isinstance(value := getattr(result, name), accepted):
            raise TypeError(f"a result's {name} must be {description}, not {type(value).__name__}")
    if not math.isfinite(result.reward):
        raise ValueError(f"a reward must be finite, not {result.reward}")
    if result.score is not None and not 0 <= result.score <= 1:
        raise ValueError(f"a score must be in [0, 1], not {result.score}")
    text = replace_surrogates(result.text)
    return result if text == result.text else replace(result, text=text)

"""Host that runs the games of `hosting="processes"` environments in worker processes.

`ProcessHost` provides `ProcessEnvironment`s: async wrappers of one game each. A game stays in the
worker process (`crl.envs.hosting.worker`) that created it. A worker holds many games and plays one
call at a time, each under a timeout. If a game raises, its episode fails. If a worker dies or
exceeds the timeout, all episodes with a game in this worker fail. The next episode gets a new
worker.

Workers are fresh interpreters, not forks of multiprocessing's server. They inherit neither this
process's memory nor its main module. There is no helper process that could outlive this process or
end before it. Every worker has a separate session, so Ctrl-C reaches only this process. Workers end
when this process ends, even if it is killed. Processes that their games have started end with them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import shutil
import signal
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crl.envs.base import EnvSpec, Rendering
from crl.envs.hosting.threads import Calls, describe_error
from crl.envs.hosting.worker import HEADER, to_frame
from crl.errors import ConfigError, RolloutError, TransientError
from crl.protocols import Environment
from crl.scratch import scratch_folder
from crl.types import Observation, StepResult, Task

_Key = tuple[EnvSpec, Rendering]

MIN_CREATION_TIMEOUT_S = 60.0
"""Minimum timeout for the creation of a game, in seconds."""

MAX_AFFINITY_SURPLUS = 16
"""Allowed surplus of acquired games in a worker that has played the task before.

A worker that has this many more acquired games than the least loaded worker gets no further tasks
because of affinity.
"""

CREATION_ATTEMPTS = 3
"""Number of workers in which a game is created, if the workers die meanwhile."""

_MAX_REMEMBERED_TASKS = 1024
"""Number of tasks for which the last worker is remembered."""

_EXIT_TIMEOUT_S = 5.0
"""Seconds that a worker has to end before it is killed."""


class ProcessHost:
    """`EnvironmentPool` of games that run in worker processes.

    `tasks` maps a task's name to its environment and rendering. An environment's `make_game` must
    be importable by name. At most `processes` workers run; they are started on demand. A reset or
    step may take `timeout` seconds, not counting the wait for its worker. The creation of a game
    may take at least `MIN_CREATION_TIMEOUT_S` seconds, because a worker may have to start first and
    to import the environment. The constructor removes temporary files that killed processes have
    left. Raise `ValueError` if an environment has another hosting, or if a limit is not positive.

    `failures` counts calls that raised, timed out or lost their worker. `replaced` counts workers
    that died or were given up. `note` is called with a message for each of these workers.
    """

    def __init__(
        self,
        tasks: Mapping[str, tuple[EnvSpec, Rendering]],
        *,
        processes: int = 4,
        timeout: float = 60.0,
        note: Callable[[str], object] = lambda text: None,
    ) -> None:
        misplaced = sorted(
            {spec.name for spec, _ in tasks.values() if spec.runtime.hosting != "processes"}
        )
        if misplaced:
            raise ValueError(
                "ProcessHost runs only environments whose hosting is 'processes', "
                f"not: {', '.join(misplaced)}"
            )
        if processes < 1 or not timeout > 0:
            raise ValueError(
                f"processes must be at least 1 and timeout must be positive, "
                f"not {processes} and {timeout}"
            )
        for spec, _ in tasks.values():
            _require_importable(spec)
        self.failures = 0
        self.replaced = 0
        self._tasks = dict(tasks)
        self.timeout = timeout
        self._note = note
        self._max_workers, self._scratch = processes, scratch_folder()
        self._workers: list[_WorkerProcess] = []
        self._ids = itertools.count()
        self._acquired: set[ProcessEnvironment] = set()
        # tasks of environments with affinity → the worker that played the task last
        self._last_workers: OrderedDict[str, _WorkerProcess] = OrderedDict()
        self._closed = False

    async def acquire(self, task: Task) -> ProcessEnvironment:
        """Acquire a game of the task's environment: a released one, or else a new one.

        The game is in the worker with the fewest acquired games. An environment with affinity
        prefers the worker that played the task last. This worker must have fewer than
        `MAX_AFFINITY_SURPLUS` more acquired games than the least loaded one.

        If the worker dies before the game is created, another worker creates it, up to
        `CREATION_ATTEMPTS` times. Raise `RolloutError` if no game can be created. Re-raise a
        `ConfigError` of the environment.
        """
        for _ in range(CREATION_ATTEMPTS - 1):
            with suppress(_WorkerDied):
                return await self._acquire(task)
        return await self._acquire(task)

    async def _acquire(self, task: Task) -> ProcessEnvironment:
        if self._closed:
            raise RolloutError("env", "the host is closed")
        spec, rendering = self._tasks[task.name]
        worker = (
            self._preferred_worker(task) if spec.runtime.affinity else self._least_loaded_worker()
        )
        free = worker.free[spec, rendering]
        environment = ProcessEnvironment(
            self, worker, spec, rendering, free.pop() if free else None
        )
        worker.acquired += 1
        self._acquired.add(environment)
        try:
            if environment.game is None:
                await environment.make(next(self._ids))
        except BaseException:
            await self.release(environment)
            raise
        return environment

    async def release(self, environment: Environment) -> None:
        """Release an acquired environment.

        Its game is reused by the next episode unless it failed.
        """
        assert isinstance(environment, ProcessEnvironment)
        if environment not in self._acquired:
            return
        self._acquired.discard(environment)
        environment.worker.acquired -= 1
        game, environment.game = environment.game, None
        if game is not None:
            environment.worker.free[environment.spec, environment.rendering].append(game)

    async def aclose(self) -> None:
        """End every worker and all its games. Nothing can be acquired afterwards."""
        self._closed = True
        for environment in self._acquired:
            environment.game = None
        workers, self._workers = self._workers, []
        await asyncio.gather(*(worker.shut_down() for worker in workers))

    def _preferred_worker(self, task: Task) -> _WorkerProcess:
        """Return the worker that played the task last, and remember the choice.

        Use `_least_loaded_worker` if this worker has ended or is too busy.
        """
        key = repr(task)
        worker = self._last_workers.pop(key, None)
        fewest = min((worker.acquired for worker in self._workers), default=0)
        if (
            worker is None
            or worker not in self._workers
            or not worker.alive
            or worker.acquired >= fewest + MAX_AFFINITY_SURPLUS
        ):
            worker = self._least_loaded_worker()
        self._last_workers[key] = worker
        if len(self._last_workers) > _MAX_REMEMBERED_TASKS:
            self._last_workers.popitem(last=False)
        return worker

    def _least_loaded_worker(self) -> _WorkerProcess:
        """Return the worker with the fewest acquired games.

        Start a new worker if all workers have acquired games and the limit is not reached.
        """
        for worker in [worker for worker in self._workers if not worker.alive]:
            self._workers.remove(worker)
            worker.retire()
        least_loaded = min(self._workers, key=lambda worker: worker.acquired, default=None)
        if least_loaded is None or (
            least_loaded.acquired and len(self._workers) < self._max_workers
        ):
            least_loaded = _WorkerProcess(
                self._scratch / f"worker-{next(self._ids)}", self._record_lost_worker
            )
            self._workers.append(least_loaded)
        return least_loaded

    def _record_lost_worker(self, reason: str) -> None:
        if not self._closed:
            self.replaced += 1
            self._note(
                f"environments: {reason}; a new worker replaces it "
                f"({self.replaced} replaced so far)"
            )


class _WorkerDied(RolloutError):
    """Loss of a game whose worker process has died."""


class ProcessEnvironment:
    """Acquired game, identified by its number in its worker.

    Its errors are raised as `RolloutError` of kind env; a `TransientError` stays one, and a
    `ConfigError` is re-raised. After an error the game cannot be used again.
    """

    def __init__(
        self,
        host: ProcessHost,
        worker: _WorkerProcess,
        spec: EnvSpec,
        rendering: Rendering,
        game: int | None,
    ) -> None:
        self.worker, self.spec, self.game = worker, spec, game
        self.rendering: Rendering = rendering
        self.calls = Calls()
        self._host = host

    async def make(self, number: int) -> None:
        self.game = number
        await self._call("make", self.spec.make_game, self.rendering, self.spec.reward_range)

    async def reset(self, task: Task) -> Observation:
        return Observation(await self._call("reset", task))

    async def step(self, text: str) -> StepResult:
        return await self._call("step", text)

    async def aclose(self) -> None:
        """Close the game permanently. Errors are ignored."""
        game, self.game = self.game, None
        if game is not None:
            self.worker.submit((game, "close", ()), self._host.timeout)

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self.game is None:
            raise RolloutError(
                "env",
                f"{self.spec.name}: the game has failed, or was closed or released",
            )
        try:
            timeout = (
                max(self._host.timeout, MIN_CREATION_TIMEOUT_S)
                if method == "make"
                else self._host.timeout
            )
            with self.calls.running(method):
                value, error = await self.worker.submit((self.game, method, arguments), timeout)
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if error is None:
            return value
        await self.aclose()
        if isinstance(error, ConfigError):
            raise error
        self._host.failures += 1
        if isinstance(error, str):
            kind = _WorkerDied if self.worker.died else RolloutError
            raise kind("env", f"{self.spec.name}: {method}: {error}")
        text, remote_traceback, transient = error
        kind = TransientError if transient else RolloutError
        failure = kind("env", f"{self.spec.name}: {method}: {text}")
        failure.add_note(f"In the worker process:\n{remote_traceback}")
        raise failure


def _require_importable(spec: EnvSpec) -> None:
    try:
        pickle.dumps(spec.make_game)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{spec.name}: make_game must be a function that worker processes can import: {error}"
        ) from error


_Reply = tuple[Any, ConfigError | str | tuple[str, str, bool] | None]
"""Reply of a worker: (value, None), or (None, error).

The error of a game is a description, its traceback, and whether a retry may help. The loss of a
worker has a reason alone.
"""


@dataclass(frozen=True, slots=True)
class _Job:
    frame: bytes
    timeout: float
    future: asyncio.Future[_Reply]

    def answer(self, reply: _Reply) -> None:
        if not self.future.done():
            self.future.set_result(reply)


class _WorkerProcess:
    """Worker process that plays games.

    `acquired` counts its acquired games. `free` holds the numbers of its released games. `on_lost`
    is called with the reason when the process has died or is given up.
    """

    def __init__(self, folder: Path, on_lost: Callable[[str], None]) -> None:
        self.acquired = 0
        self.died = False
        """True if the process has ended by itself, or was killed by another process."""
        self.free: defaultdict[_Key, list[int]] = defaultdict(list)
        self._folder, self._on_lost = folder, on_lost
        self._jobs: asyncio.Queue[_Job | None] = asyncio.Queue()
        self._process: asyncio.subprocess.Process | None = None
        self._end_reason = ""
        self._ended = asyncio.Event()
        self._serve_task = asyncio.create_task(self._serve(), name=f"crl-{folder.name}")

    @property
    def alive(self) -> bool:
        return not self._end_reason and (self._process is None or self._process.returncode is None)

    def submit(
        self, request: tuple[int, str, tuple[Any, ...]], timeout: float
    ) -> asyncio.Future[_Reply]:
        """Queue a request and return a future of its reply.

        The timeout of `timeout` seconds starts when the worker gets the request. Once the worker
        is lost, the reply is an error description.
        """
        job = _Job(to_frame(request), timeout, asyncio.get_running_loop().create_future())
        if self._end_reason:
            job.answer((None, self._end_reason))
        else:
            self._jobs.put_nowait(job)
        return job.future

    def retire(self) -> None:
        """Let the process end after all queued requests."""
        self._jobs.put_nowait(None)

    async def shut_down(self) -> None:
        """End the process, even if it is busy.

        A worker ends at most a few seconds after its input is closed.
        """
        if self._process is not None:
            self._process.stdin.close()  # type: ignore[union-attr]
        self.retire()
        await self._serve_task

    async def _serve(self) -> None:
        """Start the process and pass requests to it one by one, until it is retired or lost."""
        try:
            self._folder.mkdir()
            self._process = await self._start()
            while (job := await self._jobs.get()) is not None:
                if not await self._run_job(self._process, job):
                    break
        except OSError as error:
            self._end_reason = f"the worker process could not be started: {describe_error(error)}"
        if not self._end_reason and self._process and self._process.returncode is not None:
            self._end_reason = self._exit_reason(self._process)
        if self._end_reason:
            self._on_lost(self._end_reason)
        await self._clean_up()

    async def _run_job(self, process: asyncio.subprocess.Process, job: _Job) -> bool:
        """Play one request. Return whether the worker can still be used."""
        if job.future.cancelled():
            return True
        try:
            async with asyncio.timeout(job.timeout):
                job.answer(await _exchange(process, self._ended, job.frame))
            return True
        except TimeoutError:
            self._end_reason = (
                f"the worker process exceeded the timeout of {job.timeout:g} s "
                "(see rollout.env_timeout)"
            )
        except (EOFError, OSError):
            self.died = True
            await self._wait_or_kill()
            self._end_reason = self._exit_reason(process)
        except Exception as error:
            # a reply may hold objects of a game's classes, so reading it can raise anything
            self._end_reason = (
                f"the reply of the worker process cannot be read: {describe_error(error)}"
            )
        job.answer((None, self._end_reason))
        return False

    async def _start(self) -> asyncio.subprocess.Process:
        # the worker can import the same modules as this process
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        loop = asyncio.get_running_loop()
        with (self._folder / "log").open("wb") as log:
            self._transport, protocol = await loop.subprocess_exec(
                lambda: _Pipes(loop, self._ended),
                sys.executable, "-P", "-m", "crl.envs.hosting.worker",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                env={**os.environ, "PYTHONPATH": paths, "TMPDIR": str(self._folder)},
                start_new_session=True,
            )  # fmt: skip
        return asyncio.subprocess.Process(self._transport, protocol, loop)

    async def _wait_or_kill(self) -> None:
        """Wait until the process has ended. Kill it after `_EXIT_TIMEOUT_S` seconds."""
        try:
            await asyncio.wait_for(self._ended.wait(), _EXIT_TIMEOUT_S)
        except TimeoutError:
            self._kill()
            await self._ended.wait()

    def _kill(self) -> None:
        """Kill the process, if it still runs, and all processes that its games have started."""
        assert self._process is not None
        with suppress(ProcessLookupError, PermissionError):  # no process is left
            os.killpg(self._process.pid, signal.SIGKILL)

    def _exit_reason(self, process: asyncio.subprocess.Process) -> str:
        """Return a description of how the process ended."""
        code = process.returncode or 0
        exit_text = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        return f"the worker process {exit_text}{self._last_log_line()}"

    def _last_log_line(self) -> str:
        """Return the last line of the process's log, or an empty text."""
        try:
            lines = (self._folder / "log").read_text("utf-8", errors="replace").split("\n")
        except OSError:  # the folder for temporary files was cleaned up
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {last}" if last else ""

    async def _clean_up(self) -> None:
        """Answer all waiting requests, wait for the process to end, and remove its folder."""
        process, failed = self._process, bool(self._end_reason)
        self._end_reason = self._end_reason or "the worker process has ended"
        while not self._jobs.empty():
            if job := self._jobs.get_nowait():
                job.answer((None, self._end_reason))
        if process is not None:
            if failed:
                self._kill()
            process.stdin.close()  # type: ignore[union-attr]
            await self._wait_or_kill()
            self._kill()
            self._transport.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Pipes(asyncio.subprocess.SubprocessStreamProtocol):
    """Pipes of a process. A child of the process can keep them open.

    `ended` is set when the process itself has ended. `Process.wait` may also wait for the pipes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
        super().__init__(limit=1 << 16, loop=loop)
        self._ended = ended

    def process_exited(self) -> None:
        super().process_exited()
        self._ended.set()


async def _exchange(
    process: asyncio.subprocess.Process, ended: asyncio.Event, frame: bytes
) -> _Reply:
    """Send a request and return the reply. Raise `EOFError` or `OSError` if the process ended."""
    reply_task, exit_task = (
        asyncio.create_task(_request(process, frame)),
        asyncio.create_task(ended.wait()),
    )
    try:
        await asyncio.wait({reply_task, exit_task}, return_when=asyncio.FIRST_COMPLETED)
        if not reply_task.done():
            raise EOFError
        return reply_task.result()
    finally:
        reply_task.cancel()
        exit_task.cancel()


async def _request(process: asyncio.subprocess.Process, frame: bytes) -> _Reply:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(frame)
    await process.stdin.drain()
    (length,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
    return pickle.loads(await process.stdout.readexactly(length))

"""vLLM engine in separate processes, restarted if it dies.

`VllmEngine` and the pooling embedder are built from the parts of this module.

* `start_vllm` is the only function that starts vLLM. It runs outside the event loop, starts one
  engine at a time, and sets the environment that vLLM's processes inherit.
* `Replica` owns a running `AsyncLLM`, sends requests to it and detects its death.
* `_watch` is a task that marks an engine as dead when it stops answering. vLLM itself only detects
  processes that have ended.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from crl.child_processes import (
    ENGINE_VARIABLE,
    OWNER_VARIABLE,
    Owner,
    kill_engine,
    new_engine_name,
)
from crl.engines.vllm_owner import EndsWithOwner
from crl.errors import EngineError, RolloutError
from crl.scratch import SHARED_MEMORY, scratch_folder

Output = TypeVar("Output")

CHECK_INTERVAL_S = 5.0
"""Seconds between two checks of an engine."""

ANSWER_TIMEOUT_S = 900.0 if current_platform.is_cpu() else 120.0
"""Timeout in seconds without an answer, after which an engine counts as dead.

An engine answers between two steps. A step takes seconds on a GPU. On a CPU, a step that reads a
prompt of thousands of tokens takes minutes, because prompts are not split there (see
`crl.engines.vllm`).
"""

CALL_TIMEOUT_S = 300.0
"""Timeout in seconds while the engine processes a call that is not a request.

An example is the transfer of new weights. The timeout is shorter than the timeout of the transfer,
so an engine that hangs during the transfer is restarted.
"""

MAX_RESTARTS = 3
"""Number of restarts of an engine within `RESTART_WINDOW_S`. The next death ends the engine."""

RESTART_WINDOW_S = 3600.0
"""Seconds after which a restart no longer counts."""

MAX_SOCKET_FOLDER = 107 - 37
"""Maximum length of the path of the socket folder.

A socket's path on Linux has at most 107 characters, of which 37 are the socket's name.
"""

_log = logging.getLogger(__name__)
_start_lock = threading.Lock()
"""Lock held during a start, which changes the environment of the whole process."""
_watch_tasks: set[asyncio.Task[None]] = set()
"""References to running tasks. The event loop itself keeps only weak references."""


def on_cpu() -> bool:
    """Return whether the installed vLLM is the CPU build."""
    return current_platform.is_cpu()


def gpu_share(fraction: float | None) -> dict[str, Any]:
    """Return the engine arguments that limit vLLM to a fraction of a GPU's memory.

    None sets no limit, so vLLM's default applies.
    """
    return {} if fraction is None else {"gpu_memory_utilization": fraction}


async def start_vllm(settings: Mapping[str, Any], gpus: Sequence[str], threads: int) -> AsyncLLM:
    """Start a vLLM engine and return it.

    * `settings`: fields of vLLM's `AsyncEngineArgs`.
    * `gpus`: GPUs of the engine, named as in CUDA_VISIBLE_DEVICES. If empty, the variable is not
      changed, so vLLM uses the first visible GPUs. The CPU build ignores `gpus`.
    * `threads`: OpenMP threads of a worker process in the CPU build.

    Raise `EngineError` if vLLM does not start. If the caller is cancelled, the engine is shut down
    after its start.
    """
    thread = ThreadPoolExecutor(1, "vllm start")
    starting = thread.submit(_start, settings, gpus, threads)
    thread.shutdown(wait=False)
    try:
        llm = await asyncio.wrap_future(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_shut_down_late_start)
        raise
    except Exception as error:  # bad arguments, or an error in vLLM's processes
        raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error
    watch = asyncio.create_task(_watch(llm), name="vllm watch")
    _watch_tasks.add(watch)
    watch.add_done_callback(_watch_tasks.discard)
    return llm


def _shut_down_late_start(started: Future[AsyncLLM]) -> None:
    if not started.cancelled() and not started.exception():
        started.result().shutdown()


def _start(settings: Mapping[str, Any], gpus: Sequence[str], threads: int) -> AsyncLLM:
    # The engine's processes inherit the signal mask of this thread. Ctrl-C in the terminal must
    # only reach the run, which still needs its engines. The resource tracker must already run:
    # otherwise the first new process starts the tracker, which unblocks the signal. The tracker
    # would warn of shared memory that vLLM's processes leave to it when they are terminated.
    with _start_lock, _environment({"PYTHONWARNINGS": "ignore"}):
        resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    environment = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "SPT_NOENV": "1",  # the titles of vLLM's processes do not overwrite their environment
        OWNER_VARIABLE: str(Owner.current()),
        ENGINE_VARIABLE: (name := new_engine_name()),
    }
    # vLLM removes neither its sockets nor its other temporary files. Compiled code is kept.
    folder = scratch_folder()
    if len(str(folder)) > MAX_SOCKET_FOLDER:
        folder = scratch_folder(SHARED_MEMORY)
    environment |= dict.fromkeys(("TMPDIR", "VLLM_RPC_BASE_PATH"), str(folder))
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
    environment["TORCHINDUCTOR_CACHE_DIR"] = compiled
    if on_cpu():
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    elif gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        with _start_lock, _environment(environment):
            arguments = AsyncEngineArgs(
                worker_extension_cls="crl.engines.vllm_worker.Receiver",
                additional_config=EndsWithOwner(),
                **settings,
            )
            return AsyncLLM.from_engine_args(arguments)
    except BaseException:
        kill_engine(name)
        raise


async def _watch(llm: AsyncLLM) -> None:
    """Detect the death of an engine, then fail all pending calls and return.

    An engine counts as dead if vLLM reports its death or a timeout is exceeded (`ANSWER_TIMEOUT_S`,
    `CALL_TIMEOUT_S`). Time is counted in checks of `CHECK_INTERVAL_S` seconds. A pause of this
    process, during which no answer can be read, therefore counts as one check only.
    """
    # Otherwise the first request would start this handler. The handler ends with the engine.
    llm._run_output_handler()
    assert llm.output_handler is not None
    calls, unanswered, call_time = llm.engine_core.utility_results, 0.0, 0.0
    # The loop that runs the engine's steps also answers this call.
    probe = asyncio.ensure_future(llm.get_weight_version())
    while not llm.errored and unanswered < ANSWER_TIMEOUT_S and call_time < CALL_TIMEOUT_S:
        await asyncio.wait({llm.output_handler}, timeout=CHECK_INTERVAL_S)
        if probe.done():
            unanswered = call_time = 0.0
            await asyncio.gather(probe, return_exceptions=True)
            probe = asyncio.ensure_future(llm.get_weight_version())
        elif sum(not call.done() for call in calls.values()) > 1:
            call_time += CHECK_INTERVAL_S
        else:
            unanswered += CHECK_INTERVAL_S
    if not llm.errored:
        _log.warning(
            "vLLM has not answered for %.0f s and is treated as dead", max(unanswered, call_time)
        )
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    _mark_dead(llm)


def _mark_dead(llm: AsyncLLM) -> None:
    """Mark the engine as dead and fail all pending requests and calls.

    vLLM itself only fails pending requests.
    """
    error = EngineDeadError()
    llm.engine_core.resources.engine_dead = True
    for call in llm.engine_core.utility_results.values():
        if not call.done():
            call.set_exception(error)
    llm.output_processor.propagate_error(error)


async def _shut_down_engine(llm: AsyncLLM) -> None:
    """End the engine's processes.

    Cancel vLLM's output handler first, because it would log the end of the processes as a failure.
    """
    if llm.output_handler is not None:
        llm.output_handler.cancel()
        await asyncio.wait({llm.output_handler})
    _mark_dead(llm)
    # Processes that do not end within 5 s are killed, with their child processes.
    await asyncio.to_thread(llm.shutdown)


@asynccontextmanager
async def shut_down_on_error(llm: AsyncLLM) -> AsyncIterator[None]:
    """Shut the engine down if the body fails. The body prepares a newly started engine.

    Raise `EngineError` if the engine dies. Other errors are raised unchanged.
    """
    try:
        yield
    except EngineDeadError as error:
        await _shut_down_engine(llm)
        raise EngineError(
            "vLLM died while it was being started. Its error messages are on stderr, above this "
            "line"
        ) from error
    except BaseException:
        await _shut_down_engine(llm)
        raise


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the body and restore them afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Replica:
    """vLLM engine that is restarted if it dies, up to `MAX_RESTARTS` times."""

    def __init__(
        self,
        start: Callable[[], Awaitable[AsyncLLM]],
        prepare: Callable[[AsyncLLM], Awaitable[None]],
    ) -> None:
        """Begin to start the engine in a background task.

        `start` starts an engine. `prepare` brings a restarted engine to the state of its
        predecessor, for example by loading the current weights.
        """
        self._start, self._prepare = start, prepare
        self._engine: asyncio.Future[AsyncLLM] = asyncio.create_task(
            self._start_owned(), name="vllm start"
        )
        self._owned: set[AsyncLLM] = set()
        self._deaths: deque[float] = deque()
        """Times of the last deaths."""
        self.in_flight = 0

    async def ready(self) -> AsyncLLM:
        """Wait until the engine is ready and return it.

        Raise `EngineError` if the replica has failed for good or is closed.
        """
        llm = await asyncio.shield(self._engine)
        if llm.errored:
            self._record_death(llm, EngineDeadError())
            llm = await asyncio.shield(self._engine)
        return llm

    async def request(self, call: Callable[[AsyncLLM, str], AsyncIterator[Output]]) -> Output:
        """Return the last output of one request.

        `call` receives the engine and a new request id, and yields the outputs. If the caller is
        cancelled, vLLM aborts the request. If the engine dies, the request is repeated with the
        restarted engine. Raise:

        * `RolloutError` if vLLM rejects the request,
        * `EngineError` if the engine dies and is not restarted.
        """
        while True:
            llm = await self.ready()
            try:
                return await self._request(llm, call)
            except EngineDeadError as error:
                self._record_death(llm, error)

    async def _request(
        self, llm: AsyncLLM, call: Callable[[AsyncLLM, str], AsyncIterator[Output]]
    ) -> Output:
        """Make one attempt at a request. Raise `EngineDeadError` if the engine dies."""
        self.in_flight += 1
        try:
            return [output async for output in call(llm, uuid.uuid4().hex)][-1]
        except (VLLMClientError, EngineGenerateError) as error:
            raise RolloutError(
                "engine", f"vLLM rejected the request: {error.__cause__ or error}"
            ) from error
        finally:
            self.in_flight -= 1

    async def apply(self, change: Callable[[AsyncLLM], Awaitable[None]]) -> None:
        """Apply a change to the engine, for example load new weights.

        `prepare` must make the same change. If the engine dies during the change, the restarted
        engine gets it from `prepare`. Raise `EngineError` if the engine cannot be restarted.
        """
        llm = await self.ready()
        try:
            await change(llm)
        except EngineDeadError as error:
            self._record_death(llm, error)
            await self.ready()

    async def aclose(self) -> None:
        """Shut down all engines of this replica. Later calls raise `EngineError`."""
        engine, self._engine = self._engine, asyncio.get_running_loop().create_future()
        self._engine.set_exception(EngineError("the engine is closed"))
        self._engine.exception()  # avoid a warning if the exception is never retrieved
        engine.cancel()
        await asyncio.wait({engine})
        await asyncio.gather(*map(self._shut_down_owned, self._owned))

    async def _start_owned(self) -> AsyncLLM:
        llm = await self._start()
        self._owned.add(llm)
        return llm

    async def _shut_down_owned(self, llm: AsyncLLM) -> None:
        await _shut_down_engine(llm)
        self._owned.discard(llm)

    def _record_death(self, dead: AsyncLLM, cause: Exception) -> None:
        """Record the death of an engine and begin the restart.

        Do nothing if another caller has already recorded this death.
        """
        if not self._engine.done() or self._engine.exception() or self._engine.result() is not dead:
            return
        now = time.monotonic()
        while self._deaths and now - self._deaths[0] > RESTART_WINDOW_S:
            self._deaths.popleft()
        self._deaths.append(now)
        self._engine = asyncio.create_task(self._restart(dead, cause), name="vllm restart")

    async def _restart(self, dead: AsyncLLM, cause: Exception) -> AsyncLLM:
        """Shut the dead engine down, and start and prepare a new one.

        Raise `EngineError` after `MAX_RESTARTS` restarts.
        """
        await self._shut_down_owned(dead)
        if (deaths := len(self._deaths)) > MAX_RESTARTS:
            raise EngineError(
                f"vLLM died {deaths} times within {RESTART_WINDOW_S / 60:.0f} minutes ({cause}). "
                "Its error messages are on stderr, above this line"
            ) from cause
        _log.warning("vLLM died (%s); restart %d of %d", cause, deaths, MAX_RESTARTS)
        llm = await self._start_owned()
        async with shut_down_on_error(llm):
            await self._prepare(llm)
        return llm

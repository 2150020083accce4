"""One vLLM engine in processes of its own, started again once when it dies; what `VllmEngine` and the pooling embedder are made of.

`start_vllm` is the one place that starts vLLM: off the event loop, one engine at a time, with the environment that its processes
inherit. `Replica` owns a running `AsyncLLM`, hands requests to it and notices its death. vLLM itself notices only processes that are gone;
a task (`_watch`) takes an engine for dead that does not answer.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from crl.errors import EngineError, RolloutError, TransientError
from crl.scratch import scratch_folder

Output = TypeVar("Output")

OWNER = "CRL_ENGINE_OWNER"
"""Environment variable that tells vLLM's processes whom they serve (vllm_worker.py): a process's number and `start_time`."""

LOOK_S = 5.0
"""Seconds between two looks at an engine."""

SILENCE_S = 120.0
"""Seconds without an answer after which it is taken for dead. It answers between two steps, which take seconds."""

CHANGE_S = 300.0
"""The same while it was asked for anything but requests, such as to take new weights in: less than their transfer may take, so that an
engine that hangs over them is started again."""

LONGEST_SOCKETS = 107 - 37
"""Characters of a folder of sockets: 107 are a socket's on Linux, 37 its name."""

_log = logging.getLogger(__name__)
_starting = threading.Lock()
"""A start changes the process's environment while its children are made."""
_watches: set[asyncio.Task[None]] = set()
"""The event loop itself does not keep tasks."""


def on_cpu() -> bool:
    """Whether the installed vLLM is the one without GPUs."""
    return current_platform.is_cpu()


def gpu_share(fraction: float | None) -> dict[str, Any]:
    """How `start_vllm` is told of a share of a GPU's memory."""
    return {} if fraction is None else {"gpu_memory_utilization": fraction}


def start_time(process: int) -> int | None:
    """When it was started, in the kernel's clock ticks: tells it from a later process with its number. None: it is gone, or a zombie."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "XZ" else int(fields[18])


async def start_vllm(settings: Mapping[str, Any], gpus: Sequence[str], threads: int) -> AsyncLLM:
    """A running engine on `gpus`, as CUDA_VISIBLE_DEVICES names them; none = the first ones, or vLLM's CPU build.

    settings: fields of vLLM's `AsyncEngineArgs`; threads: OpenMP threads of a worker of the CPU build. Raises `EngineError`.
    """
    thread = ThreadPoolExecutor(1, "vllm start")
    starting = thread.submit(_start, settings, gpus, threads)
    thread.shutdown(wait=False)
    try:
        llm = await asyncio.wrap_future(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_discard)
        raise
    except Exception as error:  # whatever vLLM refuses, or whatever its processes died of
        raise EngineError(f"vLLM does not start: {type(error).__name__}: {error}") from error
    watch = asyncio.create_task(_watch(llm), name="vllm watch")
    _watches.add(watch)
    watch.add_done_callback(_watches.discard)
    return llm


def _discard(started: Future[AsyncLLM]) -> None:
    if not started.cancelled() and not started.exception():
        started.result().shutdown()


def _start(settings: Mapping[str, Any], gpus: Sequence[str], threads: int) -> AsyncLLM:
    # Its processes inherit this thread's mask: a Ctrl-C at the terminal is the run's, which still needs its engines.
    resource_tracker.ensure_running()  # else the start of the first process would start that, and unblock the signal again
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    environment = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        OWNER: f"{os.getpid()} {start_time(os.getpid())}",
    }
    if len(str(scratch_folder())) <= LONGEST_SOCKETS:
        environment["VLLM_RPC_BASE_PATH"] = str(
            scratch_folder()
        )  # its sockets, which it leaves behind
    if on_cpu():
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    elif gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    with _starting, _environment(environment):
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(worker_extension_cls="crl.engines.vllm_worker.Receiver", **settings)
        )


async def _watch(llm: AsyncLLM) -> None:
    """Returns when the engine has died, or has not answered for so long that it is taken for dead; who waits for it has been told then.

    Time is counted in looks: a pause of this process itself, in which it could read no answer, is one of them.
    """
    llm._run_output_handler()  # which the first request would start; it ends with the engine
    assert llm.output_handler is not None
    calls, silence, change = llm.engine_core.utility_results, 0.0, 0.0
    probe = asyncio.ensure_future(llm.get_weight_version())  # through the loop that does the steps
    while not llm.errored and silence < SILENCE_S and change < CHANGE_S:
        await asyncio.wait({llm.output_handler}, timeout=LOOK_S)
        if probe.done():
            silence = change = 0.0
            await asyncio.gather(probe, return_exceptions=True)
            probe = asyncio.ensure_future(llm.get_weight_version())
        elif sum(not call.done() for call in calls.values()) > 1:
            change += LOOK_S
        else:
            silence += LOOK_S
    if not llm.errored:
        _log.warning(
            "vLLM has not answered for %.0f s, and is taken for dead", max(silence, change)
        )
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    _give_up(llm)


def _give_up(llm: AsyncLLM) -> None:
    """Marks it as dead, and tells who waits for an answer. vLLM tells only those who wait for a request's."""
    error = EngineDeadError()
    llm.engine_core.resources.engine_dead = True
    for call in llm.engine_core.utility_results.values():
        if not call.done():
            call.set_exception(error)
    llm.output_processor.propagate_error(error)


async def _shut_down(llm: AsyncLLM) -> None:
    """Ends its processes, and before them the task that listens to them: it would log their end as a failure."""
    if llm.output_handler is not None:
        llm.output_handler.cancel()
        await asyncio.wait({llm.output_handler})
    _give_up(llm)
    await asyncio.to_thread(
        llm.shutdown
    )  # kills those that do not end in 5 s, and what they started


@asynccontextmanager
async def started(llm: AsyncLLM) -> AsyncIterator[None]:
    """What follows its start; where that fails, its processes are ended. Raises `EngineError` when it dies."""
    try:
        yield
    except EngineDeadError as error:
        await _shut_down(llm)
        raise EngineError(
            "vLLM died while it was started; what it said stands above, on stderr"
        ) from error
    except BaseException:
        await _shut_down(llm)
        raise


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
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
    """A running vLLM engine. start: makes one; prepare: brings one that was started again to where its predecessor was."""

    def __init__(
        self,
        start: Callable[[], Awaitable[AsyncLLM]],
        prepare: Callable[[AsyncLLM], Awaitable[None]],
    ) -> None:
        self._start, self._prepare = start, prepare
        self._serving: asyncio.Future[AsyncLLM] = asyncio.create_task(
            self._first(), name="vllm start"
        )
        self._owned: set[AsyncLLM] = set()
        self._deaths = 0
        self.in_flight = 0

    async def ready(self) -> AsyncLLM:
        """The engine, once it serves. Raises `EngineError` when it will not any more."""
        llm = await asyncio.shield(self._serving)
        if llm.errored:
            self._bury(llm, EngineDeadError())
            llm = await asyncio.shield(self._serving)
        return llm

    async def ask(self, call: Callable[[AsyncLLM, str], AsyncIterator[Output]]) -> Output:
        """The last output of one request, which is aborted where the caller is cancelled. call: gets the engine and the request's id.

        Raises `RolloutError` when vLLM refuses it, `TransientError` when the engine died meanwhile and is started again, `EngineError`
        when it is not.
        """
        llm = await self.ready()
        self.in_flight += 1
        try:
            return [output async for output in call(llm, uuid.uuid4().hex)][-1]
        except EngineDeadError as error:
            self._bury(llm, error)
            if self._deaths > 1:
                await self.ready()
            raise TransientError(
                "engine", "vLLM died over this request and is started again"
            ) from error
        except (VLLMClientError, EngineGenerateError) as error:
            raise RolloutError(
                "engine", f"vLLM refuses the request: {error.__cause__ or error}"
            ) from error
        finally:
            self.in_flight -= 1

    async def carry_out(self, change: Callable[[AsyncLLM], Awaitable[None]]) -> None:
        """A change that `prepare` would make too: where the engine dies over it, the next one has it. Raises `EngineError`."""
        llm = await self.ready()
        try:
            await change(llm)
        except EngineDeadError as error:
            self._bury(llm, error)
            await self.ready()

    async def aclose(self) -> None:
        serving, self._serving = self._serving, asyncio.get_running_loop().create_future()
        self._serving.set_exception(EngineError("the engine is closed"))
        self._serving.exception()  # nobody need ask
        serving.cancel()
        await asyncio.wait({serving})
        await asyncio.gather(*map(self._end, self._owned))

    async def _first(self) -> AsyncLLM:
        llm = await self._start()
        self._owned.add(llm)
        return llm

    async def _end(self, llm: AsyncLLM) -> None:
        await _shut_down(llm)
        self._owned.discard(llm)

    def _bury(self, dead: AsyncLLM, cause: Exception) -> None:
        """Starts another engine, the first time that one died; whoever notices later has nothing to do."""
        if (
            not self._serving.done()
            or self._serving.exception()
            or self._serving.result() is not dead
        ):
            return
        self._deaths += 1
        self._serving = asyncio.create_task(self._again(dead, cause), name="vllm restart")

    async def _again(self, dead: AsyncLLM, cause: Exception) -> AsyncLLM:
        await self._end(dead)
        if self._deaths > 1:
            raise EngineError(
                f"vLLM died a second time ({cause}); what it said stands above, on stderr"
            ) from cause
        llm = await self._first()
        async with started(llm):
            await self._prepare(llm)
        return llm

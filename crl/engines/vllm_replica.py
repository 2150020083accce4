"""One vLLM engine in processes of its own, started again once when it dies; what `VllmEngine` and the pooling embedder are made of.

`start_vllm` is the one place that starts vLLM: off the event loop, one engine at a time, with the environment that its processes
inherit. `Replica` owns a running `AsyncLLM`, hands requests to it and notices its death.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import os
import signal
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker
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
"""Environment variable that tells vLLM's processes whom they serve (vllm_worker.py)."""

_starting = threading.Lock()
"""A start changes the process's environment while its children are made."""


def on_cpu() -> bool:
    """Whether the installed vLLM is the one without GPUs."""
    return current_platform.is_cpu()


def gpu_share(fraction: float | None) -> dict[str, Any]:
    """How `start_vllm` is told of a share of a GPU's memory."""
    return {} if fraction is None else {"gpu_memory_utilization": fraction}


async def start_vllm(settings: Mapping[str, Any], gpus: Sequence[str], threads: int) -> AsyncLLM:
    """A running engine on `gpus`, as CUDA_VISIBLE_DEVICES names them; none = the first ones, or vLLM's CPU build.

    settings: fields of vLLM's `AsyncEngineArgs`; threads: OpenMP threads of a worker of the CPU build. Raises `EngineError`.
    """
    thread = ThreadPoolExecutor(1, "vllm start")
    starting = thread.submit(_start, settings, gpus, threads)
    thread.shutdown(wait=False)
    try:
        return await asyncio.wrap_future(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_discard)
        raise
    except Exception as error:  # whatever vLLM refuses, or whatever its processes died of
        raise EngineError(f"vLLM does not start: {type(error).__name__}: {error}") from error


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
        "VLLM_RPC_BASE_PATH": str(scratch_folder()),  # its sockets, which it leaves behind
        OWNER: str(os.getpid()),
    }
    if on_cpu():
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    elif gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    with _starting, _environment(environment):
        return AsyncLLM.from_engine_args(AsyncEngineArgs(worker_extension_cls="crl.engines.vllm_worker.Receiver", **settings))


async def _shut_down(llm: AsyncLLM) -> None:
    """Ends its processes, and before them the task that listens to them: it would log their end as a failure."""
    if llm.output_handler is not None:
        llm.output_handler.cancel()
        await asyncio.wait({llm.output_handler})
    llm.output_processor.propagate_error(EngineDeadError())
    await asyncio.to_thread(llm.shutdown)


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

    def __init__(self, start: Callable[[], Awaitable[AsyncLLM]], prepare: Callable[[AsyncLLM], Awaitable[None]]) -> None:
        self._start, self._prepare = start, prepare
        self._serving: asyncio.Future[AsyncLLM] = asyncio.create_task(self._first(), name="vllm start")
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
            raise TransientError("engine", "vLLM died over this request and is started again") from error
        except (VLLMClientError, EngineGenerateError) as error:
            raise RolloutError("engine", f"vLLM refuses the request: {error.__cause__ or error}") from error
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
        if not serving.cancelled() and not serving.exception():
            await _shut_down(serving.result())

    async def _first(self) -> AsyncLLM:
        return await self._start()

    def _bury(self, dead: AsyncLLM, cause: Exception) -> None:
        """Starts another engine, the first time that one died; whoever notices later has nothing to do."""
        if not self._serving.done() or self._serving.exception() or self._serving.result() is not dead:
            return
        self._deaths += 1
        self._serving = asyncio.create_task(self._again(dead, cause), name="vllm restart")

    async def _again(self, dead: AsyncLLM, cause: Exception) -> AsyncLLM:
        await asyncio.to_thread(dead.shutdown)
        if self._deaths > 1:
            raise EngineError(f"vLLM died a second time ({cause}); what it said stands above, on stderr") from cause
        llm = await self._start()
        try:
            await self._prepare(llm)
        except EngineDeadError as error:
            raise EngineError("vLLM died again while it was started once more; what it said stands above, on stderr") from error
        return llm

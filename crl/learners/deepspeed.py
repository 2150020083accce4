"""DeepSpeed learner: one model trained by several processes.

ZeRO partitions the optimizer state, the gradients and the weights among the processes (ranks).

* `DeepSpeedLearner` runs on the event loop. It starts one process per rank
  (`crl.learners.worker`) and splits every minibatch among the ranks. It sends the same commands to
  all ranks and waits for their answers as long as they make progress.
* `_Process` represents one rank in this process.

If a rank raises an error, dies or hangs, the learner fails within seconds. If ranks wait for each
other, the learner fails after a deadline. The `LearnerError` names the rank and the failure; its
cause is the traceback of the rank. Rank 0 publishes the weights, either in a file or over NCCL to
engines on other GPUs.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from crl.algo import rank_shares
from crl.config.models import model_size
from crl.config.schema import OptimizerSection
from crl.errors import CrlError, LearnerError
from crl.learners.step import TrainSettings
from crl.protocols import Loss, State
from crl.scratch import scratch_folder
from crl.sync import FileWeights, NcclWeights, weights_path
from crl.types import Minibatch, StepStats

T = TypeVar("T")

OPTIMIZER = "optimizer.safetensors"
"""File name of the optimizer state beside a saved model.

The file holds whole tensors, so any number of ranks can load it.
"""

BEAT_S = 1.0
"""Seconds between two heartbeats of a rank."""

SILENCE_S = 7.0
"""Heartbeat timeout in seconds. A rank without a heartbeat for this time counts as hung.

The rank is stopped, or it is blocked in code during which no Python thread can run.
"""

LOADING_S = 1800.0
"""Timeout in seconds for the start of the ranks, and for loading a checkpoint from a slow disk."""

GRACE_S = 1.0
"""Seconds to wait after a failure, so that the rank that caused it is detected too."""

FAREWELL_S = 5.0
"""Seconds that ranks have to end by themselves before they are killed."""

LAST_LINES = 40
"""Number of lines from the end of a lost rank's log that are reported."""

_LENGTH = struct.Struct("!Q")
"""Length prefix of a message: 8 bytes, unsigned, big-endian."""


@dataclass(frozen=True)
class RankSettings:
    """Settings that are the same for every rank."""

    model: Path
    """Directory of the model."""
    key: str
    """Setting that names the model; used in error messages."""
    loss: Loss
    optimizer: OptimizerSection
    train: TrainSettings
    device: Literal["cpu", "cuda"]
    precision: Literal["float32", "bfloat16"]
    """Dtype of the weights in forward and backward passes. The optimizer's weights are float32."""
    threads: int
    """CPU threads of a rank."""
    zero: int
    """Stage of ZeRO, 0 to 3."""
    offload: bool
    """Store the optimizer state in host memory."""
    deterministic: bool
    """Use deterministic algorithms only."""
    deadline: float
    """Timeout in seconds without progress of any rank."""


@dataclass(frozen=True)
class Seat:
    """First message to a rank: its settings and its number."""

    settings: RankSettings
    rank: int
    """Number of this rank, from 0."""
    ranks: int
    """Number of ranks."""
    folder: Path
    """Temporary folder shared by all ranks. It is removed when the learner ends."""


class RankTraceback(Exception):
    """Tracebacks or last log lines of lost ranks; the cause of a `LearnerError` in the log."""


class DeepSpeedLearner:
    """`crl.protocols.Learner` in separate processes."""

    def __init__(
        self, settings: RankSettings, ranks: int, *, deadline: float, receivers: int
    ) -> None:
        """Create a learner without processes; `start` creates and starts a learner."""
        self.version = 0
        """Number of steps that changed the weights."""
        self._settings, self._deadline, self._receivers = settings, deadline, receivers
        self._patience = LOADING_S
        size = model_size(settings.model, settings.key)
        self._bytes = (
            size.parameters * (2 if settings.precision == "bfloat16" else 4)
            if size
            else sys.maxsize
        )
        self._folder = Path(tempfile.mkdtemp(prefix="learner-", dir=scratch_folder()))
        self._ranks = [_Process(rank, self._folder / f"rank{rank}.log") for rank in range(ranks)]
        self._trouble = asyncio.Event()
        self._stuck = False
        self._failure: LearnerError | None = None
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    @classmethod
    async def start(
        cls,
        settings: RankSettings,
        ranks: int,
        *,
        deadline: float,
        gpus: Sequence[str] = (),
        receivers: int = 0,
    ) -> DeepSpeedLearner:
        """Start a learner with `ranks` processes. Return when all ranks have loaded the model.

        * `deadline`: seconds without progress after which a command fails.
        * `gpus`: one GPU per rank, named as in CUDA_VISIBLE_DEVICES; empty on the CPU.
        * `receivers`: number of vLLM workers that receive the weights over NCCL. With 0, the
          weights are published in a file.

        Raise `ConfigError` if the model cannot be loaded, and `LearnerError` if the ranks do not
        start.
        """
        learner = cls(settings, ranks, deadline=deadline, receivers=receivers)
        try:
            await learner._start(gpus)
        except BaseException:
            await learner.aclose()
            raise
        return learner

    async def step(self, minibatches: Sequence[Minibatch]) -> StepStats:
        """Run one training step. See `crl.protocols.Learner`. Raise `LearnerError` on failure."""
        return await self._unbroken(self._step(minibatches))

    async def publish(self) -> FileWeights | NcclWeights:
        """Publish the weights. See `crl.protocols.Learner`.

        A broadcast over NCCL begins when the engine calls the `send` of the returned handle.
        """
        return await self._unbroken(self._announce() if self._receivers else self._write())

    async def save(self, directory: Path) -> None:
        await self._unbroken(self._command("save", directory))

    async def load(self, directory: Path) -> None:
        await self._unbroken(self._command("load", directory))

    async def watch(self) -> None:
        """Wait until a rank is lost, then raise the error. See `crl.protocols.Learner`."""
        await self._trouble.wait()
        async with self._turn:
            raise self._failure or await self._lost("idle")

    def state(self) -> State:
        return {"version": self.version}

    def load_state(self, state: State) -> None:
        self.version = state["version"]

    async def aclose(self) -> None:
        self._failure = self._failure or LearnerError("the learner is closed")
        await asyncio.gather(*(rank.end() for rank in self._ranks))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _step(self, minibatches: Sequence[Minibatch]) -> StepStats:
        shares = shared_out(minibatches, len(self._ranks))
        stats: StepStats = await self._commands("step", [(share, self.version) for share in shares])
        self.version += stats.updates > 0
        return replace(
            stats, metrics={**stats.metrics, "samples": sum(len(m.samples) for m in minibatches)}
        )

    async def _announce(self) -> NcclWeights:
        checksum, manifest = await self._command("publish", None)
        size = 1 + self._receivers
        return NcclWeights(
            size,
            self.version,
            checksum,
            manifest,
            lambda port: self._unbroken(self._command("broadcast", port, size)),
        )

    async def _write(self) -> FileWeights:
        path = weights_path(self._bytes)
        checksum, manifest = await self._command("publish", path)
        return FileWeights(path, self.version, checksum, manifest)

    # ── commands ──────────────────────────────────────────────────────────────────────────────────

    async def _start(self, gpus: Sequence[str]) -> None:
        """Start all ranks, wait until they are ready, and start the supervision."""
        count = len(self._ranks)
        for rank in self._ranks:
            await rank.start(
                _environment(
                    self._settings, rank.number, count, gpus[rank.number] if gpus else None
                )
            )
            self._spawn(self._listen(rank))
        seats = [Seat(self._settings, rank.number, count, self._folder) for rank in self._ranks]
        await self._meet(
            "start",
            [rank.call(seat) for rank, seat in zip(self._ranks, seats, strict=True)],
            limit=LOADING_S,
        )
        self._spawn(self._watch())

    async def _command(self, name: str, *arguments: object) -> Any:
        """Send the same command to all ranks. Return the answer of rank 0."""
        return await self._commands(name, [arguments] * len(self._ranks))

    async def _commands(self, name: str, arguments: Sequence[tuple[object, ...]]) -> Any:
        """Send a command with separate arguments to each rank. Return the answer of rank 0."""
        async with self._turn:
            if self._failure:
                raise self._failure
            self._patience = LOADING_S if name == "load" else self._deadline
            calls = [
                rank.call((name, given)) for rank, given in zip(self._ranks, arguments, strict=True)
            ]
            return (await self._meet(name, calls))[0]

    async def _meet(
        self, name: str, calls: Sequence[Coroutine[Any, Any, T]], limit: float | None = None
    ) -> Sequence[T]:
        """Return the answers of all ranks to the command `name`.

        `limit` is a timeout in seconds that applies even if the ranks make progress. Raise
        `LearnerError` if a rank is lost or the timeout expires. Raise the rank's own error if it is
        a `CrlError`, such as a `ConfigError`.
        """
        answers = asyncio.gather(*calls)
        trouble = asyncio.create_task(self._trouble.wait())
        try:
            ended, _ = await asyncio.wait(
                {answers, trouble}, timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )
            self._stuck = self._stuck or not ended
            if answers.done() and not self._trouble.is_set():
                return answers.result()
            raise await self._lost(f"in {name}")
        finally:
            trouble.cancel()
            answers.cancel()
            await asyncio.gather(answers, trouble, return_exceptions=True)

    async def _unbroken(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. If the caller is cancelled, `work` still runs to its end.

        Otherwise a rank could miss a command, or a step could miss the update of `version`.
        """
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name="deepspeed learner")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # avoid a warning if no caller retrieves the exception

    # ── supervision ───────────────────────────────────────────────────────────────────────────────

    async def _listen(self, rank: _Process) -> None:
        """Process the messages of a rank until its process ends, then report the loss."""
        await rank.listen(self._trouble)
        self._trouble.set()

    async def _watch(self) -> None:
        """Detect ranks whose heartbeat or progress has stalled.

        Ignore gaps that are caused by a pause of this process. Return after the first detection.
        """
        loop = asyncio.get_running_loop()
        last = loop.time()
        while not self._trouble.is_set():
            await asyncio.sleep(BEAT_S)
            now, paused = loop.time(), loop.time() - last > 2 * BEAT_S
            last = now
            for rank in self._ranks:
                if paused:
                    rank.heard = rank.moved = now
                elif now - rank.heard > SILENCE_S:
                    rank.silent = True
                    self._trouble.set()
            busy = [rank for rank in self._ranks if rank.busy]
            # A rank that waits for another rank makes no progress either. Therefore only a stall of
            # all busy ranks counts.
            if busy and now - max(rank.moved for rank in busy) > self._patience:
                self._stuck = True
                self._trouble.set()

    async def _lost(self, when: str) -> CrlError:
        """Kill all ranks and return the error that explains the loss. Store a `LearnerError`.

        `when` describes the activity at the time of the loss. If the ranks are stuck, they first
        write the stacks of their threads to their logs.
        """
        if self._stuck:
            for rank in self._ranks:
                rank.ask_where()
        await asyncio.sleep(GRACE_S)
        what, said = self._verdict()
        told = said[0].raised.error if said[0].raised and not said[0].died else None
        await asyncio.gather(*(rank.end(kill=True) for rank in self._ranks))
        self._failure = LearnerError(f"{what} ({when})")
        self._failure.__cause__ = RankTraceback(
            "\n".join(f"what rank {rank.number} said:\n{rank.last_words()}" for rank in said)
        )
        return told or self._failure

    def _verdict(self) -> tuple[str, Sequence[_Process]]:
        """Return a description of the failure and the ranks to report on, most relevant first."""
        guilty, count = min(self._ranks, key=_Process.guilt), len(self._ranks)
        if fault := guilty.fault():
            return f"rank {guilty.number} of {count} {fault}", [guilty]
        least = min((rank.progress for rank in self._ranks if rank.busy), default=(0, 0))
        late = [rank for rank in self._ranks if rank.busy and rank.progress == least]
        numbers = ", ".join(str(rank.number) for rank in late)
        limit = (
            f"learner.deadline = {self._deadline:g}"
            if self._patience == self._deadline
            else f"{self._patience:g}"
        )
        return f"rank {numbers} of {count} made no progress in {limit} s", [
            *late,
            *(rank for rank in self._ranks if rank not in late),
        ]


# ── process of one rank ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Raised:
    """Error that a rank raised."""

    summary: str
    """Type and message of the error."""
    traceback: str
    error: CrlError | None
    """Error object if it is a `CrlError`, else None."""


class _Process:
    """Process of one rank."""

    def __init__(self, number: int, log: Path) -> None:
        self.number, self._log = number, log
        self.heard = self.moved = 0.0
        """Times of the last message and of the last progress, on the event loop's clock."""
        self.progress = (0, 0)
        """Number of commands begun, and number of ticks in the last command.

        A comparison shows which of two ranks is behind.
        """
        self.busy = self.died = self.silent = False
        """State of the rank: works on a command, process has ended, heartbeats are missing."""
        self.raised: _Raised | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._answers: asyncio.Queue[Any] = asyncio.Queue()

    async def start(self, environment: dict[str, str]) -> None:
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "crl.learners.worker",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                env=environment, start_new_session=True,
            )  # fmt: skip

    async def call(self, message: object) -> Any:
        """Send a message and return the answer. Wait forever if the rank is lost."""
        assert self._process is not None
        assert self._process.stdin is not None
        self.busy, self.moved = True, asyncio.get_running_loop().time()
        # Pickling the samples of a step takes a while.
        framed = await asyncio.to_thread(frame, message)
        with suppress(OSError):  # `listen` detects the end of the process
            self._process.stdin.write(framed)
            await self._process.stdin.drain()
        answer = await self._answers.get()
        self.busy = False
        return answer

    async def listen(self, trouble: asyncio.Event) -> None:
        """Process the rank's messages until its process ends.

        Set `trouble` if the rank reports an error.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        with suppress(EOFError, OSError):
            while True:
                (length,) = _LENGTH.unpack(await self._process.stdout.readexactly(_LENGTH.size))
                kind, value = pickle.loads(await self._process.stdout.readexactly(length))
                self.heard = asyncio.get_running_loop().time()
                if kind == "beat":
                    self.moved = self.moved if value == self.progress else self.heard
                    self.progress = value
                elif kind == "done":
                    self._answers.put_nowait(value)
                elif kind == "failed":
                    summary, traceback, error = value
                    self.raised = _Raised(summary, traceback, pickle.loads(error))
                    trouble.set()
        await self._process.wait()
        self.died = True

    def guilt(self) -> int:
        """Return a sort key: a smaller number means a more likely cause of the other ranks' errors.

        The order is: died, raised an error, missed its heartbeats, none of these. When a rank dies,
        the connections of the other ranks break, and these ranks report errors.
        """
        return [self.died, self.raised is not None, self.silent, True].index(True)

    def fault(self) -> str | None:
        """Return a description of the rank's fault, or None if the rank is at most late."""
        if self.died:
            return self._fate()
        if self.raised:
            return f"failed: {self.raised.summary}"
        return f"hangs: no sign of life for {SILENCE_S:g} s" if self.silent else None

    def _fate(self) -> str:
        """Return a description of how the process ended."""
        assert self._process is not None
        code = self._process.returncode or 0
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL (by hand, or for want of memory)"
        return (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )

    def ask_where(self) -> None:
        """Ask the rank to write the stacks of its threads to its log.

        Do nothing if the rank has not sent a message yet, because it may not handle the signal.
        """
        if self._process is not None and self._process.returncode is None and self.heard:
            self._process.send_signal(signal.SIGUSR1)

    def last_words(self) -> str:
        """Return the traceback of the rank's error, or the end of its log if it raised none."""
        if self.raised:
            return self.raised.traceback
        try:
            lines = self._log.read_text("utf-8", errors="replace").splitlines()
        except OSError:
            return "(its log is gone)"
        return "\n".join(lines[-LAST_LINES:]) or "(nothing)"

    async def end(self, *, kill: bool = False) -> None:
        """Close the pipe, which ends the rank. Kill the process if it does not end in time.

        If `kill` is true, kill the process immediately.
        """
        process = self._process
        if process is None:
            return
        if kill and process.returncode is None:
            process.kill()
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), FAREWELL_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def _environment(settings: RankSettings, rank: int, ranks: int, gpu: str | None) -> dict[str, str]:
    """Return the environment variables of a rank's process. The rank sees only its own GPU."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    places = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0 if gpu is not None else rank}
    own = {
        "PYTHONPATH": paths,
        "DS_ACCELERATOR": settings.device,
        # All ranks run on this machine.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": str(settings.threads),
    }
    if gpu is not None:
        own["CUDA_VISIBLE_DEVICES"] = gpu
    if settings.deterministic:
        own["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return {**os.environ, **own, **{name: str(value) for name, value in places.items()}}


# ── messages ──────────────────────────────────────────────────────────────────────────────────────


def shared_out(minibatches: Sequence[Minibatch], ranks: int) -> list[list[Minibatch]]:
    """Split each minibatch among the ranks. Return a list of minibatches for each rank.

    The ranks get about equal numbers of tokens. The weights of the samples and `total_tokens` still
    refer to the whole minibatch.
    """
    shares: list[list[Minibatch]] = [[] for _ in range(ranks)]
    for minibatch in minibatches:
        dealt = rank_shares([len(s.trace.ids) for s in minibatch.samples], ranks)
        probed = rank_shares([len(trace.ids) for trace in minibatch.probe], ranks)
        for share, indices, probe in zip(shares, dealt, probed, strict=True):
            samples, traces = (
                (minibatch.samples[i] for i in indices),
                (minibatch.probe[i] for i in probe),
            )
            share.append(replace(minibatch, samples=tuple(samples), probe=tuple(traces)))
    return shares


def frame(message: object) -> bytes:
    """Return the pickled message with its length prefix."""
    body = pickle.dumps(message)
    return _LENGTH.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> Any:
    """Read one message from the stream. Raise `EOFError` at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(*_LENGTH.unpack(head)))

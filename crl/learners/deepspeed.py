"""DeepSpeed learner: one model trained by several processes.

ZeRO partitions the optimizer state, the gradients and the weights among the processes (ranks).

* `DeepSpeedLearner` runs on the event loop. It starts one process per rank
  (`crl.learners.deepspeed_worker`) and splits every minibatch among the ranks. It sends the same
  commands to all ranks and waits for their answers as long as they make progress.
* `_RankProcess` represents one rank in this process.

If a rank raises an error, dies or hangs, the learner fails within seconds. If ranks wait for each
other, the learner fails after a timeout. The `LearnerError` names the rank and the failure; its
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
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from crl.algo import rank_shares
from crl.child_processes import OWNER_VARIABLE, Owner
from crl.config.schema import OptimizerSection
from crl.errors import CrlError, LearnerError
from crl.learners.step import TrainSettings
from crl.modeling import Precision
from crl.modeling.lora import Adapter
from crl.modeling.weights import FileWeights, NcclWeights, weights_path
from crl.protocols import Loss, State
from crl.scratch import scratch_folder
from crl.types import Minibatch, StepStats

T = TypeVar("T")

HEARTBEAT_S = 1.0
"""Seconds between two heartbeats of a rank."""

HEARTBEAT_TIMEOUT_S = 7.0
"""Heartbeat timeout in seconds. A rank without a heartbeat for this time counts as hung.

The rank is stopped, or it is blocked in code during which no Python thread can run.
"""

LOAD_TIMEOUT_S = 1800.0
"""Timeout in seconds for the start of the ranks, and for loading a checkpoint from a slow disk."""

DIAGNOSIS_DELAY_S = 1.0
"""Seconds to wait after a failure, so that the rank that caused it is detected too."""

SHUTDOWN_TIMEOUT_S = 5.0
"""Seconds that ranks have to end by themselves before they are killed."""

LOG_TAIL_LINES = 40
"""Number of lines from the end of a lost rank's log that are reported."""

_LENGTH = struct.Struct("!Q")
"""Length prefix of a message: 8 bytes, unsigned, big-endian."""


@dataclass(frozen=True)
class ComputeSettings:
    """Device of a rank, and settings of its computations."""

    device: Literal["cpu", "cuda"]
    precision: Precision
    """Dtype of the weights in forward and backward passes. The optimizer's weights are float32."""
    threads: int
    """CPU threads of a rank."""
    deterministic: bool
    """True if only deterministic algorithms are used."""


@dataclass(frozen=True)
class ZeroSettings:
    """Settings of ZeRO, which partitions the model states among the ranks."""

    stage: int
    """Stage of ZeRO, 0 to 3."""
    offload: bool
    """True if the optimizer state is stored in host memory."""


@dataclass(frozen=True)
class RankModel:
    """Model that the ranks train."""

    path: Path
    """Directory of the model."""
    key: str
    """Setting that names the model; used in error messages."""
    adapter: Adapter | None = None
    """Adapter that is trained; None if all weights are."""


@dataclass(frozen=True)
class RankSettings:
    """Settings that are the same for every rank."""

    model: RankModel
    loss: Loss
    optimizer: OptimizerSection
    train: TrainSettings
    compute: ComputeSettings
    zero: ZeroSettings
    timeout: float
    """Seconds without progress of any rank after which a command fails."""


@dataclass(frozen=True)
class RankAssignment:
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

    def __init__(self, settings: RankSettings, ranks: int, *, receivers: int) -> None:
        """Create a learner without processes; `start` creates and starts a learner."""
        self.version = 0
        """Number of steps that changed the weights."""
        self._settings, self._receivers = settings, receivers
        self._progress_timeout = LOAD_TIMEOUT_S
        self._published_bytes = 0
        self._folder = Path(tempfile.mkdtemp(prefix="learner-", dir=scratch_folder()))
        self._ranks = [
            _RankProcess(rank, self._folder / f"rank{rank}.log") for rank in range(ranks)
        ]
        self._failed_event = asyncio.Event()
        self._stuck = False
        self._failure: LearnerError | None = None
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    @classmethod
    async def start(
        cls,
        settings: RankSettings,
        ranks: int,
        *,
        gpus: Sequence[str] = (),
        receivers: int = 0,
    ) -> DeepSpeedLearner:
        """Start a learner with `ranks` processes. Return when all ranks have loaded the model.

        * `gpus`: one GPU per rank, named as in CUDA_VISIBLE_DEVICES; empty on the CPU.
        * `receivers`: number of vLLM workers that receive the weights over NCCL. With 0, the
          weights are published in a file.

        Raise `ConfigError` if the model cannot be loaded, and `LearnerError` if the ranks do not
        start.
        """
        learner = cls(settings, ranks, receivers=receivers)
        try:
            await learner._start(gpus)
        except BaseException:
            await learner.aclose()
            raise
        return learner

    async def step(self, minibatches: Sequence[Minibatch]) -> StepStats:
        """Run one training step. See `crl.protocols.Learner`. Raise `LearnerError` on failure."""
        return await self._shielded(self._step(minibatches))

    async def publish(self) -> FileWeights | NcclWeights:
        """Publish the weights. See `crl.protocols.Learner`.

        A broadcast over NCCL begins when the engine calls the `send` of the returned handle.
        """
        return await self._shielded(
            self._publish_nccl() if self._receivers else self._publish_file()
        )

    async def save(self, directory: Path) -> None:
        """Write the model in Hugging Face format and the optimizer state to `directory`."""
        await asyncio.to_thread(await self.prepare_save(directory))

    async def prepare_save(
        self, directory: Path, *, optimizer: bool = True
    ) -> Callable[[], None]:  # fmt: skip
        """Copy everything to the host memory of rank 0, which then writes the files.

        The returned function waits for the end of the writing. See `crl.protocols.Learner`.
        """
        if before := self._ranks[0].written:
            waiting = asyncio.wrap_future(before)
            await asyncio.wait({waiting})  # two copies are never in memory
            waiting.exception()  # the caller of the write has it; here it has no effect
        written = self._ranks[0].written = Future()
        await self._shielded(self._command("save", directory, optimizer))
        return written.result

    async def load(self, directory: Path) -> None:
        await self._shielded(self._command("load", directory))

    async def watch(self) -> None:
        """Wait until a rank is lost, then raise the error. See `crl.protocols.Learner`."""
        await self._failed_event.wait()
        async with self._lock:
            raise self._failure or await self._fail("idle")

    def details(self) -> list[str]:
        now = asyncio.get_running_loop().time()
        return [
            f"rank {rank.number}: "
            + (f"no progress for {now - rank.last_progress:.0f} s" if rank.busy else "idle")
            + f", last heartbeat {now - rank.last_message:.0f} s ago"
            for rank in self._ranks
        ]

    def state(self) -> State:
        return {"version": self.version}

    def load_state(self, state: State) -> None:
        self.version = state["version"]

    async def aclose(self) -> None:
        self._failure = self._failure or LearnerError("the learner is closed")
        await asyncio.gather(*(rank.shut_down() for rank in self._ranks))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _step(self, minibatches: Sequence[Minibatch]) -> StepStats:
        shares = split_minibatches(minibatches, len(self._ranks))
        stats: StepStats = await self._commands("step", [(share, self.version) for share in shares])
        self.version += stats.updates > 0
        return replace(
            stats, metrics={**stats.metrics, "samples": sum(len(m.samples) for m in minibatches)}
        )

    async def _publish_nccl(self) -> NcclWeights:
        checksum, manifest = await self._command("publish", None)
        size = 1 + self._receivers
        return NcclWeights(
            size,
            self.version,
            checksum,
            manifest,
            lambda port: self._shielded(self._command("broadcast", port, size)),
        )

    async def _publish_file(self) -> FileWeights:
        path = weights_path(self._published_bytes)
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
        assignments = [
            RankAssignment(self._settings, rank.number, count, self._folder) for rank in self._ranks
        ]
        calls = [
            rank.call(assignment) for rank, assignment in zip(self._ranks, assignments, strict=True)
        ]
        self._published_bytes = (await self._wait_answers("start", calls, limit=LOAD_TIMEOUT_S))[0]
        self._spawn(self._watch())

    async def _command(self, name: str, *arguments: object) -> Any:
        """Send the same command to all ranks. Return the answer of rank 0."""
        return await self._commands(name, [arguments] * len(self._ranks))

    async def _commands(self, name: str, arguments: Sequence[tuple[object, ...]]) -> Any:
        """Send a command with separate arguments to each rank. Return the answer of rank 0."""
        async with self._lock:
            if self._failure:
                raise self._failure
            self._progress_timeout = LOAD_TIMEOUT_S if name == "load" else self._settings.timeout
            calls = [
                rank.call((name, rank_arguments))
                for rank, rank_arguments in zip(self._ranks, arguments, strict=True)
            ]
            return (await self._wait_answers(name, calls))[0]

    async def _wait_answers(
        self, name: str, calls: Sequence[Coroutine[Any, Any, T]], limit: float | None = None
    ) -> Sequence[T]:
        """Return the answers of all ranks to the command `name`.

        `limit` is a timeout in seconds that applies even if the ranks make progress. Raise
        `LearnerError` if a rank is lost or the timeout expires. Raise the rank's own error if it is
        a `CrlError`, such as a `ConfigError`.
        """
        answers = asyncio.gather(*calls)
        failed = asyncio.create_task(self._failed_event.wait())
        try:
            ended, _ = await asyncio.wait(
                {answers, failed}, timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )
            self._stuck = self._stuck or not ended
            if answers.done() and not self._failed_event.is_set():
                return answers.result()
            raise await self._fail(f"in {name}")
        finally:
            failed.cancel()
            answers.cancel()
            await asyncio.gather(answers, failed, return_exceptions=True)

    async def _shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. If the caller is cancelled, `work` still runs to its end.

        Otherwise a rank could miss a command, or a step could miss the update of `version`.
        """
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name="deepspeed learner")
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # avoid a warning if no caller retrieves the exception

    # ── supervision ───────────────────────────────────────────────────────────────────────────────

    async def _listen(self, rank: _RankProcess) -> None:
        """Process the messages of a rank until its process ends, then report the loss."""
        await rank.listen(self._failed_event)
        self._failed_event.set()

    async def _watch(self) -> None:
        """Detect ranks whose heartbeat or progress has stalled.

        Ignore gaps that are caused by a pause of this process. Return after the first detection.
        """
        loop = asyncio.get_running_loop()
        last = loop.time()
        while not self._failed_event.is_set():
            await asyncio.sleep(HEARTBEAT_S)
            now, paused = loop.time(), loop.time() - last > 2 * HEARTBEAT_S
            last = now
            for rank in self._ranks:
                if paused:
                    rank.last_message = rank.last_progress = now
                elif now - rank.last_message > HEARTBEAT_TIMEOUT_S:
                    rank.heartbeat_lost = True
                    self._failed_event.set()
            busy = [rank for rank in self._ranks if rank.busy]
            # A rank that waits for another rank makes no progress either. Therefore only a stall of
            # all busy ranks counts.
            if busy and now - max(rank.last_progress for rank in busy) > self._progress_timeout:
                self._stuck = True
                self._failed_event.set()

    async def _fail(self, when: str) -> CrlError:
        """Kill all ranks and return the error that explains the loss. Store a `LearnerError`.

        `when` describes the activity at the time of the loss. If the ranks are stuck, they first
        write the stacks of their threads to their logs.
        """
        if self._stuck:
            for rank in self._ranks:
                rank.dump_stacks()
        await asyncio.sleep(DIAGNOSIS_DELAY_S)
        description, reported = self._diagnose()
        first = reported[0]
        crl_error = first.raised.error if first.raised and not first.died else None
        await asyncio.gather(*(rank.shut_down(kill=True) for rank in self._ranks))
        self._failure = LearnerError(f"{description} ({when})")
        self._failure.__cause__ = RankTraceback(
            "\n".join(f"output of rank {rank.number}:\n{rank.diagnostics()}" for rank in reported)
        )
        return crl_error or self._failure

    def _diagnose(self) -> tuple[str, Sequence[_RankProcess]]:
        """Return a description of the failure and the ranks to report on, most relevant first."""
        suspect, count = min(self._ranks, key=_RankProcess.cause_order), len(self._ranks)
        if failure := suspect.failure():
            return f"rank {suspect.number} of {count} {failure}", [suspect]
        lowest = min((rank.progress for rank in self._ranks if rank.busy), default=(0, 0))
        late = [rank for rank in self._ranks if rank.busy and rank.progress == lowest]
        numbers = ", ".join(str(rank.number) for rank in late)
        limit = (
            f"learner.timeout = {self._settings.timeout:g}"
            if self._progress_timeout == self._settings.timeout
            else f"{self._progress_timeout:g}"
        )
        ranks = "rank" if len(late) == 1 else "ranks"
        return f"{ranks} {numbers} of {count} made no progress within {limit} s", [
            *late,
            *(rank for rank in self._ranks if rank not in late),
        ]


# ── process of one rank ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _RankError:
    """Error that a rank raised."""

    summary: str
    """Type and message of the error."""
    traceback: str
    error: CrlError | None
    """Error object if it is a `CrlError`, else None."""


class _RankProcess:
    """Process of one rank."""

    def __init__(self, number: int, log: Path) -> None:
        self.number, self._log = number, log
        self.last_message = self.last_progress = 0.0
        """Times of the last message and of the last progress, on the event loop's clock."""
        self.progress = (0, 0)
        """Number of commands begun, and number of ticks in the last command.

        The rank with the smaller pair is behind.
        """
        self.busy = self.died = self.heartbeat_lost = False
        """State of the rank: works on a command, process has ended, heartbeats are missing."""
        self.raised: _RankError | None = None
        self.written: Future[None] | None = None
        """Result of the last checkpoint, which the rank writes beside its commands."""
        self._process: asyncio.subprocess.Process | None = None
        self._answers: asyncio.Queue[Any] = asyncio.Queue()

    async def start(self, environment: dict[str, str]) -> None:
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "crl.learners.deepspeed_worker",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                env=environment, start_new_session=True,
            )  # fmt: skip

    async def call(self, message: object) -> Any:
        """Send a message and return the answer. Wait forever if the rank is lost."""
        assert self._process is not None
        assert self._process.stdin is not None
        self.busy, self.last_progress = True, asyncio.get_running_loop().time()
        # The samples of a step are tens of megabytes.
        pieces = await asyncio.to_thread(frame, message)
        with suppress(OSError):  # `listen` detects the end of the process
            for piece in pieces:
                self._process.stdin.write(piece)
                await self._process.stdin.drain()
        answer = await self._answers.get()
        self.busy = False
        return answer

    async def listen(self, failed: asyncio.Event) -> None:
        """Process the rank's messages until its process ends.

        Set `failed` if the rank reports an error.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        with suppress(EOFError, OSError):
            while True:
                (length,) = _LENGTH.unpack(await self._process.stdout.readexactly(_LENGTH.size))
                kind, value = pickle.loads(await self._process.stdout.readexactly(length))
                self.last_message = asyncio.get_running_loop().time()
                if kind == "beat":
                    self.last_progress = (
                        self.last_progress if value == self.progress else self.last_message
                    )
                    self.progress = value
                elif kind == "done":
                    self._answers.put_nowait(value)
                elif kind == "written":
                    self._set_written(value)
                elif kind == "failed":
                    summary, traceback, error = value
                    self.raised = _RankError(summary, traceback, pickle.loads(error))
                    failed.set()
        await self._process.wait()
        self.died = True
        if self.written and not self.written.done():
            self._set_written("the process has ended")

    def _set_written(self, problem: str | None) -> None:
        """Set the result of the checkpoint that the rank has written, or could not write."""
        assert self.written is not None
        if problem is None:
            self.written.set_result(None)
        else:
            error = LearnerError(f"rank {self.number} cannot write the files: {problem}")
            self.written.set_exception(error)

    def cause_order(self) -> int:
        """Return a sort key: a smaller number means a more likely cause of the other ranks' errors.

        The order is: died, raised an error, missed its heartbeats, none of these. When a rank dies,
        the connections of the other ranks break, and these ranks report errors.
        """
        return [self.died, self.raised is not None, self.heartbeat_lost, True].index(True)

    def failure(self) -> str | None:
        """Return a description of the rank's failure, or None if the rank is at most late."""
        if self.died:
            return self._exit_reason()
        if self.raised:
            return f"failed: {self.raised.summary}"
        return f"hangs: no heartbeat for {HEARTBEAT_TIMEOUT_S:g} s" if self.heartbeat_lost else None

    def _exit_reason(self) -> str:
        """Return a description of how the process ended."""
        assert self._process is not None
        code = self._process.returncode or 0
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL (manually, or because the machine ran out of memory)"
        return (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )

    def dump_stacks(self) -> None:
        """Ask the rank to write the stacks of its threads to its log.

        Do nothing if the rank has not sent a message yet, because it may not handle the signal.
        """
        if self._process is not None and self._process.returncode is None and self.last_message:
            self._process.send_signal(signal.SIGUSR1)

    def diagnostics(self) -> str:
        """Return the traceback of the rank's error, or the end of its log if it raised none."""
        if self.raised:
            return self.raised.traceback
        try:
            lines = self._log.read_text("utf-8", errors="replace").splitlines()
        except OSError:
            return "(the log cannot be read)"
        return "\n".join(lines[-LOG_TAIL_LINES:]) or "(the log is empty)"

    async def shut_down(self, *, kill: bool = False) -> None:
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
            await asyncio.wait_for(process.wait(), SHUTDOWN_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def _environment(settings: RankSettings, rank: int, ranks: int, gpu: str | None) -> dict[str, str]:
    """Return the environment variables of a rank's process. The rank sees only its own GPU."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    rank_variables = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": 0 if gpu is not None else rank,
    }
    variables = {
        OWNER_VARIABLE: str(Owner.current()),
        "PYTHONPATH": paths,
        "DS_ACCELERATOR": settings.compute.device,
        # All ranks run on this machine.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": str(settings.compute.threads),
    }
    if gpu is not None:
        variables["CUDA_VISIBLE_DEVICES"] = gpu
    if settings.compute.deterministic:
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return {
        **os.environ,
        **variables,
        **{name: str(value) for name, value in rank_variables.items()},
    }


# ── messages ──────────────────────────────────────────────────────────────────────────────────────


def split_minibatches(minibatches: Sequence[Minibatch], ranks: int) -> list[list[Minibatch]]:
    """Split each minibatch among the ranks. Return a list of minibatches for each rank.

    The ranks get about equal numbers of tokens. The weights of the samples and `total_tokens` still
    refer to the whole minibatch.
    """
    shares: list[list[Minibatch]] = [[] for _ in range(ranks)]
    for minibatch in minibatches:
        sample_shares = rank_shares([len(s.trace.ids) for s in minibatch.samples], ranks)
        probe_shares = rank_shares([len(trace.ids) for trace in minibatch.probe], ranks)
        for share, indices, probe in zip(shares, sample_shares, probe_shares, strict=True):
            samples, traces = (
                (minibatch.samples[i] for i in indices),
                (minibatch.probe[i] for i in probe),
            )
            share.append(replace(minibatch, samples=tuple(samples), probe=tuple(traces)))
    return shares


def frame(message: object) -> Sequence[bytes]:
    """Return the pickled message with its length prefix, in pieces of about 64 KiB.

    Other threads run between two pieces. They would wait for the copies of one large buffer.
    """
    body = _Pieces()
    pickle.Pickler(body).dump(message)
    return [_LENGTH.pack(sum(map(len, body.pieces))), *body.pieces]


class _Pieces:
    """File-like object that keeps everything that is written to it.

    `write` is a Python function, because the interpreter changes threads at such calls only.
    """

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, piece: bytes) -> None:
        self.pieces.append(piece)


def read_frame(stream: BinaryIO) -> Any:
    """Read one message from the stream. Raise `EOFError` at the end of the stream."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(*_LENGTH.unpack(header)))

"""The DeepSpeed learner: one model trained by several processes, its optimizer, gradients and weights cut up among them by ZeRO.

Cast. `DeepSpeedLearner` lives on the event loop; it starts one process per rank (`crl.learners.worker`), shares every minibatch out,
gives all ranks the same commands and waits for their answers, for as long as they get further. `_Process` is one rank as seen from here.

A rank that raises, dies or stops ends the learner within seconds, ranks that wait for each other do after a deadline: its `LearnerError`
says what happened to which rank, and its cause is the rank's own traceback. Weights go out from the first rank: in a file, or over NCCL to
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
"""The optimizer's state beside a saved model: as wholes, so that any number of ranks can take it up again."""

BEAT_S = 1.0
"""Seconds between two signs of life of a rank."""

SILENCE_S = 7.0
"""Seconds without one after which a rank counts as hung: stopped, or stuck where no Python runs."""

LOADING_S = 1800.0
"""Seconds that ranks may take to start, and to load a checkpoint's model: one long read of a disk."""

GRACE_S = 1.0
"""Seconds in which a rank that fails may be followed by the one that it failed of."""

FAREWELL_S = 5.0
"""Seconds that ranks have to end by themselves."""

LAST_LINES = 40
"""Of a rank's log that are told when it is lost."""

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class RankSettings:
    """What every rank is given.

    model: directory of the model; key: the setting that named it; precision: of weights in forward and backward passes (the optimizer
    keeps float32 ones); zero: the stage; offload: the optimizer's state is kept in host memory; deadline: seconds in which one of them
    must get further.
    """

    model: Path
    key: str
    loss: Loss
    optimizer: OptimizerSection
    train: TrainSettings
    device: Literal["cpu", "cuda"]
    precision: Literal["float32", "bfloat16"]
    threads: int
    zero: int
    offload: bool
    deterministic: bool
    deadline: float


@dataclass(frozen=True)
class Seat:
    """One rank's place among the others. folder: theirs, for as long as they live."""

    settings: RankSettings
    rank: int
    ranks: int
    folder: Path


class RankTraceback(Exception):
    """What a rank said of its end: the cause of a `LearnerError`, there for the log."""


class DeepSpeedLearner:
    """`crl.protocols.Learner` in processes of its own. `version` counts the steps that changed the weights."""

    def __init__(
        self, settings: RankSettings, ranks: int, *, deadline: float, receivers: int
    ) -> None:
        self.version = 0
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
        """deadline: seconds without progress after which a command is given up. gpus: one for each rank, as CUDA_VISIBLE_DEVICES names
        them; none on the CPU. receivers: vLLM's workers to which weights are broadcast over NCCL; 0 = they go out in a file.

        Raises `ConfigError` for a model that cannot be loaded, `LearnerError` when the ranks do not come up.
        """
        learner = cls(settings, ranks, deadline=deadline, receivers=receivers)
        try:
            await learner._start(gpus)
        except BaseException:
            await learner.aclose()
            raise
        return learner

    async def step(self, minibatches: Sequence[Minibatch]) -> StepStats:
        """See `crl.protocols.Learner`. Raises `LearnerError`."""
        return await self._unbroken(self._step(minibatches))

    async def publish(self) -> FileWeights | NcclWeights:
        """See `crl.protocols.Learner`. A broadcast begins when the engine has it sent."""
        return await self._unbroken(self._announce() if self._receivers else self._write())

    async def save(self, directory: Path) -> None:
        await self._unbroken(self._command("save", directory))

    async def load(self, directory: Path) -> None:
        await self._unbroken(self._command("load", directory))

    async def watch(self) -> None:
        """See `crl.protocols.Learner`."""
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

    # ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _start(self, gpus: Sequence[str]) -> None:
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
        """The same for all ranks."""
        return await self._commands(name, [arguments] * len(self._ranks))

    async def _commands(self, name: str, arguments: Sequence[tuple[object, ...]]) -> Any:
        """One for each rank; what the first one answers."""
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
        """All answers, unless a rank is lost before. limit: seconds, whatever progress there is. Raises `LearnerError`, and what a rank
        found wrong with its settings."""
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
        """What `work` comes to. A cancelled caller does not cut it short: no rank may miss a command, no step its version."""
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name="deepspeed learner")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever waits; nobody may

    # ── supervision ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _listen(self, rank: _Process) -> None:
        """Takes down what a rank says, until it is gone."""
        await rank.listen(self._trouble)
        self._trouble.set()

    async def _watch(self) -> None:
        """Misses the signs of life, and of progress. A pause of this process itself, in which nothing was read, is nobody's silence."""
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
            if (
                busy and now - max(rank.moved for rank in busy) > self._patience
            ):  # one that waits for another stands still too
                self._stuck = True
                self._trouble.set()

    async def _lost(self, when: str) -> CrlError:
        """Ends every rank; returns why it had to be."""
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
        """What happened, and the ranks that have something to say about it."""
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


# ── one rank, from here ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Raised:
    """What a rank raised. error: the error itself where it is one of crl's."""

    summary: str
    traceback: str
    error: CrlError | None


class _Process:
    """One rank's process. On the loop's clock, `heard`: when it last said anything; `moved`: when it last got further. `progress`: how
    far it has come, commands begun and then what was done in the last one; which of two ranks is behind."""

    def __init__(self, number: int, log: Path) -> None:
        self.number, self._log = number, log
        self.heard = self.moved = 0.0
        self.progress = (0, 0)
        self.busy = self.died = self.silent = False
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
        """The answer. Waits for ever when the rank is lost."""
        assert self._process is not None
        assert self._process.stdin is not None
        self.busy, self.moved = True, asyncio.get_running_loop().time()
        framed = await asyncio.to_thread(frame, message)  # a step's samples take a while
        with suppress(OSError):  # its end is noticed where it is listened to
            self._process.stdin.write(framed)
            await self._process.stdin.drain()
        answer = await self._answers.get()
        self.busy = False
        return answer

    async def listen(self, trouble: asyncio.Event) -> None:
        """Until the rank is gone. trouble: set when it says that it failed."""
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
        """Smaller is likelier to be what the others failed of: a death breaks their connections, which they report as errors."""
        return [self.died, self.raised is not None, self.silent, True].index(True)

    def fault(self) -> str | None:
        """What is wrong with it; None when it is only late."""
        if self.died:
            return self._fate()
        if self.raised:
            return f"failed: {self.raised.summary}"
        return f"hangs: no sign of life for {SILENCE_S:g} s" if self.silent else None

    def _fate(self) -> str:
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
        """Has the rank write down what its threads are doing, if it has come so far as to understand."""
        if self._process is not None and self._process.returncode is None and self.heard:
            self._process.send_signal(signal.SIGUSR1)

    def last_words(self) -> str:
        """The traceback of what it raised, else the end of its log."""
        if self.raised:
            return self.raised.traceback
        try:
            lines = self._log.read_text("utf-8", errors="replace").splitlines()
        except OSError:
            return "(its log is gone)"
        return "\n".join(lines[-LAST_LINES:]) or "(nothing)"

    async def end(self, *, kill: bool = False) -> None:
        """A rank ends when its pipe closes; it is killed when it does not, or at once."""
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
    """A rank sees its own GPU only, and starts before anything else is known of it."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    places = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0 if gpu is not None else rank}
    own = {
        "PYTHONPATH": paths,
        "DS_ACCELERATOR": settings.device,
        "GLOO_SOCKET_IFNAME": os.environ.get(
            "GLOO_SOCKET_IFNAME", "lo"
        ),  # all ranks are on this machine
        "OMP_NUM_THREADS": str(settings.threads),
    }
    if gpu is not None:
        own["CUDA_VISIBLE_DEVICES"] = gpu
    if settings.deterministic:
        own["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return {**os.environ, **own, **{name: str(value) for name, value in places.items()}}


# ── what goes through the pipe ──────────────────────────────────────────────────────────────────────────────────────


def shared_out(minibatches: Sequence[Minibatch], ranks: int) -> list[list[Minibatch]]:
    """Every rank's share of each minibatch, about equally many tokens. Weights and total tokens stay those of the whole."""
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
    body = pickle.dumps(message)
    return _LENGTH.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> Any:
    """Raises `EOFError` at the stream's end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(*_LENGTH.unpack(head)))

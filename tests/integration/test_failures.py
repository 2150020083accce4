"""Failures of every part of a run, while other parts are in the middle of work that never ends.

The run may not wait for this work. Its process ends when the time limit after the failure has
passed. Here a function replaces the end of the process: it lets the work end, so that the run in
this process can end too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crl.embedders.hash import HashEmbedder
from crl.engines.torch import Decoder
from crl.envs.hosting.threads import Hosts, ThreadEnvironment
from crl.errors import StoreError
from crl.learners.local import LocalLearner
from crl.manager.storage.store import Store
from crl.monitor.files import FileMonitor
from crl.run import checkpoint, loop
from crl.run.loop import TrainingLoop
from crl.run.supervision import ending
from crl.run.supervision.watchdog import Watchdog
from crl.types import StepResult
from support.complementary_runs import train
from support.whole_runs import crl, metrics

SETS = (
    "eval.probe_every=0", "tasks.room.eval.seen=2",
    "tasks.room.eval.unseen=0", "tasks.room.eval.online_places=0",
)  # fmt: skip


class Busy:
    """Work that ends only when the process would end.

    After the last checkpoint of `checkpoints` (steps), the learner of `role` never finishes its
    training step. Games do not finish their steps either, from the failure on.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, role: str, checkpoints: tuple[int, ...] = (1,)
    ) -> None:
        self.released, self.begun, self.failing = (threading.Event() for _ in range(3))
        self.saved, self.may_begin = threading.Event(), threading.Event()
        self.may_begin.set()
        self.exit_codes: list[int] = []
        self.released_late = False
        self._learners: list[LocalLearner] = []
        monkeypatch.setattr(ending, "FAILURE_LIMIT_S", 0.5)
        monkeypatch.setattr(ending, "exit_process", self.exit)
        monkeypatch.setattr(ending, "remove_own_folders", lambda: None)  # other tests need them
        monkeypatch.setattr(
            TrainingLoop, "_checkpoint_due", lambda run, step: self.due(step, checkpoints)
        )
        self._hang_learner(monkeypatch, role)
        self._hang_games(monkeypatch)

    def due(self, step: int, checkpoints: tuple[int, ...]) -> bool:
        if step >= 2:
            self.saved.set()
        return step in checkpoints

    def exit(self, code: int) -> None:
        self.exit_codes.append(code)
        self.released.set()

    def wait(self) -> None:
        self.begun.set()
        self.released_late = not self.released.wait(120)

    def role(self, learner: LocalLearner) -> str:
        """Return the role of a learner. The actor's is created first."""
        if learner not in self._learners:
            self._learners.append(learner)
        return ("actor", "extractor")[self._learners.index(learner)]

    def _hang_learner(self, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
        init, step = LocalLearner.__init__, LocalLearner._step

        def registered(learner: LocalLearner, *args: Any, **options: Any) -> None:
            init(learner, *args, **options)
            self.role(learner)

        def hanging(learner: LocalLearner, minibatches: Any) -> Any:
            if self.role(learner) == role and self.saved.is_set() and self.may_begin.is_set():
                self.wait()
            return step(learner, minibatches)

        monkeypatch.setattr(LocalLearner, "__init__", registered)
        monkeypatch.setattr(LocalLearner, "_step", hanging)

    def _hang_games(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from crl.envs.minihack.game import LevelGame

        step = LevelGame.step

        def hanging(game: LevelGame, action: str) -> Any:
            if self.failing.is_set():
                self.wait()
            return step(game, action)

        monkeypatch.setattr(LevelGame, "step", hanging)


def failure(busy: Busy, error: Exception, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises `error` as soon as other parts are busy."""

    def failing(*args: Any, **options: Any) -> Any:
        if busy.begun.is_set():
            busy.failing.set()
            raise error
        return original(*args, **options)

    return failing


PARTS: dict[str, tuple[Any, str, Exception, str]] = {
    "engine": (Decoder, "step", RuntimeError("bad kernel"), "the engine failed: RuntimeError: bad"),
    "bank": (Store, "submit", StoreError("disk I/O error"), "disk I/O error"),
    "embedder": (HashEmbedder, "embed", ValueError("bad text"), "ValueError: bad text"),
    "environments": (Hosts, "acquire", KeyError("host"), "KeyError: 'host'"),
    "files": (FileMonitor, "log", OSError(5, "I/O error"), "OSError: [Errno 5] I/O error"),
    "sync": (loop, "sync_weights", RuntimeError("cable pulled"), "RuntimeError: cable pulled"),
}
"""Owner and name of the function that fails, its error, and the line that names the cause."""


@pytest.mark.parametrize("part", PARTS)
def test_a_failure_ends_the_run_while_the_extractor_trains(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    busy = Busy(monkeypatch, "extractor")
    owner, name, error, cause = PARTS[part]
    monkeypatch.setattr(owner, name, failure(busy, error, getattr(owner, name)))
    check(busy, cause, tmp_path / "run", capfd)


@pytest.mark.parametrize(("failing", "hanging"), [("actor", "extractor"), ("extractor", "actor")])
def test_a_failure_of_a_learner_ends_the_run_while_the_other_trains(
    failing: str, hanging: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    busy = Busy(monkeypatch, hanging)
    original = LocalLearner._step
    if failing == "extractor":
        busy.may_begin.clear()  # the extractor has nothing to train on if the actor hangs before

    def step(learner: LocalLearner, minibatches: Any) -> Any:
        if busy.role(learner) == failing and busy.saved.is_set():
            waits = not busy.may_begin.is_set()
            busy.may_begin.set()
            if busy.begun.wait(60 if waits else 0):
                busy.failing.set()
                raise RuntimeError("shapes differ")
        return original(learner, minibatches)

    monkeypatch.setattr(LocalLearner, "_step", step)
    check(busy, "the learner failed: RuntimeError: shapes differ", tmp_path / "run", capfd)


def test_an_unexpected_failure_of_a_checkpoint_ends_the_run_while_the_actor_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    busy = Busy(monkeypatch, "actor", checkpoints=(1, 2))
    original = checkpoint._finish

    def finish(partial_dir: Path, target: Path) -> None:
        if target.name == "2" and busy.begun.wait(60):
            raise TypeError("no JSON")
        original(partial_dir, target)

    monkeypatch.setattr(checkpoint, "_finish", finish)
    check(busy, "TypeError: no JSON", tmp_path / "run", capfd)


def test_a_failure_while_parts_are_opened_ends_the_run_though_another_part_does_not_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    busy = Busy(monkeypatch, "actor")
    close = LocalLearner.aclose

    async def hanging(learner: LocalLearner) -> None:
        await asyncio.to_thread(busy.wait)
        await close(learner)

    monkeypatch.setattr(LocalLearner, "aclose", hanging)
    monkeypatch.setattr(HashEmbedder, "__init__", failure(busy, KeyError("dimensions"), int))
    busy.begun.set()
    result = train(tmp_path / "run", *SETS, steps=1, code=1)
    assert busy.exit_codes == [1], result.output
    assert not busy.released_late, "the run waited for a part that does not close"
    error = f"error: KeyError: 'dimensions' (traceback: {tmp_path / 'run' / 'log.txt'})"
    assert error in capfd.readouterr().err.splitlines()


def test_a_failure_of_the_engine_ends_rollouts_though_games_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from crl.envs.minihack.game import LevelGame

    busy, run = Busy(monkeypatch, "actor"), tmp_path / "run"
    busy.failing.set()  # the games hang from their first steps on
    monkeypatch.setattr(LevelGame, "close", lambda game: busy.wait())
    monkeypatch.setattr(Decoder, "step", failure(busy, RuntimeError("bad kernel"), Decoder.step))
    result = crl("rollout", "--tasks", "room", "--run-dir", run)
    assert busy.exit_codes == [1], result.output
    assert not busy.released_late, "the rollouts waited for a game that hangs"
    error = f"error: the engine failed: RuntimeError: bad kernel (traceback: {run / 'log.txt'})"
    assert error in capfd.readouterr().err.splitlines()


def check(busy: Busy, cause: str, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Train and check that the process would have ended, with the cause and the command."""
    result = train(run, *SETS, steps=30, code=1)
    assert busy.exit_codes[:1] == [1], result.output
    assert not busy.released_late, "the run waited for work that does not end"
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    (error,) = errors
    assert error.startswith(f"error: {cause}")
    assert f"(traceback: {run / 'log.txt'}; last checkpoint: step 1; " in error
    assert error.endswith(f"; continue with: crl resume {run})")
    log = (run / "log.txt").read_text("utf-8")
    assert "Traceback (most recent call last)" in log
    assert cause in log
    assert metrics(run, "train")


def test_an_environment_that_raises_in_an_interrupted_evaluation_does_not_start_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[BaseException] = []
    begun: list[str] = []
    raised: list[str] = []

    async def step(environment: ThreadEnvironment, text: str) -> StepResult:
        begun.append(text)
        if len(begun) == 1:  # a second signal would end this process
            os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(600)
        finally:
            raised.append(text)
            raise KeyError("host")

    monkeypatch.setattr(ThreadEnvironment, "step", step)
    monkeypatch.setattr(ending.Ending, "failed", lambda end, error: failures.append(error))
    result = train(tmp_path / "run", *SETS, steps=1, code=130)
    assert raised
    assert failures == []
    assert "interrupted after 0 of 1 step" in result.stdout
    assert (tmp_path / "run" / "checkpoints" / "0" / "manifest.json").is_file()


def test_training_of_the_extractor_is_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers, progress = Counter[str](), Watchdog.progress

    def counted(watchdog: Watchdog) -> None:
        callers[sys._getframe(1).f_code.co_name] += 1
        progress(watchdog)

    monkeypatch.setattr(Watchdog, "progress", counted)
    train(tmp_path / "run", *SETS, steps=8)
    assert callers["_train_batch"] == len(metrics(tmp_path / "run", "extractor")) > 0

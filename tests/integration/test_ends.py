"""Every way in which a run can end: nothing of it survives.

The runs are real processes with games in worker processes. Their temporary folder is empty before.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import signal
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from crl.scratch import remove_stale_folders
from support import live_runs, worker_rooms
from support.complementary_runs import SIZES, train
from support.live_runs import (
    new_shared_memory,
    processes,
    temporary_files,
    wait_for,
    wait_for_end,
)
from support.whole_runs import arguments, contents, crl

SETS = (
    *SIZES, "eval.probe_every=0", "tasks.room.eval.seen=2", "tasks.room.eval.unseen=0",
    "tasks.room.eval.online_places=0", "rollout.env_processes=2", "run.checkpoint_every=2",
)  # fmt: skip

SLOW_CHECKPOINT = """
import time
from crl.run import checkpoint
checkpoint._synchronised = lambda folder: time.sleep(600)
"""
"""Program that makes every checkpoint hang."""

PLAYING = """
from crl.envs.minihack.game import LevelGame
step = LevelGame.step
LevelGame.step = lambda game, action: print("playing\\n", end="", flush=True) or step(game, action)
"""
"""Program that prints a line for every turn."""

HANGING_GAMES = PLAYING + live_runs.HANGING_CLOSE
"""Program that also makes games hang when they are closed."""

LATE_CHECKPOINT = """
import time
from crl.run import checkpoint
def late(folder, original=checkpoint._synchronised):
    time.sleep(5)
    return original(folder)
checkpoint._synchronised = late
"""
"""Program that delays every checkpoint."""

FAILING_STEP = """
from crl.run.loop import TrainingLoop
def fail(self, step):
    if step == 3: raise RuntimeError("no such step")
    return due(self, step)
due, TrainingLoop._checkpoint_due = TrainingLoop._checkpoint_due, fail
"""


@dataclass(frozen=True)
class End:
    """Kind of end."""

    code: int
    """Exit code of the process."""
    output: str
    """Regular expression that the output contains."""
    signals: tuple[tuple[str, signal.Signals], ...] = ()
    """Signals, each with the regular expression of the output at which it is sent."""
    program: str = ""
    """Program that the process runs before the command."""
    sets: tuple[str, ...] = (worker_rooms.SETTING,)
    steps: int = 1000


RUNNING, RESUME = r"train +2/1000", r"crl resume \S+/run"
ENDS = {
    "finished": End(0, "trained models: ", steps=1),
    "ctrl-c": End(
        130, rf"interrupted after \d+ of 1,000 steps(.|\n)*{RESUME}", ((RUNNING, signal.SIGINT),)
    ),
    "ctrl-c-twice": End(
        130,
        r"exiting immediately: the run has no checkpoint, so all of it is lost\n$",
        ((RUNNING, signal.SIGINT), ("interrupted: writing", signal.SIGINT)),
        SLOW_CHECKPOINT,
    ),
    "ctrl-c-while-starting": End(130, "run ", (("environments", signal.SIGINT),)),
    "ctrl-c-after-the-last-evaluation": End(
        0, "interrupted: writing(.|\n)*trained models: ", ((r"eval +1/1", signal.SIGINT),),
        LATE_CHECKPOINT, steps=1,
    ),
    "sigterm": End(130, "interrupted after", ((RUNNING, signal.SIGTERM),)),
    "sigkill": End(-9, "train", ((RUNNING, signal.SIGKILL),)),
    "failure": End(
        1, rf"error: RuntimeError: no such step .*last checkpoint: step 3; .*{RESUME}\)\n$",
        program=FAILING_STEP,
    ),
    "error-rate": End(
        1, "error: task room: the first 16 episodes all failed", sets=(worker_rooms.BROKEN_SETTING,)
    ),
}  # fmt: skip


SLOW = ("ctrl-c-while-starting", "ctrl-c-after-the-last-evaluation", "sigterm", "error-rate")
"""Kinds of end that other tests cover in part. They are tested by `make soak`."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.soak] * (kind in SLOW)) for kind in ENDS]
)
def test_nothing_survives_an_end(kind: str, mark: str, tmp_path: Path) -> None:
    end, run, temporary, output = ENDS[kind], *(tmp_path / n for n in ("run", "tmp", "output"))
    temporary.mkdir()
    words = arguments(run, "room", (*SETS, *end.sets), end.steps, 0, "complementary")
    with new_shared_memory() as left, output.open("w") as stream:
        process = live_runs.start([*words, "--plain"], mark, temporary, stream, python=end.program)
        for pattern, number in end.signals:
            wait_for(pattern, output, process)
            if pattern == RUNNING:
                assert processes(mark, "crl.envs.hosting.worker"), "workers play the games"
            process.send_signal(number)
        code = process.wait(60)
        text = output.read_text("utf-8")
        assert (code, bool(re.search(end.output, text))) == (end.code, True), text
        assert wait_for_end(mark, 15) == {}
        deadline = time.monotonic() + 5
        while temporary_files(temporary) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert temporary_files(temporary) == []
    assert left == []


def test_only_shared_memory_that_nobody_uses_was_left() -> None:
    with new_shared_memory() as left:
        used = multiprocessing.get_context("spawn").Lock()
        unused = live_runs.SHARED_MEMORY / f"sem.unused-{uuid.uuid4().hex}"
        unused.write_bytes(b"")
    unused.unlink()
    assert left == [unused.name]
    del used


def test_a_second_ctrl_c_says_which_steps_are_lost(mark: str, tmp_path: Path) -> None:
    """Interrupt a run whose checkpoint of step 2 is complete and whose later ones hang."""
    program = SLOW_CHECKPOINT.replace(
        "lambda folder: time.sleep(600)",
        'lambda folder: original(folder) if folder.name == ".2.part" else time.sleep(600)',
    ).replace("checkpoint._s", "original = checkpoint._synchronised; checkpoint._s", 1)
    run, output = tmp_path / "run", tmp_path / "output"
    words = arguments(run, "room", (*SETS, "run.checkpoint_every=2"), 1000, 0, "complementary")
    with output.open("w") as stream:
        process = live_runs.start(words, mark, tmp_path, stream, python=program)
        wait_for(r"train +3/1000", output, process)
        while not (run / "checkpoints" / "2").exists():
            assert process.poll() is None, output.read_text("utf-8")
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        wait_for("interrupted: writing", output, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert re.search(
        r"exiting immediately: \d steps? after the checkpoint of step 2 (is|are) lost\. "
        rf"Continue with: crl resume {run}\n$",
        output.read_text("utf-8"),
    )


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)]
)
def test_temporary_banks_do_not_survive(number: signal.Signals, mark: str, tmp_path: Path) -> None:
    """End a run in its online evaluation, and `crl eval`. The next command removes the rest."""
    run, temporary, output = (tmp_path / name for name in ("run", "tmp", "output"))
    temporary.mkdir()
    sets = (*SIZES, "eval.probe_every=0", "tasks.room.eval.online_places=500")
    train(run, *sets[:-1], "tasks.room.eval.online_places=1", steps=1)
    words = arguments(tmp_path / "other", "room", sets, 1, 0, "complementary")
    evaluation = ["eval", str(run), "--experience", "online", "--set", sets[-1]]
    for command in ([*words, "--plain"], evaluation):
        with output.open("w") as stream:
            process = live_runs.start(command, mark, temporary, stream)
            while not list(temporary.rglob("bank.sqlite")):
                assert process.poll() is None, output.read_text("utf-8")
                time.sleep(0.02)
            process.send_signal(number)
            assert process.wait(60) == (130 if number == signal.SIGTERM else -9)
    if number == signal.SIGKILL:
        remove_stale_folders(temporary)
    assert temporary_files(temporary) == []


@pytest.mark.parametrize(
    ("options", "program"),
    [
        ((), PLAYING),
        (("--experience", "online"), HANGING_GAMES),
        pytest.param((), HANGING_GAMES, marks=pytest.mark.soak),
        pytest.param(("--experience", "online"), PLAYING, marks=pytest.mark.soak),
    ],
)
def test_an_interrupted_evaluation_says_that_nothing_is_saved(
    options: tuple[str, ...], program: str, evaluated: Path, mark: str, tmp_path: Path
) -> None:
    before, output = contents(evaluated), tmp_path / "output"
    with output.open("w") as stream:
        words = ["eval", str(evaluated), *options]
        process = live_runs.start(words, mark, tmp_path, stream, python=program)
        wait_for("playing", output, process)
        process.send_signal(signal.SIGINT)
        if program == HANGING_GAMES:
            wait_for("interrupted:", output, process)
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    *first, last = (x for x in output.read_text("utf-8").splitlines() if x != "playing")
    lost = f"nothing of the evaluation of {evaluated} is saved"
    interrupted = f"interrupted: {lost} (press Ctrl-C again to exit immediately)"
    if program == HANGING_GAMES:
        assert (first, last) == ([interrupted], f"exiting immediately: {lost}")
    else:
        assert (first, last) == ([], interrupted)
    assert contents(evaluated) == before


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose evaluation takes long."""
    run = tmp_path_factory.mktemp("evaluated") / "run"
    train(run, *SETS, steps=1)
    config = json.loads((run / "config.json").read_text("utf-8"))
    config["config"]["tasks"]["room"]["eval"]["online_places"] = 500
    (run / "config.json").write_text(json.dumps(config), "utf-8")
    return run


@pytest.mark.parametrize("code", [0, 1])
def test_no_thread_survives_an_end(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if code:
        from crl.learners.local import LocalLearner

        monkeypatch.setattr(LocalLearner, "_step", lambda *args: 1 / 0)
    before = set(threading.enumerate())
    train(tmp_path / "run", *SETS, steps=1, code=code)
    deadline = time.monotonic() + 10
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == set()


def test_a_killed_worker_is_replaced_and_the_run_continues(mark: str, tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    sets = (*SETS, worker_rooms.SETTING, "run.checkpoint_every=0")
    words = arguments(run, "room", sets, 8, 0, "complementary")
    with output.open("w") as stream:
        process = live_runs.start(words, mark, tmp_path, stream)
        wait_for(r"train +2/8", output, process)
        worker = next(iter(processes(mark, "crl.envs.hosting.worker")))
        subprocess.run(["kill", "-KILL", str(worker)], check=True)
        assert process.wait(60) == 0
    log = (run / "log.txt").read_text("utf-8")
    assert log.count("the worker process was killed by SIGKILL; a new worker replaces it (1 ") == 1
    assert crl("resume", run, "--plain").exit_code == 2, "the run is complete"

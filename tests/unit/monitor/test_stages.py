"""Tests of stages: estimates, progress.json, and the lock of a run beside its readers."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from crl.errors import ConfigError
from crl.monitor import run_dir
from crl.monitor.files import FileMonitor
from crl.monitor.run_dir import RunDir
from crl.monitor.stages import MAX_STAGES, Stage, Stages, read_stages, stage
from crl.protocols import Monitor
from support.snapshots import Clock


def test_the_estimate_is_the_mean_pace_or_the_last_duration():
    clock = Clock()
    stages = Stages(clock)
    assert stages.update("evaluation", 0, 10)
    clock.now += 5
    assert stages.now() == (Stage("evaluation", 0, 10, 5.0),)
    assert not stages.update("evaluation", 2, 10)
    clock.now += 5
    assert stages.now() == (Stage("evaluation", 2, 10, 10.0, 40.0),)
    assert stages.update("evaluation", 10, 10)
    assert stages.now() == ()
    assert not stages.update("evaluation", 10, 10), "it has already ended"
    stages.update("evaluation", 0, 20)
    clock.now += 4
    assert stages.now() == (Stage("evaluation", 0, 20, 4.0, 6.0),)
    clock.now += 60
    assert stages.now()[0].remaining == 0


def test_the_estimate_ignores_preparations_and_waits_for_a_tenth_of_the_parts():
    """12 s without a part, then two parts per second: 100 parts take 50 s."""
    clock = Clock()
    stages = Stages(clock)
    stages.update("evaluation", 0, 100)
    clock.now += 12
    stages.update("evaluation", 1, 100)
    assert stages.now()[0].remaining is None
    clock.now += 4.5
    stages.update("evaluation", 10, 100)
    assert stages.now()[0].remaining == 45


def test_a_stage_ends_if_its_work_fails():
    seen: list[tuple[str, int, int]] = []

    class Seen(Monitor):
        def progress(self, stage: str, done: int, total: int) -> None:
            seen.append((stage, done, total))

    with pytest.raises(ZeroDivisionError), stage(Seen(), "checkpoint"):
        raise ZeroDivisionError
    assert seen == [("checkpoint", 0, 1), ("checkpoint", 1, 1)]


def test_another_process_can_read_the_stages_of_a_run(tmp_path: Path):
    run = RunDir.create(tmp_path / "run")
    run.progress.write_text("left by a killed process")
    monitor = FileMonitor(run)
    assert not run.progress.exists()
    monitor.progress("evaluation", 0, 10)
    monitor.progress("checkpoint", 0, 1)
    os.utime(run.progress, (time.time() - 30, time.time() - 30))
    first, second = read_stages(run.progress)
    assert (first.name, first.done, first.total) == ("evaluation", 0, 10)
    assert first.elapsed == pytest.approx(30, abs=5)
    assert second.name == "checkpoint"
    monitor.progress("evaluation", 10, 10)
    assert [stage.name for stage in read_stages(run.progress)] == ["checkpoint"]
    monitor.close()
    assert not run.progress.exists()
    assert read_stages(run.progress) == ()


GOOD = {"stage": "x", "done": 1, "total": 2, "elapsed": 1.5, "remaining": 3.0}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b'{"stages": 3}', b'{"stages": [3]}', b"\xff\xfe",
        b'{"stages": [{"stage": "x"}]}', b"[" * 50_000,
        json.dumps({"stages": [GOOD | {"done": "x"}]}).encode(),
        json.dumps({"stages": [GOOD | {"stage": 5}]}).encode(),
        b'{"stages": [{"stage": "x", "done": 1, "total": 2, "elapsed": 1e999, "remaining": 1}]}',
        json.dumps({"stages": [GOOD] * 100_000}).encode(),
    ],
)  # fmt: skip
def test_a_damaged_file_has_no_stages(tmp_path: Path, content: bytes):
    path = tmp_path / "progress.json"
    path.write_bytes(content)
    assert read_stages(path) == ()
    path.write_text(json.dumps({"stages": [GOOD] * 50}))
    assert len(read_stages(path)) == MAX_STAGES


def test_a_reader_sees_the_lock_and_does_not_prevent_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, path = RunDir.create(tmp_path / "run"), tmp_path / "run" / ".lock"
    assert not run.is_locked()
    assert not path.exists(), "a reader writes nothing"
    with run.lock():
        assert run.is_locked()
        monkeypatch.setattr(run_dir, "LOCK_WAIT_S", 0.1)
        with pytest.raises(ConfigError, match="another process is training this run"), run.lock():
            pass
    assert not run.is_locked()
    monkeypatch.setattr(run_dir, "LOCK_WAIT_S", 60.0)
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            run.is_locked()

    readers = [threading.Thread(target=look) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(20):
            with run.lock():
                pass
    finally:
        ended.set()
        for reader in readers:
            reader.join()

"""Tests of `crl watch`: runs that grow, have ended, were killed or are damaged."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

from crl.cli.dashboard.follow import DashboardFollower
from crl.cli.watch import watch
from crl.config.load import dump, load
from crl.errors import ConfigError
from crl.manager.exchange.jsonl import parse_export
from crl.manager.inspection.upkeep import create_bank
from crl.monitor.files import FileMonitor
from crl.monitor.follow import KILLED, GrowingFile
from crl.monitor.run_dir import RunDir
from crl.records.shards import write_shard
from support.snapshots import group, picture


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "mine")
    dump(load(["room"], options={"run.steps": 3}), run.config)
    return run


@contextmanager
def training(run: RunDir, **options: Any) -> Iterator[FileMonitor]:
    """Run a process that has trained two steps, inside the context."""
    with run.lock():
        monitor = FileMonitor(run, **options)
        monitor.note(f"run {run.path}\nactor tiny-actor")
        monitor.log(0, "eval", {"eval/room/seen/success/free": 0.25, "time/eval": 2.0})
        for step in (1, 2):
            monitor.log(step, "train", {"rollout/success": step / 4, "time/train": 1.0})
        yield monitor


def finish(monitor: FileMonitor) -> None:
    monitor.log(3, "train", {"rollout/success": 0.75})
    monitor.log(3, "eval", {"eval/room/seen/success/free": 0.5})
    monitor.close()


def test_a_run_that_is_under_way_is_followed(run: RunDir):
    with training(run) as monitor:
        follower = DashboardFollower(run.path)
        follower.update()
        s = follower.snapshot()
        assert (s.run.name, s.run.steps, s.progress.step, s.progress.status) == ("mine", 3, 2, "")
        assert s.progress.elapsed is not None
        assert s.notes == (f"run {run.path}", "actor tiny-actor")
        monitor.progress("evaluation", 1, 4)
        monitor.note("warning: something")
        write_shard(run.episodes, 2, group(1, "You see the stairs."))
        follower._episodes_due = 0.0
        finish(monitor)
        follower.update()
        s = follower.snapshot()
        assert s.progress.step == 3
        assert s.series("train", "rollout/success").values == (0.25, 0.5, 0.75)
        assert s.evaluations.sets["room/seen"].rates["free"].first == 0.25
        assert s.warnings == ("something",)
        assert [t.condition for t in s.episodes.members] == ["guided", "free"]
    assert follower.snapshot().progress.status == "finished"


def test_stages_of_the_process_are_shown_while_it_is_alive(run: RunDir):
    with training(run) as monitor:
        monitor.progress("evaluation", 1, 4)
        (stage,) = DashboardFollower(run.path).snapshot().progress.stages
        assert (stage.name, stage.done, stage.total) == ("evaluation", 1, 4)
    assert run.progress.exists(), "the process was killed"
    assert DashboardFollower(run.path).snapshot().progress.stages == ()


@pytest.mark.parametrize(
    ("note", "raw", "status"),
    [
        ("interrupted: writing a checkpoint", "", "interrupted"),
        ("", "Traceback (most recent call last):\nValueError: x\n", "failed: see the log"),
        ("", "", KILLED),
        ("a model says: interrupted", "", KILLED),
    ],
)
def test_the_end_of_a_run_is_named(run: RunDir, note: str, raw: str, status: str):
    with training(run) as monitor:
        if note:
            monitor.note(note)
        monitor.close()
        run.append_to_log(raw)
    follower = DashboardFollower(run.path)
    follower.update()
    assert follower.snapshot().progress.status == status
    with run.lock():  # the run is resumed
        resumed = FileMonitor(run)
        resumed.note(f"run {run.path}")
        follower.update()
        assert follower.snapshot().progress.status == ""
        finish(resumed)
    follower.update()
    assert follower.snapshot().progress.status == "finished"


def test_a_long_end_has_its_own_line(run: RunDir):
    with training(run) as monitor:
        monitor.close()
    follower = DashboardFollower(run.path)
    follower.update()
    title, _, ending, *_ = picture(follower.snapshot(), 80, 24).splitlines()
    assert title == "crl mine  complementary on room"
    assert ending == "The run ended before its last evaluation. It may have been killed."


def test_other_directories_of_runs_have_a_state(run: RunDir):
    follower = DashboardFollower(run.path)
    follower.update()
    assert follower.snapshot().progress.status == "not started"  # for example a fork
    with run.lock():  # for example crl rollout, which makes no evaluation
        monitor = FileMonitor(run)
        monitor.log(1, "train", {"rollout/success": 0.5})
        monitor.close()
    follower.update()
    assert follower.snapshot().progress.status == "ended"


def test_a_resumed_run_is_read_anew(run: RunDir):
    with training(run) as monitor:
        monitor.close()
    follower = DashboardFollower(run.path)
    follower.update()
    assert follower.snapshot().progress.step == 2
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join(lines[:2]))  # back to the checkpoint of step 1
    follower.update()
    s = follower.snapshot()
    assert (s.progress.step, s.series("train", "rollout/success").values) == (1, (0.25,))
    assert len(s.notes) == 2, "the log was read anew, too"
    dump(load(["room"], options={"run.steps": 7}), run.config)
    follower.update()
    assert follower.snapshot().run.steps == 7


def test_a_deterministic_run_has_no_times(run: RunDir):
    with training(run, deterministic=True) as monitor:
        follower = DashboardFollower(run.path)
        follower.update()
        progress = follower.snapshot().progress
        assert (progress.elapsed, progress.remaining) == (None, None)
        assert "elapsed –  left –" in picture(follower.snapshot(), 80, 24)
        monitor.close()


def test_experiences_are_read_from_the_bank(run: RunDir, tmp_path: Path):
    lesson = {
        "task": "room", "goal": "Room: the small arch.", "text": "go <east>.\x1b[2J",
        "retrieved": 7, "lift": {"groups": 8, "mean": 0.25, "m2": 0.375},
    }  # fmt: skip
    lines, lessons = [{"crl_bank": 3, "entries": 1}, lesson], tmp_path / "lessons.jsonl"
    lessons.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    with training(run) as monitor:
        create_bank(run.bank, parse_export(lessons))
        monitor.close()
    before = {path: path.stat().st_mtime_ns for path in sorted(run.path.rglob("*"))}
    follower = DashboardFollower(run.path)
    follower.update()
    (experience,) = follower.snapshot().experiences
    assert experience.counters.retrieved == 7
    assert "go <east>.\\x1b[2J" in picture(follower.snapshot(), 80, 24)
    assert {path: path.stat().st_mtime_ns for path in sorted(run.path.rglob("*"))} == before


# ── damaged files ─────────────────────────────────────────────────────────────────────────────────


def test_damaged_lines_are_left_out(run: RunDir):
    good = '{"step": 1, "kind": "train", "time": 3.0, "rollout/success": 0.5}'
    bad = [
        "", "{", "null", "[]", "3", '"x"', "[" * 50_000, "\x00\x1b[2J", '{"step": 1}',
        '{"step": "1", "kind": "train", "time": 1}', '{"step": 1, "kind": 5, "time": 1}',
        '{"step": 9, "kind": "train", "time": "x", "actor/loss": {"a": [1]}}',
        '{"step": 8, "kind": "other", "time": 1e999, "x": 1e999, "\\ud800": NaN}',
        good[:20],
    ]  # fmt: skip
    run.metrics.write_bytes("\n".join([*bad, good, good[:20]]).encode("utf-8", "surrogatepass"))
    run.log.write_bytes(b"\xff\xfe\n" + b"x" * (3 << 20) + b"\n\x1b[2J\x00last\nincomplete")
    run.bank.write_bytes(b"no database")
    run.episodes.mkdir()
    (run.episodes / "000001.jsonl.gz").write_bytes(b"no gzip")
    run.progress.write_bytes(b"{")
    follower = DashboardFollower(run.path)
    follower.update()
    s = follower.snapshot()
    assert s.last("train", "rollout/success") == 0.5
    assert s.notes[-1] == "\x1b[2J\x00last"
    drawn = picture(s, 80, 24)
    assert "\\x1b[2J\\x00last" in drawn
    assert "\x1b" not in drawn


def test_a_damaged_bank_is_a_warning_once(run: RunDir):
    run.bank.write_bytes(b"no database")
    follower = DashboardFollower(run.path)
    for reads in range(1, 6):
        follower._bank_due = 0.0
        follower.update()
        warnings = follower.snapshot().warnings
        assert len(warnings) == (reads >= 3), "at first, the file may just be written"
    assert str(run.bank) in warnings[0]


def test_a_line_is_read_when_it_is_complete(tmp_path: Path):
    path = tmp_path / "log.txt"
    file = GrowingFile(path)
    assert list(file.lines()) == []
    assert not file.replaced()
    path.write_text("one\ntw")
    assert list(file.lines()) == ["one"]
    with path.open("a") as stream:
        stream.write("o\nthree\n")
    assert list(file.lines()) == ["two", "three"]
    assert list(file.lines()) == []
    other = tmp_path / "other"
    other.write_text("x" * 100)
    os.replace(other, path)
    assert file.replaced()
    assert list(GrowingFile(path, start=3).lines()) == []
    path.write_text("first\nsecond\n")
    assert list(GrowingFile(path, start=8).lines()) == ["", "second"]


# ── the command ───────────────────────────────────────────────────────────────────────────────────


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError):
            DashboardFollower(path)


def test_lines_of_a_run_that_has_ended(run: RunDir, capsys: pytest.CaptureFixture[str]):
    with training(run) as monitor:
        monitor.note("a \x1b[2J note")
        finish(monitor)
    with pytest.raises(typer.Exit) as end:
        watch(run.path, plain=True)
    assert end.value.exit_code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"run {run.path}"
    assert "a \\x1b[2J note" in lines
    assert [line.split()[:2] for line in lines[-6:-1]] == [
        ["eval", "0/3"], ["train", "1/3"], ["train", "2/3"], ["train", "3/3"], ["eval", "3/3"],
    ]  # fmt: skip
    assert lines[-1] == "finished"


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_the_dashboard_of_another_process(run: RunDir, key: str):
    pytest.importorskip("pyte")
    from support.terminals import Terminal

    with (
        training(run) as monitor,
        Terminal(sys.executable, "-m", "crl", "watch", str(run.path)) as terminal,
    ):
        assert "step 2/3" in terminal.wait_for("0.500")
        monitor.progress("evaluation", 1, 4)
        terminal.wait_for("evaluation 1/4")
        monitor.log(3, "train", {"rollout/success": 0.75})
        terminal.wait_for("step 3/3")
        terminal.type("8")
        terminal.wait_for("actor tiny-actor")
        terminal.type(key)
        assert terminal.wait() == 0
        assert not terminal.reads_keys
        assert not terminal.on_alternate_screen
        monitor.close()

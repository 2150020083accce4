"""Tests of the contents of the dashboard: folding of lines, bounds of memory, and times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crl.monitor.follow import logged_lines
from crl.monitor.snapshot import (
    EPISODE_CHARS,
    EXPERIENCES,
    HISTORY,
    KINDS,
    METRICS,
    NOTE_CHARS,
    NOTES,
    WARNINGS,
    RateView,
)
from crl.protocols import LoggedLine
from crl.types import Lift
from support.snapshots import Clock, complementary, evaluation, experience, group, started


def test_values_of_metrics_are_appended_and_missing_ones_are_none():
    monitor = started("grpo", "room")
    for step, loss in enumerate((0.5, None, float("nan"), "x", 10**400, 0.25), start=1):
        monitor.log(step, "train", {"actor/loss": loss, "actor/updates": 2})  # pyright: ignore
    monitor.log(7, "train", {"rollout/success": 1})
    s = monitor.snapshot()
    assert s.progress.step == 7
    assert s.series("train", "actor/loss").values == (0.5, None, None, None, None, 0.25), (
        "a line without the metric adds nothing"
    )
    assert s.series("train", "actor/updates").values == (2, 4, 6, 8, 10, 12)
    assert s.last("train", "rollout/success") == 1
    assert s.last("extractor", "extractor/loss") is None
    assert "extractor" not in s.metrics


def test_every_kind_of_line_is_folded():
    s = complementary()
    assert s.last("extractor", "extractor/updates") == 37
    assert (s.last("extractor", "time/train"), s.last("train", "time/train")) == (3.4, 4.2)
    assert (s.last("bank", "bank/size"), s.last("bank", "bank/size/maze")) == (370, 148)
    assert s.evaluations.sets["room/unseen"].rates["free"] == RateView(
        0.45,
        pytest.approx(0.39),  # pyright: ignore[reportArgumentType]
        pytest.approx(0.51),  # pyright: ignore[reportArgumentType]
        0.25,
    )
    assert s.evaluations.sets["room/unseen"].step == 37
    probe = s.evaluations.probes["room"]
    assert (probe.none, probe.wrong) == (0.25, 0.125)
    step = {"wait": 6.1, "submit": 0.4, "train": 4.2, "sync": 0.3, "bank": 2.0}
    assert dict(s.progress.seconds) == step | {"eval": 2.5, "probe": 0.7}
    assert s.last("train", "rollout/success/guided") == pytest.approx(0.3 + 37 / 150)
    assert [t.condition for t in s.episodes.members] == ["guided", "free"]


def test_memory_is_bounded():
    monitor = started("grpo", "room")
    monitor.log(1, "bank", {f"ops/{n}": n for n in range(2 * METRICS)})
    for step in range(3 * HISTORY):
        monitor.log(step, "train", {"rollout/success": step})
        monitor.log(step, f"kind {step}", {})
        monitor.note(f"note {step}\n\n{'x' * 9999}\nmore")
        monitor.note(f"warning: {step}")
    monitor.experiences([experience("x", lift=Lift(2, 0.5))] * 500)
    monitor.trajectories(group(3, "x" * 2 * EPISODE_CHARS))
    s = monitor.snapshot()
    success = s.series("train", "rollout/success")
    assert (len(success.values), success.last) == (HISTORY, 3 * HISTORY - 1)
    assert (len(s.metrics), len(s.metrics["bank"])) == (KINDS, METRICS)
    assert len(s.notes) == NOTES
    assert max(map(len, s.notes)) == NOTE_CHARS
    assert len(s.warnings) == WARNINGS
    assert s.warnings[-1] == f"{3 * HISTORY - 1}"
    assert len(s.experiences) == EXPERIENCES
    assert max(len(x.text) for x in s.episodes.members[0].segments) == EPISODE_CHARS + 1


def test_experiences_without_a_lift_are_left_out_and_the_best_lift_is_first():
    monitor = started("complementary", "room")
    lifts = {"bad": Lift(40, -0.5), "good": Lift(40, 0.5), "unknown": None}
    monitor.experiences([experience(name, lift=lift) for name, lift in lifts.items()])
    assert [e.text for e in monitor.snapshot().experiences] == ["good", "bad"]


def test_the_remaining_time():
    clock = Clock()
    monitor = started("grpo", "room", clock=clock)
    for step in (1, 2, 3):
        if step <= 2:
            assert monitor.snapshot().progress.remaining is None
        clock.now += 10
        monitor.log(step, "train", {})
    clock.now += 4
    progress = monitor.snapshot().progress
    assert (progress.elapsed, progress.remaining) == (34, 125 * 10 - 4)
    monitor.log(3, "eval", {"time/eval": 50.0})
    assert monitor.snapshot().progress.remaining == 125 * 10 - 4 + 50, "one evaluation is left"
    clock.now += 10_000
    assert monitor.snapshot().progress.remaining == 50


def test_a_resumed_run_goes_on_where_it_was():
    """Check the snapshot of a run of 128 steps after 3 of them, which took 10 s each."""
    clock = Clock()
    monitor = started("grpo", "room", clock=clock)
    lines = [LoggedLine(step, "train", 5 + 10 * step, {"actor/updates": 2}) for step in (1, 2, 3)]
    monitor.resumed([LoggedLine(0, "eval", 5.0, evaluation("room", 0.5)), *lines], 37.0)
    progress = monitor.snapshot().progress
    assert (progress.step, progress.elapsed) == (3, 37)
    assert progress.remaining == 125 * 10 - 2 + 2.5, "one evaluation is left"
    assert monitor.snapshot().evaluations.sets["room/seen"].step == 0
    clock.now += 8
    monitor.log(4, "train", {"actor/updates": 2})
    assert monitor.snapshot().progress.remaining == 124 * 10 + 2.5


def test_the_lines_of_a_resumed_run_end_at_the_checkpoint(tmp_path: Path):
    metrics = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 1, "kind": "train", "time": 1.5, "actor/loss": 0.25},
        {"step": 1, "kind": "extractor", "time": 2.5, "extractor/loss": 0.5},
    ]
    before, after = (f"{json.dumps(row)}\n" for row in rows)
    metrics.write_text(f"damaged\n{before}{after}")
    length = len(f"damaged\n{before}")
    assert logged_lines(metrics, length) == [LoggedLine(1, "train", 1.5, {"actor/loss": 0.25})]
    assert logged_lines(tmp_path / "missing", length) == []


def test_after_the_last_step_the_remaining_time_is_that_of_the_stages():
    clock = Clock()
    monitor = started("grpo", "room", clock=clock)
    for step in (127, 128):
        clock.now += 10
        monitor.log(step, "train", {})
    assert monitor.snapshot().progress.remaining == 0
    monitor.progress("evaluation", 0, 4)
    clock.now += 6
    monitor.progress("evaluation", 1, 4)
    assert monitor.snapshot().progress.remaining == 18

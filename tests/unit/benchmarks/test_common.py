"""Continuation of the runs of benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.paths import benchmark

common = benchmark("common")
OPTIONS = ["--tasks", "room"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with the checkpoint of its last step."""
    run = tmp_path / "run"
    manifest = run / "checkpoints" / "100" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    return run


def test_a_finished_run_is_not_repeated(run: Path) -> None:
    (run / "summary.json").write_text(json.dumps({"interrupted": False}), "utf-8")
    assert common.train_command(OPTIONS, run) is None


@pytest.mark.parametrize("summary", [None, {"interrupted": True}])
def test_a_run_that_was_interrupted_in_its_last_evaluation_continues(
    run: Path, summary: dict[str, bool] | None
) -> None:
    if summary:
        (run / "summary.json").write_text(json.dumps(summary), "utf-8")
    assert common.train_command(OPTIONS, run) == ["resume", str(run), "--plain"]


def test_the_remains_of_a_run_without_a_checkpoint_are_deleted(run: Path) -> None:
    (run / "checkpoints" / "100" / "manifest.json").unlink()
    command = ["train", *OPTIONS, "--run-dir", str(run), "--plain"]
    assert common.train_command(OPTIONS, run) == command
    assert not run.exists()

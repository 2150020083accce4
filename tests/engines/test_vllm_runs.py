"""Whole runs of `crl train` with vLLM engines and the bundled models, as processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-engines installs it", exc_type=ImportError)

import psutil  # pyright: ignore[reportMissingModuleSource]

SETS = (
    "engine.kind=vllm", "rollout.groups=4", "rollout.group_size=8", "extractor.batch=2", "tasks.room.eval.known=8", "tasks.room.eval.new=8",
    "tasks.room.eval.online=0", "eval.probe_every=0",
)  # fmt: skip


def metrics(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
    return [line for line in lines if line["kind"] == kind]


def command(run: Path, steps: int) -> list[str]:
    options = [part for setting in SETS for part in ("--set", setting)]
    return [sys.executable, "-m", "crl", "train", "--tasks", "room", "--plain", "--steps", str(steps), "--run-dir", str(run), *options]


def test_actor_and_extractor_train_on_what_vllm_samples(tmp_path: Path) -> None:
    run, steps = tmp_path / "run", 5
    done = subprocess.run(command(run, steps), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    trained = metrics(run, "train")
    assert trained[-1]["actor/version"] == sum(line["actor/updates"] > 0 for line in trained) > 0
    assert metrics(run, "extractor")
    assert all(line["rollout/errors"] == 0 for line in trained)
    probed = [line["actor/mismatch_kl"] for line in trained if "actor/mismatch_kl" in line]
    assert probed
    assert max(probed) < 1e-6, "trainer and engine are the same model"
    trajectories = [json.loads(line) for line in (run / "trajectories.jsonl").read_text("utf-8").splitlines()]
    versions = {version for t in trajectories for version in t["versions"] if version >= 0}
    assert versions <= set(range(steps + 1))
    assert len(versions) > 1


def test_engines_do_not_outlive_a_run_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path / "run", 3), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        try:
            engines = started(run)
        finally:
            run.kill()
    assert engines
    _, alive = psutil.wait_procs(engines, timeout=60)
    assert not alive


def started(run: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes of its first engine, which serves."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        below = psutil.Process(run.pid).children(recursive=True)
        if any("Worker" in " ".join(child.cmdline()) for child in below):
            time.sleep(20)  # until it watches
            return below
        time.sleep(0.5)
    return []

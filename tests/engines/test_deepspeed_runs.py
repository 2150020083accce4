"""Whole runs of `crl train` in subprocesses, with DeepSpeed ranks as learners."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open

from support.engine_runs import DEEPSPEED, command, metrics, train

pytest.importorskip(
    "deepspeed", reason="the extra crl[deepspeed] is not installed: make test-engines installs it"
)

DETERMINISTIC = ("run.deterministic=true", "rollout.max_staleness=0")


ROUNDING_METRICS = ("actor/masked_fraction", "actor/mismatch_explained")
"""Metrics that depend on how samples are packed into passes.

`masked_fraction` is a fraction of all positions, padding included. `mismatch_explained` describes a
mismatch that consists of rounding errors only.
"""


@pytest.mark.soak
def test_actor_and_extractor_train_and_are_saved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, *DEEPSPEED, "learner.zero=3", "extractor.batch=2", steps=12)
    steps = metrics(run, "train")
    assert steps[-1]["actor/version"] == sum(step["actor/updates"] > 0 for step in steps) > 0
    assert metrics(run, "extractor")
    for role in ("actor", "extractor"):
        saved = run / "checkpoints" / "12" / role
        assert (saved / "tokenizer.json").is_file()
        with (
            safe_open(saved / "model.safetensors", "pt") as model,
            safe_open(saved / "optimizer.safetensors", "pt") as optimizer,
        ):
            assert {
                f"{kind}.{name}"
                for name in model.keys()  # noqa: SIM118
                for kind in ("exp_avg", "exp_avg_sq")
            } == set(optimizer.keys())
            assert int(optimizer.metadata()["updates"]) > 0
    evaluated = subprocess.run(
        [sys.executable, "-m", "crl", "eval", str(run)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert evaluated.returncode == 0, evaluated.stderr


@pytest.mark.soak
def test_the_first_step_has_the_metrics_of_the_local_learner(tmp_path: Path) -> None:
    """Check that the metrics of the first step equal those of the local learner.

    Both runs sample the same tokens for the first step. Later steps diverge because of rounding.
    """
    train(tmp_path / "local", *DETERMINISTIC, steps=2, method="grpo")
    train(tmp_path / "ranks", *DETERMINISTIC, *DEEPSPEED, steps=2, method="grpo")
    alone, together = (metrics(tmp_path / name, "train") for name in ("local", "ranks"))
    for name, value in alone[0].items():
        if name.startswith("actor/") and name not in ROUNDING_METRICS:
            assert together[0][name] == pytest.approx(value, rel=1e-4, abs=1e-4), name
        elif name.startswith("rollout/"):
            assert together[0][name] == value, name
    assert together[1]["rollout/success"] == pytest.approx(alone[1]["rollout/success"], abs=0.2)


def ranks_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if b"crl.learners.deepspeed_worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (signal.SIGKILL, "was killed by SIGKILL"),
        pytest.param(signal.SIGSTOP, "hangs: no heartbeat", marks=pytest.mark.soak),
    ],
)
def test_a_lost_rank_ends_the_run_and_its_checkpoint_remains(
    tmp_path: Path, sent: signal.Signals, message: str
) -> None:
    run = tmp_path / "run"
    start = command(run, *DEEPSPEED, "run.checkpoint_every=1", steps=1000, method="grpo")
    with subprocess.Popen(
        start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 300
        while not (run / "checkpoints" / "1" / "manifest.json").is_file():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        ranks = ranks_of(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], sent)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert errors.startswith("error: rank 1 of 2 ")
    assert message in errors
    assert all(gone(rank) for rank in ranks)
    assert "RankTraceback: output of rank 1" in (run / "log.txt").read_text("utf-8")

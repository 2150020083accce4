"""Helpers that run `crl train` in a subprocess, with short runs and small evaluations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# Each step visits every place and waits for the lessons of the previous step. Entries are therefore
# used and credited within a few steps.
SMALL = (
    "rollout.groups=4", "rollout.group_size=8", "tasks.room.eval.seen=8",
    "tasks.room.eval.unseen=8", "tasks.room.eval.online_places=0", "eval.probe_every=0",
    "tasks.room.stream.places=4", "tasks.room.stream.permanent=4", "bank.queue_size=32",
)  # fmt: skip

DEEPSPEED = ("learner.kind=deepspeed", "learner.ranks=2", "learner.device=cpu")
VLLM = ("engine.kind=vllm",)


def command(run: Path, *sets: str, steps: int, method: str = "complementary") -> list[str]:
    options = [part for setting in (*SMALL, *sets) for part in ("--set", setting)]
    start = [
        sys.executable,
        "-m",
        "crl",
        "train",
        "--tasks",
        "room",
        "--plain",
        "--method",
        method,
        "--steps",
        str(steps),
    ]
    return [*start, "--run-dir", str(run), *options]


def train(run: Path, *sets: str, steps: int, method: str = "complementary") -> None:
    _complete(command(run, *sets, steps=steps, method=method))


def resume(run: Path, *sets: str, steps: int) -> None:
    start = [sys.executable, "-m", "crl", "resume", str(run), "--plain", "--steps", str(steps)]
    _complete([*start, *(part for setting in sets for part in ("--set", setting))])


def _complete(command: list[str]) -> None:
    """Run a command to its end, and check that it succeeds."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def metrics(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
    return [line for line in lines if line["kind"] == kind]


def trained_in_agreement(run: Path) -> None:
    """Check that both models were updated without errors and that trainer and engine agreed."""
    trained = metrics(run, "train")
    assert trained[-1]["actor/version"] == sum(line["actor/updates"] > 0 for line in trained) > 0
    assert metrics(run, "extractor")
    assert all(line["rollout/errors"] == 0 for line in trained)
    probed = [line["actor/mismatch_kl"] for line in trained if "actor/mismatch_kl" in line]
    assert probed
    assert max(probed) < 1e-6

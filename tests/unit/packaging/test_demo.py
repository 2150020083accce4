"""`make demo`: what it does in a new directory, after an interrupt, and after a finished run."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")

CRL = """\
#!/bin/sh
echo "crl $*" >> "$(dirname "$0")/calls"
"""
"""Program that records its calls and does nothing."""


def demo(folder: Path) -> list[str]:
    """Run the target with a `crl` that does nothing. Return the names of its commands."""
    program = folder / "venv" / "bin" / "crl"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(CRL)
    program.chmod(0o755)
    (folder / "venv" / "installed").touch()
    command = ["make", "--silent", "demo", f"VENV={folder / 'venv'}", f"DEMO={folder / 'demo'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    calls = (program.parent / "calls").read_text().splitlines()
    return [call.split()[1] for call in calls]


def checkpoint(folder: Path, step: int) -> None:
    path = folder / "demo" / "checkpoints" / str(step)
    path.mkdir(parents=True)
    (path / "manifest.json").touch()


def summary(folder: Path, *, interrupted: bool) -> None:
    text = json.dumps({"steps": 40, "interrupted": interrupted}, indent=1)
    (folder / "demo" / "summary.json").write_text(text)


def test_a_new_directory_is_trained(tmp_path: Path) -> None:
    assert demo(tmp_path) == ["train", "bank", "plot", "report"]


def test_a_run_without_a_checkpoint_starts_again(tmp_path: Path) -> None:
    (tmp_path / "demo" / "checkpoints").mkdir(parents=True)
    (tmp_path / "demo" / "config.json").touch()
    assert demo(tmp_path)[0] == "train"
    assert not (tmp_path / "demo").exists()


def test_a_run_without_a_final_evaluation_continues(tmp_path: Path) -> None:
    checkpoint(tmp_path, 40)
    assert demo(tmp_path)[0] == "resume"
    summary(tmp_path, interrupted=True)
    assert demo(tmp_path)[-4] == "resume"


def test_a_finished_run_is_shown(tmp_path: Path) -> None:
    checkpoint(tmp_path, 40)
    summary(tmp_path, interrupted=False)
    assert demo(tmp_path) == ["bank", "plot", "report"]

"""A live run under random faults for half an hour, and the exit codes that it expects.

CRL_SOAK_SECONDS sets another time.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.fault_soak import assert_as_undisturbed, can_mount, fault_soak, is_expected


@pytest.mark.soak
@pytest.mark.skipif(not can_mount(), reason="no permission to mount a tmpfs in a namespace")
def test_runs_under_faults_lose_nothing_and_learn_as_well(tmp_path: Path) -> None:
    seconds = float(os.environ.get("CRL_SOAK_SECONDS", "1800"))
    assert_as_undisturbed(fault_soak(tmp_path, seconds, "local"))


FULL = "error: /run: No space left on device. Free some disk space.\n"
WORKER = "error: the worker process was killed by SIGKILL\n"


@pytest.mark.parametrize(
    ("faults", "code", "output", "expected"),
    [
        ("disk kill", -9, "", True),
        ("kill", 1, "error: KeyError: 'x'\n", False),
        ("kill", -11, "", False),
        ("part", -9, "", False),
        ("interrupt", 130, "run x\n", True),
        ("twice", 1, "run x\nTraceback\n", False),
        ("terminate", -15, "run x\n", False),
        ("terminate", -15, "", True),
        ("part", 130, "run x\n", False),
        ("disk", 1, FULL, True),
        ("part", 1, FULL, False),
        ("part", 1, WORKER, True),
        ("disk interrupt", 1, FULL, True),
        ("disk", 1, FULL + "Exception ignored\n", False),
        ("interrupt", 2, "error: run.steps = 4: the run has completed 4 steps.\n", True),
        ("interrupt", 2, "error: run = x: has no complete checkpoint.\n", False),
        ("", 1, FULL, False),
        ("", 0, "run x\n", True),
    ],
)
def test_only_the_exit_code_of_a_fault_is_expected(
    faults: str, code: int, output: str, expected: bool
) -> None:
    assert is_expected(code, faults.split(), output, "local") is expected

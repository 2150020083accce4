"""Live runs with DeepSpeed ranks and with vLLM engines under random faults, ten minutes each.

CRL_SOAK_SECONDS sets another time.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.fault_soak import assert_as_undisturbed, can_mount, fault_soak


@pytest.mark.soak
@pytest.mark.skipif(not can_mount(), reason="no permission to mount a tmpfs in a namespace")
@pytest.mark.parametrize("stack", ["deepspeed", "vllm"])
def test_runs_under_faults_lose_nothing_and_learn_as_well(stack: str, tmp_path: Path) -> None:
    pytest.importorskip(stack, reason="the extra is not installed: make test-engines installs it")
    seconds = float(os.environ.get("CRL_SOAK_SECONDS", "600"))
    assert_as_undisturbed(fault_soak(tmp_path, seconds, stack))

"""A live run under random faults for half an hour.

CRL_SOAK_SECONDS sets another time.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.fault_soak import assert_as_undisturbed, can_mount, fault_soak


@pytest.mark.soak
@pytest.mark.skipif(not can_mount(), reason="no permission to mount a tmpfs in a namespace")
def test_runs_under_faults_lose_nothing_and_learn_as_well(tmp_path: Path) -> None:
    seconds = float(os.environ.get("CRL_SOAK_SECONDS", "1800"))
    assert_as_undisturbed(fault_soak(tmp_path, seconds, "local"))

"""Fixtures of tests of whole runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from crl.run.supervision import ending
from support import live_runs


@pytest.fixture(autouse=True, scope="module")
def restore_determinism() -> Iterator[None]:
    """Restore the process-wide determinism switch, which deterministic runs change."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give runs in this process time to end after a failure: their limit ends the process."""
    monkeypatch.setattr(ending, "FAILURE_LIMIT_S", 300.0)


@pytest.fixture
def mark() -> Iterator[str]:
    """Yield a mark of processes (see `support.live_runs`). Those that are left are killed."""
    name = live_runs.mark()
    yield name
    live_runs.kill_all(name)

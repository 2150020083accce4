"""Fixtures of tests of whole runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def restore_determinism() -> Iterator[None]:
    """Restore the process-wide determinism switch, which deterministic runs change."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)

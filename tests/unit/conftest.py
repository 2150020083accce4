"""Fixtures of the tests of banks: one finished run with a bank, and copies of the bank."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def bank_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a finished run with a bank. No test may change it."""
    from support.bank_commands import finished_run

    return finished_run(tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture
def bank_copy(bank_run: Path, tmp_path: Path) -> Path:
    """Return a copy of the bank of `bank_run`, which the test may change."""
    from support.bank_commands import copy_of

    return copy_of(bank_run, tmp_path)

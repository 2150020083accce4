"""Reflexion: defaults of other sections."""

from __future__ import annotations

import pytest

from crl.config import load


@pytest.mark.parametrize("preset", ["cpu", "gpu1", "node8"])
def test_the_bank_has_a_bound_in_every_preset(preset: str) -> None:
    options = {"method": "reflexion"}
    assert load(["room"], preset=preset, options=options).bank.max_entries == 16_000
    own = load(["room"], preset=preset, options=options, sets=["bank.max_entries=50"])
    assert own.bank.max_entries == 50

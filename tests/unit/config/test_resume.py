"""Settings of resumed runs."""

from __future__ import annotations

import pytest

from crl.config import load
from crl.config.resume import changes_evaluations, resumed_config
from crl.errors import ConfigError


def test_the_model_of_an_endpoint_is_fixed() -> None:
    sets = ["embedder.model=http://127.0.0.1:8000/v1", "embedder.name=one"]
    saved = load(["room"], sets=sets)
    with pytest.raises(ConfigError, match="cannot change from 'one' when a run is resumed"):
        resumed_config(saved, options={}, sets=["embedder.name=other"])


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("eval.temperature=0.5", True),
        ("tasks.room.eval.seen=3", True),
        ("eval.concurrency=3", False),
        ("rollout.env_timeout=5", False),
    ],
)
def test_settings_after_which_evaluations_are_not_compared(setting: str, expected: bool) -> None:
    _, changes = resumed_config(load(["room"]), options={"run.steps": 9}, sets=[setting])
    assert changes_evaluations(changes) == expected

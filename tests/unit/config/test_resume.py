"""Settings of resumed runs."""

from __future__ import annotations

import pytest

from crl.config import load
from crl.config.resume import Change, measured_settings, resumed_config
from crl.config.schema import RunConfig
from crl.errors import ConfigError


def resumed(saved: RunConfig, *sets: str, moved: bool = False) -> tuple[RunConfig, list[Change]]:
    return resumed_config(saved, options={}, sets=sets, has_moved=lambda *_: moved)


def test_the_model_of_an_endpoint_is_fixed() -> None:
    sets = ["embedder.model=http://127.0.0.1:8000/v1", "embedder.name=one"]
    saved = load(["room"], sets=sets)
    with pytest.raises(ConfigError, match="cannot change from 'one' in a run that continues"):
        resumed(saved, "embedder.name=other")


def test_a_model_may_move_but_not_change() -> None:
    saved = load(["room"])
    config, (change,) = resumed(saved, "actor.model=tiny-extractor", moved=True)
    assert (config.actor.model, change.key) == ("tiny-extractor", "actor.model")
    with pytest.raises(ConfigError, match="the checkpoint has the models of the run"):
        resumed(saved, "actor.model=tiny-extractor")


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("preset=gpu1", "other settings were based on the preset"),
        ("tasks.webshop.name=webshop", "webshop is not a task of this run .room."),
        ("tasks.webshop.max_turns=3", "webshop is not a task of this run .room."),
    ],
)
def test_settings_of_other_runs_are_refused(setting: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resumed(load(["room"]), setting)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("eval.temperature=0.5", True),
        ("tasks.room.eval.seen=3", True),
        ("tasks.room.max_turns=3", True),
        ("actor.max_context_tokens=512", True),
        ("eval.concurrency=3", False),
        ("rollout.env_timeout=5", False),
        ("retrieval.workers=2", False),
    ],
)
def test_settings_after_which_evaluations_are_not_compared(setting: str, expected: bool) -> None:
    saved = load(["room"])
    config, _ = resumed(saved, setting)
    assert (measured_settings(config) != measured_settings(saved)) == expected

"""Settings of resumed runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from crl.config import load
from crl.config.resume import Change, measured_settings, resumed_config
from crl.config.schema import RunConfig
from crl.errors import ConfigError
from crl.prompts import prompt


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


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("ask.enabled=true", True),
        ("ask.limit=2", True),
        ("critic.min_episodes=2", True),
        ("critic.max_response_tokens=8", True),
        ("retrieval.choice=diverse", True),
        ("retrieval.candidates=3", True),
        ("retrieval.margin=0.5", True),
        ("retrieval.min_similarity=0.5", True),
        ("retrieval.count_penalty=1", True),
        ("retrieval.recent_steps=3", True),
        ("bank.key_text_weight=0.5", True),
        ("ask.timeout=5", False),
        ("critic.warmup=2", False),
        ("retrieval.per=group", True),
        ("retrieval.trial_share=0.5", False),
        ("retrieval.batch=2", False),
        ("bank.max_per_goal=2", False),
        ("extractor.temperature=0.5", False),
    ],
)
def test_evaluations_with_experience_depend_on_what_agents_are_shown(
    setting: str, expected: bool
) -> None:
    key = setting.partition("=")[0]
    sets = ["critic.enabled=true", "retrieval.min_similarity=0.1"]
    sets += ["ask.enabled=true"] if key != "ask.enabled" else []
    sets += ["retrieval.choice=credit"] if key == "retrieval.trial_share" else []
    saved = load(["room"], sets=sets)
    assert measured_change(saved, setting) == ({key} if expected else set())
    alone = load(["room"], options={"method": "grpo"})
    if key in ("retrieval.margin", "bank.key_text_weight"):
        assert not measured_change(alone, setting), "its agents are shown no experience"


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        ("empo2", "empo2.tips=1"),
        ("reflexion", "reflexion.memory=1"),
        ("complementary", "complementary.show_record=true"),
    ],
)
def test_evaluations_depend_on_what_a_method_shows(method: str, setting: str) -> None:
    saved = load(["room"], options={"method": method})
    assert measured_change(saved, setting) == {setting.partition("=")[0]}


def test_the_keys_of_stored_tips_are_fixed() -> None:
    saved = load(["room"], options={"method": "empo2"})
    with pytest.raises(ConfigError, match="the tips in the bank have the keys of the run"):
        resumed(saved, "empo2.key=state")


def measured_change(saved: RunConfig, *sets: str) -> set[str]:
    """Return the keys by which evaluations differ after a resumption with other settings."""
    before, after = measured_settings(saved), measured_settings(resumed(saved, *sets)[0])
    return {key for key in {*before, *after} if before.get(key) != after.get(key)}


def test_the_request_for_predictions_is_measured(tmp_path: Path) -> None:
    """Role-Agent asks for predictions in evaluations, too."""
    full = ["tasks.room.rendering=full", "tasks.room.max_turns=50"]
    saved = load(["room"], options={"method": "role_agent"}, sets=full)
    request = tmp_path / "predict.txt"
    request.write_text("Predict {horizon} states.")
    assert measured_change(saved, f"prompts.predict={request}") == {"prompts.predict"}
    assert measured_change(saved, "role_agent.horizon=0.9") == {"role_agent.horizon"}
    assert not measured_change(saved, "role_agent.horizon=0.045"), "still two states"
    assert not measured_change(saved, "role_agent.prediction_weight=0.2"), "the same prompt"
    assert "role_agent.prediction_weight" in measured_change(
        saved, "role_agent.prediction_weight=0"
    )
    assert not measured_change(
        saved, "role_agent.matches=5", f"prompts.failure={_failure(tmp_path)}"
    )
    tiny = load(["room"], options={"method": "role_agent"})
    assert not measured_change(tiny, "role_agent.prediction_weight=0"), "tiny models do not predict"


def _failure(folder: Path) -> Path:
    """Return a file with another request to analyse a failure."""
    path = folder / "failure.txt"
    path.write_text(prompt("failure") + "\nBe brief.")
    return path

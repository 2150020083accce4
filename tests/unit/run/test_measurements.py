"""What evaluations depend on: the prompts that agents read, and settings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crl.config import load
from crl.errors import ConfigError
from crl.planning import tasks
from crl.planning.preflight import require_prompts_used
from crl.prompts import FOLDER
from crl.run.assemble import _measured_settings
from crl.run.loop import Measurements

FULL = ["tasks.room.rendering=full", "actor.profile=full", "extractor.profile=full"]
TAGGED = ["tasks.search_qa.rendering=full", *FULL[1:]]


def measured(task: str, *sets: str, method: str = "complementary") -> dict[str, Any]:
    """Return the settings that evaluations depend on."""
    config = load([task], options={"method": method}, sets=sets)
    return _measured_settings(config, tasks.specs(config))


@pytest.mark.parametrize(
    ("task", "sets", "method", "prompts"),
    [
        ("room", FULL, "grpo", {"actor"}),
        ("room", FULL, "complementary", {"actor", "experience"}),
        ("room", [*FULL, "ask.enabled=true"], "complementary", {"actor", "experience", "ask"}),
        (
            "room", [*FULL, "critic.enabled=true"], "complementary",
            {"actor", "experience", "critic"},
        ),
        ("room", FULL, "role_agent", {"actor", "predict"}),
        ("search_qa", TAGGED, "grpo", {"actor_tags"}),
        ("search_qa", TAGGED, "complementary", {"actor_tags", "experience"}),
        ("room", [], "complementary", set()),
    ],
)  # fmt: skip
def test_the_prompts_that_agents_read_are_measured(
    task: str, sets: list[str], method: str, prompts: set[str], tmp_path: Path
) -> None:
    before = measured(task, *sets, method=method)
    read = {key for key, text in before.items() if key.startswith("prompts.") and text}
    assert read == {f"prompts.{name}" for name in prompts}
    for name in prompts:
        file = tmp_path / f"{name}.txt"
        file.write_text((FOLDER / file.name).read_text("utf-8") + "More.\n", "utf-8")
        after = measured(task, *sets, f"prompts.{name}={file}", method=method)
        assert {key for key in before if before[key] != after[key]} == {f"prompts.{name}"}


def test_a_prompt_of_other_agents_is_refused_with_the_one_that_they_read(tmp_path: Path) -> None:
    for task, sets, wrong, right in (
        ("room", FULL, "actor_tags", "actor"),
        ("search_qa", TAGGED, "actor", "actor_tags"),
    ):
        require_prompts_used(load([task], sets=[*sets, f"prompts.{right}=a.txt"]))
        with pytest.raises(ConfigError, match=rf"or set prompts\.{right}, which the agents of"):
            require_prompts_used(load([task], sets=[*sets, f"prompts.{wrong}=a.txt"]))
    config = load(["room"], options={"method": "role_agent"}, sets=[*FULL, "prompts.experience=a"])
    with pytest.raises(ConfigError, match="than role_agent, whose agents read no experience"):
        require_prompts_used(config)


def test_results_with_another_prompt_are_not_loaded() -> None:
    parts: Any = SimpleNamespace()
    now = Measurements(parts, parts, {"a": 1, "prompts.actor": "x", "prompts.experience": "y"})
    state = {"evaluations": [], "probes": []}
    for settings, changed in (
        ({"a": 1, "prompts.actor": "x", "prompts.experience": "y"}, []),
        ({"a": 1, "prompts.actor": "x", "prompts.experience": "z"}, ["prompts.experience"]),
        ({"a": 1, "prompts.actor": "z"}, ["prompts.actor"]),
        ({"a": 1, "b": None}, ["b"]),
        ({"a": 1, "prompts.actor": "x"}, []),  # a checkpoint of an older version
        ({}, []),
    ):
        assert now.load_state({"settings": settings, **state}) == changed


@pytest.mark.parametrize(
    ("sets", "method"),
    [
        (["ask.enabled=true"], "complementary"),
        ([*FULL, "ask.enabled=true"], "complementary"),
        ([*FULL, "critic.enabled=true"], "complementary"),
        ([*FULL, "role_agent.prediction_weight=0"], "role_agent"),
    ],
)
def test_a_switch_changes_values_and_no_keys(sets: list[str], method: str) -> None:
    """A key that a checkpoint lacks is not compared."""
    off = measured("room", *[text for text in sets if text in FULL], method=method)
    on = measured("room", *sets, method=method)
    parts: Any = SimpleNamespace()
    state = Measurements(parts, parts, off).state()
    assert off.keys() == on.keys()
    assert Measurements(parts, parts, on).load_state(state)

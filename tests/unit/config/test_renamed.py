"""Renamed settings: their old keys are refused, and translated in saved configs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from crl.config import dump, load, load_saved
from crl.config.reference import explained
from crl.config.renamed import RENAMED_KEYS
from crl.config.validate import dotted_keys
from crl.errors import ConfigError


def error(*sets: str, tasks: Sequence[str] = ("room",), preset: str = "cpu") -> str:
    with pytest.raises(ConfigError) as caught:
        load(tasks, preset=preset, sets=sets)
    return str(caught.value)


def test_no_old_key_is_a_setting_and_every_current_key_is() -> None:
    keys = set(dotted_keys())
    assert not keys & RENAMED_KEYS.keys()
    assert keys >= set(RENAMED_KEYS.values())
    assert all(
        old.rpartition(".")[0] == current.rpartition(".")[0]
        for old, current in RENAMED_KEYS.items()
    ), "a key keeps its section"


@pytest.mark.parametrize("old", RENAMED_KEYS)
def test_an_old_key_is_refused_with_the_current_one(old: str) -> None:
    key, current = (name.replace("NAME", "room") for name in (old, RENAMED_KEYS[old]))
    assert error(f"{key}=8") == f"{key} = 8: was renamed. Use {current}."


def test_an_old_key_in_a_preset_is_refused(tmp_path: Path) -> None:
    (preset := tmp_path / "mine.toml").write_text("[compact.bank]\ncap = 4\n")
    assert error(preset=str(preset)) == (
        f"bank.cap = 4: was renamed (from {preset}). Use bank.max_per_goal."
    )


def test_an_old_key_in_the_file_of_a_task_is_refused(tmp_path: Path) -> None:
    base = 'env = "room"\nrendering = "full"\nmax_response_tokens = 8\n'
    for text, key, current in (
        ("turns = 5\n", "turns = 5", "max_turns"),
        ("max_turns = 5\n[eval]\nknown = 3\n", "eval.known = 3", "eval.seen"),
        ("max_turns = 5\n[compact]\novertime = 2\n", "compact.overtime = 2", "compact.extra_turns"),
        ("max_turns = 5\n[compact.eval]\nnew = 2\n", "compact.eval.new = 2", "compact.eval.unseen"),
    ):
        (task := tmp_path / "mine.toml").write_text(base + text)
        assert error(tasks=[str(task)]) == (
            f"tasks.mine.{key}: was renamed (from {task}). Use tasks.mine.{current}."
        )


@pytest.mark.parametrize("key", ["bank.cap", "tasks.NAME.eval.online"])
def test_an_old_key_is_explained_by_the_current_one(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        explained(key)
    assert str(caught.value) == f"KEY = '{key}': was renamed. Use {RENAMED_KEYS[key]}."


def test_the_config_of_an_earlier_run_can_be_read(tmp_path: Path) -> None:
    config = load(
        ["room", "webshop"],
        sets=["bank.max_entries=90", "rollout.env_timeout=7.0", "tasks.room.eval.seen=3"],
    )
    dump(config, path := tmp_path / "config.json")
    saved = json.loads(path.read_text("utf-8"))
    for old, current in RENAMED_KEYS.items():
        for task in config.tasks:
            rename(saved["config"], current.replace("NAME", task), old.rpartition(".")[2])
    assert saved["config"]["tasks"]["room"]["eval"]["known"] == 3
    path.write_text(json.dumps(saved), "utf-8")
    assert load_saved(tmp_path).config == config


def rename(table: dict[str, Any], key: str, name: str) -> None:
    """Rename the last part of a dotted key, if the key exists."""
    *path, last = key.split(".")
    for part in path:
        table = table[part]
    if last in table:
        table[name] = table.pop(last)

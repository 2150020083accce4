"""Commands of runs whose settings have changed since."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from crl.config.command import changes_since, repeated
from crl.config.load import load
from crl.config.resume import changed_config
from crl.config.schema import RunConfig

COMMAND = "crl train --tasks room --method grpo --set rollout.groups=4"
LOADED = {"options": {"method": "grpo", "run.seed": 3}, "sets": ["rollout.groups=4"]}


def changed(**settings: object) -> RunConfig:
    """Return the config of `COMMAND` with other settings; __ stands for a dot."""
    options = {key.replace("__", "."): value for key, value in settings.items()}
    return changed_config(load(["room"], **LOADED), options=options, sets=())[0]


def test_an_unchanged_run_is_repeated_by_its_command() -> None:
    assert changes_since(COMMAND, changed()) == []
    assert repeated(COMMAND, changed()) == COMMAND


@pytest.mark.parametrize(
    "command",
    ["", "crl train", "crl train --tasks gone.toml", "'", pytest.param("x " * 10**7, id="long")],
)
def test_an_unknown_command_is_not_changed(command: str) -> None:
    assert changes_since(command, changed()) is None
    assert repeated(command, changed(run__steps=7)) == command


@pytest.mark.parametrize(
    ("command", "again"),
    [
        (COMMAND, f"{COMMAND} --steps 7"),
        (
            COMMAND.replace(" --set", " --steps 5 --set"),
            COMMAND.replace(" --set", " --steps 7 --set"),
        ),
        (f"{COMMAND} --set run.steps=5", f"{COMMAND} --set run.steps=5 --set run.steps=7"),
    ],
)
def test_an_extended_run_is_repeated_with_all_its_steps(command: str, again: str) -> None:
    assert repeated(command, changed(run__steps=7)) == again


def test_texts_that_look_like_other_values_are_quoted() -> None:
    for text in ("12", "true", "[x", "a b", "plain"):
        config = changed(monitor__wandb=text)
        again = repeated(COMMAND, config)
        assert changes_since(again, config) == [], again
    assert repeated(COMMAND, changed(gpus=None)) == COMMAND


def test_changed_settings_are_repeated(tiny_actor: Path) -> None:
    config = changed(eval__temperature=0.5, actor__model=str(tiny_actor), monitor__tensorboard=True)
    again = repeated(COMMAND, config)
    assert f"--set actor.model={tiny_actor}" in again
    assert changes_since(again, config) == []
    assert len(shlex.split(again)) == len(shlex.split(COMMAND)) + 6


def test_a_command_with_a_moved_model_is_repeated(tiny_actor: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    command = f"{COMMAND} --set actor.model={moved}"
    config = changed(actor__model=str(tiny_actor), run__steps=7)
    again = repeated(command, config)
    assert again == f"{command} --steps 7 --set actor.model={tiny_actor}"
    assert changes_since(again, config) == []

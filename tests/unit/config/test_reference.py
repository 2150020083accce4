"""Reference of the settings: `crl config` and docs/configuration.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from crl.cli.main import app
from crl.config.reference import Change, Setting, explained, markdown, settings
from crl.config.validate import dotted_keys
from support.paths import ROOT

PAGE = ROOT / "docs" / "configuration.md"


def crl(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["config", *arguments])


def test_the_page_in_docs_is_up_to_date() -> None:
    stale = "run: crl config reference > docs/configuration.md"
    assert PAGE.read_text("utf-8") == markdown(), stale
    assert crl("reference").stdout == markdown()


def test_every_setting_has_a_type_a_default_and_a_description() -> None:
    assert [setting.key for setting in settings()] == list(dotted_keys())
    assert not [setting.key for setting in settings() if "any" in setting.type.split()]
    assert not [setting.key for setting in settings() if not setting.description]


def test_explain_a_setting() -> None:
    setting, changes = explained("extractor.clip_low")
    assert (setting.type, setting.default) == ("number > 0 and < 1", "0.1")
    assert changes == [Change("preset cpu, compact profile", "0.99")]
    printed = crl("explain", "extractor.clip_low").stdout
    assert printed.splitlines()[:3] == [
        "extractor.clip_low",
        "  type     number > 0 and < 1",
        "  default  0.1",
    ]
    assert printed.splitlines()[-2] == "set by"
    assert printed.splitlines()[-1].split() == ["preset", "cpu,", "compact", "profile", "0.99"]


def test_settings_of_a_task_can_be_named_by_any_task() -> None:
    setting, changes = explained("tasks.room.max_turns")
    assert isinstance(setting, Setting)
    assert setting.key == "tasks.NAME.max_turns"
    assert setting.default == "none, every task file sets it"
    assert explained("tasks.room.name")[0].default == "name of the task file"
    assert Change("task room, compact profile", "4") in changes


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("actor.clip_lo", "KEY = 'actor.clip_lo': is not a setting. Did you mean actor.clip_low?"),
        ("eval", "KEY = 'eval': is a section, not a setting. Give one of: eval.temperature, "),
    ],
)
def test_an_unknown_key_is_one_line_with_a_remedy(key: str, message: str) -> None:
    result = crl("explain", key)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_show_names_the_origin_of_every_value() -> None:
    printed = crl("show", "--tasks", "room", "--set", "rollout.groups=3").stdout
    rows = dict(line.split("  # ") for line in printed.splitlines())
    origins = {key.strip(): origin for key, origin in rows.items()}
    assert origins["rollout.groups = 3"] == "--set rollout.groups"
    assert origins["extractor.batch = 32"] == "cpu.toml"
    assert origins["tasks.room.max_turns = 4"] == "room.toml"
    assert origins["actor.temperature = 1.0"] == "default"


def test_settings_of_an_own_method_are_shown_and_explained(tmp_path: Path) -> None:
    (path := tmp_path / "own.py").write_text(
        "from crl.config.method import MethodSection, MethodSpec\n"
        "class Own(MethodSection):\n"
        "    cost: float = 0.5\n"
        '    """Cost of a turn."""\n'
        "SPEC = MethodSpec('own', print, Own)\n"
    )
    method = ("--method", f"{path}:SPEC")
    explanation = crl("explain", "own.cost", *method).stdout
    assert "own.cost\n" in explanation
    assert "default  0.5" in explanation
    assert "Cost of a turn." in explanation
    lines = crl("show", "--tasks", "room", "--set", "own.cost=0.25", *method).stdout.splitlines()
    assert [line.split() for line in lines if line.startswith("own.")] == [
        ["own.cost", "=", "0.25", "#", "--set", "own.cost"]
    ]


def test_defaults_of_methods_are_changes_of_a_setting() -> None:
    _, found = explained("retrieval.choice")
    assert Change("method empo2", '"reward"') in found

"""Shell completions, as the scripts of bash, zsh and fish ask for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from crl.cli.main import app
from crl.config import catalog
from crl.config.method import BUNDLED_METHODS
from crl.config.reference import settings
from crl.report.figures import FIGURES
from support.paths import python_environment

COMMAND = [sys.executable, "-m", "crl"]


def completions(line: str) -> list[str]:
    """Return what bash is offered at the end of a line."""
    words = line.split(" ")
    environment = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    variables = {**environment, "_CRL_COMPLETE": "complete_bash"}
    result = CliRunner().invoke(app, [], prog_name="crl", env=variables)
    assert result.exit_code == 0, result.output
    return result.stdout.split()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_run(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "config.json").touch()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("crl tr", ["train"]),
        ("crl bank ex", ["export"]),
        ("crl train --see", ["--seed"]),
        ("crl train --preset no", ["node8"]),
        ("crl train --tasks roo", ["room"]),
        ("crl train --tasks room,web", ["room,webshop"]),
        ("crl train --tasks room,roo", []),
        ("crl play ro", ["room"]),
        ("crl play room --split u", ["unseen"]),
        ("crl bank ls --sort c", ["credit"]),
        ("crl eval --experience ba", ["bank"]),
        ("crl export --role e", ["extractor"]),
        ("crl models get s", ["smollm2"]),
        ("crl sft --role e", ["extractor"]),
        ("crl sft --from dr", ["drills"]),
        ("crl sft --model tiny-a", ["tiny-actor"]),
        ("crl config explain rollout.group", ["rollout.groups", "rollout.group_size"]),
        ("crl train --set rollout.group", ["rollout.groups=", "rollout.group_size="]),
        ("crl train --set tasks.webshop.max_t", ["tasks.webshop.max_turns="]),
        ("crl train --tasks a/mine.toml --set tasks.mine.max_t", ["tasks.mine.max_turns="]),
        ("crl train --tasks room --set tasks.webshop.max_t", []),
        ("crl train --set rollout.groups=", []),
        ("crl train --run-dir ", []),
    ],
)
def test_values(line: str, expected: list[str], here: Path) -> None:
    assert completions(line) == expected


def test_all_values_are_offered(here: Path) -> None:
    assert completions("crl train --method ") == [*BUNDLED_METHODS]
    assert completions("crl doctor --preset ") == catalog.presets()
    assert completions("crl plot runs/mine --what ") == [*FIGURES]
    assert completions("crl bank export runs/mine --format ") == ["jsonl", "markdown", "skills"]
    assert completions("crl config show --tasks ") == catalog.tasks()
    keys = [setting.key for setting in settings()]
    assert completions("crl config explain ") == keys
    offered = {word.removesuffix("=") for word in completions("crl train --tasks NAME --set ")}
    assert offered == set(keys)


def test_run_directories(here: Path) -> None:
    make_run(here / "runs" / "first")
    make_run(here / "runs" / "room+webshop-grpo-20260101")
    make_run(here / "other")
    (here / "runs" / "notes").mkdir()
    (here / "bank").mkdir()
    (here / "bank" / "bank.sqlite").touch()
    of_folder = ["runs/first", "runs/room+webshop-grpo-20260101"]
    assert completions("crl resume ") == ["bank", "other", *of_folder]
    assert completions("crl resume r") == of_folder
    assert completions("crl bank show runs/f") == ["runs/first"]
    assert completions("crl compare runs/first o") == ["other"]
    assert completions(f"crl replay {here}/runs/fi") == [f"{here}/runs/first"]
    assert completions("crl eval b") == ["bank"]
    assert completions("crl learn --from runs/x") == []
    assert completions("crl fork missing/") == []
    assert completions("crl serve r") == ["runs", *of_folder]
    assert completions("crl serve runs/f") == ["runs/first"]


@pytest.mark.parametrize(
    "name", ["a b", "$(touch x)", "a`touch x`", "\\$(touch x)", "a;b", "a'b", 'a"b', "a\nb", "*"]
)
def test_names_that_a_shell_would_evaluate_are_not_offered(name: str, here: Path) -> None:
    make_run(here / "runs" / name)
    make_run(here / "runs" / "good")
    assert completions("crl resume runs/") == ["runs/good"]


def test_a_folder_without_permission_is_left_out(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(here / "good")

    def refuse(path: str) -> list[str]:
        if path == "runs/":
            raise PermissionError(path)
        return listdir(here)

    listdir = os.listdir
    monkeypatch.setattr("crl.cli.completion.os.listdir", refuse)
    assert completions("crl resume ") == ["good"]


def test_every_preset_task_and_setting_can_be_completed() -> None:
    """Options of the same name are completed in every command. Paths are left to the shell."""
    completed = {"tasks", "preset", "method", "sets", "run", "runs", "key", "subject", "source"}
    missing = [
        f"{name} {parameter.name}"
        for name, command in commands(get_command(app))
        for parameter in command.params
        if parameter.name in completed and parameter._custom_shell_complete is None
    ]
    assert missing == []


def commands(command: Any, name: str = "crl") -> Iterator[tuple[str, Any]]:
    """Yield the name of every command, and the command."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for child, below in command.commands.items():
        yield from commands(below, f"{name} {child}")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"_CRL_COMPLETE": "complete_bash", "COMP_WORDS": "crl ta", "COMP_CWORD": "1"}, "tasks\n"),
        (
            {"_CRL_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "crl play ro"},
            "_arguments '*: :((\"room\"))'\n",
        ),
        (
            {
                "_CRL_COMPLETE": "complete_fish",
                "_TYPER_COMPLETE_ARGS": "crl play ro",
                "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            },
            "room\n",
        ),
    ],
    ids=["bash", "zsh", "fish"],
)
def test_the_protocol_of_each_shell(variables: dict[str, str], expected: str) -> None:
    done = subprocess.run(
        COMMAND, env=python_environment(**variables), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


@pytest.mark.parametrize("line", ["crl bank ", "crl train --set ", "crl sft --model t"])
def test_completions_import_nothing_heavy(line: str) -> None:
    code = (
        "import sys\nfrom crl.cli.main import main\ntry: main()\n"
        "finally: print('heavy', sorted({'torch', 'transformers', 'nle', 'numpy', 'rich'} "
        "& set(sys.modules)))"
    )
    variables = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    environment = python_environment(**variables, _CRL_COMPLETE="complete_bash")
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    *offered, heavy = done.stdout.splitlines()
    assert (done.returncode, heavy, bool(offered)) == (0, "heavy []", True)


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_completes_with_the_shown_script(here: Path) -> None:
    """A run's directory, and an option, completed by bash itself."""
    make_run(here / "runs" / "first")
    program = here / "bin" / "crl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m crl "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    script = (
        'eval "$(crl --show-completion bash)"\n'
        "COMP_WORDS=(crl resume ru); COMP_CWORD=2; _crl_completion crl; echo ${COMPREPLY[@]}\n"
        "COMP_WORDS=(crl train --ste); COMP_CWORD=2; _crl_completion crl; echo ${COMPREPLY[@]}\n"
    )
    variables = {"PATH": path, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=python_environment(**variables),
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("runs/first\n--steps\n", "")

"""`crl new-task`: the files that it writes, and the commands that it prints."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from crl.cli.main import app
from crl.cli.new_task import write_task
from crl.cli.play import PlayableTask
from crl.config import catalog
from crl.envs.base import Rendering
from crl.errors import ConfigError
from support.paths import ROOT

FILES = {"my_field.toml", "my_field.py", "test_my_field.py"}


def crl(*args: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, list(args), input=stdin)


def printed_commands(output: str) -> list[list[str]]:
    """Return the words of each command under `next commands:`."""
    return [shlex.split(line) for line in output.partition("next commands:\n")[2].splitlines()]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ── the files ─────────────────────────────────────────────────────────────────────────────────────


def test_three_files_are_written_to_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = crl("new-task", "my_field")
    assert (result.exit_code, result.stderr) == (0, "")
    assert {Path(line.removeprefix("wrote ")) for line in result.output.splitlines()[:3]} == {
        Path("my_field") / name for name in FILES
    }
    assert names_in(tmp_path) == {"my_field"}
    assert names_in(tmp_path / "my_field") == FILES
    for path in (tmp_path / "my_field").iterdir():
        text = path.read_text("utf-8")
        assert "my_field" in text
        assert not any(part in text for part in ("$", "NAME"))
        assert max(map(len, text.splitlines())) <= 100


def test_the_printed_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    result = crl("new-task", "my_field", "--dir", "my tasks/new")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.output.splitlines()[0] == "created my tasks/new"
    play, scripted, tests, train = printed_commands(result.output)
    assert (play[:2], tests[0], train[:2]) == (["crl", "play"], "pytest", ["crl", "train"])

    played = crl(*play[1:], stdin="I do not know.\nnorth\n")
    assert (played.exit_code, played.stderr) == (0, "")
    assert "That is not an action, and nothing happened." in played.output
    assert played.output.rstrip().endswith("stopped")
    assert "won in " in crl(*scripted[1:]).output

    planned = crl(*train[1:])
    assert (planned.exit_code, planned.stderr) == (0, "")
    assert "my_field  compact rendering: the actor has the compact" in planned.output
    assert names_in(tmp_path) == {"my tasks"}, "a dry run writes nothing"

    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests[1:]],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize("rendering", ["full", "compact"])
def test_the_scripted_player_wins_every_unseen_place(tmp_path: Path, rendering: Rendering):
    write_task("my_field", tmp_path)
    task = PlayableTask.load(str(tmp_path / "my_field" / "my_field.toml"), rendering)
    assert task.config.rendering == rendering
    assert task.config.max_turns == task.spec.turns
    episodes = list(task.episodes("unseen", 200, 0, task.scripted_player(0), lambda text: None))
    assert all(episode.success for episode in episodes)
    assert max(len(episode.actions) for episode in episodes) == task.config.max_turns
    assert len({episode.observations[-1] for episode in episodes}) == 24, "all cells but the start"


def test_the_table_compact_holds_the_settings_of_tiny_models(tmp_path: Path):
    write_task("my_field", tmp_path)
    path = str(tmp_path / "my_field" / "my_field.toml")
    full, compact = (PlayableTask.load(path, name).config for name in ("full", "compact"))
    assert (full.max_response_tokens, compact.max_response_tokens) == (1024, 4)
    assert compact.model_dump(exclude={"rendering", "max_response_tokens"}) == full.model_dump(
        exclude={"rendering", "max_response_tokens"}
    )


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name",
    [
        "",
        "My_field",
        "my-field",
        "my field",
        "1st",
        "_field",
        "fëld",
        "a/b",
        "..",
        "field\n",
        "class",
    ],
)
def test_a_name_must_be_an_identifier_in_lower_case(tmp_path: Path, name: str):
    with pytest.raises(ConfigError) as caught:
        write_task(name, tmp_path)
    assert str(caught.value) == (
        f"NAME = {name!r}: is not a Python identifier in lower case. Start with a letter, continue "
        "with letters, digits or underscores, and use no keyword of Python. Example: hidden_number."
    )
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize("name", catalog.tasks())
def test_the_names_of_bundled_tasks_are_refused(tmp_path: Path, name: str):
    result = crl("new-task", name, "--dir", str(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: NAME = '{name}': is the name of a bundled task. ")
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("overall", "is reserved for the aggregate over all tasks."),
        ("random", "is the name of a Python module, which random.py would hide"),
        ("sys", "is the name of a Python module"),
        ("pytest", "is the name of a Python module"),
    ],
)
def test_reserved_names_are_refused(tmp_path: Path, name: str, reason: str):
    result = crl("new-task", name, "--dir", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: NAME = '{name}': {reason}")
    assert result.stderr.count("\n") == 1
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize("existing", sorted(FILES))
def test_existing_files_are_never_overwritten(tmp_path: Path, existing: str):
    (tmp_path / "my_field").mkdir()
    mine = tmp_path / "my_field" / existing
    mine.symlink_to("gone")  # even a link to no file
    result = crl("new-task", "my_field", "--dir", str(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: NAME = 'my_field': {mine} exists, and crl new-task overwrites no file. "
        "Choose another name or another --dir, or remove the file.\n"
    )
    assert names_in(tmp_path / "my_field") == {existing}
    mine.unlink()
    mine.write_text("mine")
    assert crl("new-task", "my_field", "--dir", str(tmp_path)).exit_code == 2
    assert mine.read_text() == "mine"


def test_a_folder_with_other_files_is_used(tmp_path: Path):
    (tmp_path / "my_field").mkdir()
    (tmp_path / "my_field" / "notes.txt").write_text("mine")
    write_task("my_field", tmp_path)
    assert names_in(tmp_path / "my_field") == {*FILES, "notes.txt"}


def test_a_directory_that_crl_train_cannot_name_is_refused(tmp_path: Path):
    result = crl("new-task", "my_field", "--dir", str(tmp_path / "a,b"))
    assert result.exit_code == 2
    assert "contains a comma, which separates the tasks of crl train --tasks A,B." in result.stderr
    assert names_in(tmp_path) == set()


def test_a_file_in_place_of_the_directory_is_one_line(tmp_path: Path):
    (tmp_path / "tasks").write_text("")
    result = crl("new-task", "my_field", "--dir", str(tmp_path / "tasks"))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1

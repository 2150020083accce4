"""`crl tasks` and `crl play`. A person who plays sees the same texts as an actor."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crl.cli.main import app
from crl.cli.play import HumanPlayer, PlayableTask
from crl.config import catalog
from crl.envs import registry
from crl.envs.base import Runtime
from crl.planning import installed
from support.paths import ROOT, WEBSHOP_DATA

DOORS = str(ROOT / "examples" / "doors" / "doors.toml")


def crl(*args: str, stdin: str = ""):
    return CliRunner().invoke(app, list(args), input=stdin)


# ── crl tasks ─────────────────────────────────────────────────────────────────────────────────────


def test_every_shipped_task_and_mixture_is_listed():
    lines = crl("tasks").output.splitlines()
    assert lines[0].split() == ["task", "environment", "hosting", "turns"]
    (room,) = (line for line in lines if line.startswith("room "))
    assert room.split() == ["room", "room", "threads", "30", "full,", "4", "compact"]
    (three,) = (line for line in lines if line.startswith("three "))
    assert three.endswith("mixture of room, webshop, alfworld")
    listed = json.loads(crl("tasks", "--json").output)
    assert (
        sorted([*(task["name"] for task in listed["tasks"]), *listed["mixtures"]])
        == catalog.tasks()
    )
    assert {
        "name": "room",
        "environment": "room",
        "hosting": "threads",
        "turns": {"full": 30, "compact": 4},
        "problem": None,
        "data": None,
    } in (listed["tasks"])


def line_of(task: str) -> str:
    return next(line for line in crl("tasks").output.splitlines() if line.startswith(f"{task} "))


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    spec = replace(registry.get_spec("room"), runtime=Runtime(extra="no_such_extra"))
    monkeypatch.setattr(installed, "get_spec", lambda name: spec)
    assert line_of("room").endswith(
        "it needs the extra 'no_such_extra', which is not installed. "
        "Run pip install 'crl[no_such_extra]'"
    )


def test_which_data_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for variable in ("WEBSHOP_DATA", "ALFWORLD_DATA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert line_of("webshop").endswith(
        "a generated catalogue of 1,000 products; "
        "the official data is used when WEBSHOP_DATA names its folder"
    )
    assert line_of("alfworld").endswith(
        "generated games of the same domain; "
        "the official ones are played when ALFWORLD_DATA names their folder"
    )
    games = tmp_path / ".cache" / "alfworld"
    for split in ("train", "valid_seen", "valid_unseen"):
        trial = games / "json_2.1.1" / split / "pick_and_place_simple-Mug-None-Desk-308" / "trial_1"
        trial.mkdir(parents=True)
        assert (
            f"ALFWORLD_DATA = {str(games)!r}: "
            f"contains no playable game in json_2.1.1/{split}" in line_of("alfworld")
        )
        (trial / "game.tw-pddl").write_text('{"solvable": true}')
    assert line_of("alfworld").endswith(f"the official games in {games}"), (
        "the default folder of alfworld-download"
    )
    monkeypatch.setenv("WEBSHOP_DATA", str(WEBSHOP_DATA))
    assert line_of("webshop").endswith(f"the official data in {WEBSHOP_DATA}")
    monkeypatch.setenv("WEBSHOP_DATA", str(games))
    assert (
        f"WEBSHOP_DATA = {str(games)!r}: contains no items_shuffle_1000.json. Get the files"
        in line_of("webshop")
    )
    (games / "items_shuffle_1000.json").touch()
    assert "contains no items_ins_v2_1000.json. Get" in line_of("webshop")


def test_listing_imports_no_library_of_an_environment():
    code = (
        "import sys\nfrom crl.cli.main import main\ntry: main()\n"
        "finally: print(sorted({'torch', 'transformers', 'nle', 'minihack', 'textworld', "
        "'gem', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "tasks"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


# ── crl play ──────────────────────────────────────────────────────────────────────────────────────


def test_a_person_sees_the_texts_of_an_actor():
    shown: list[str] = []
    playable = PlayableTask.load("room", "full")
    actions = iter(["<think>perhaps west</think>  north", "up"])

    def read() -> str:
        try:
            return next(actions)
        except StopIteration:
            raise EOFError from None

    with pytest.raises(EOFError):
        list(playable.episodes("unseen", 1, 0, HumanPlayer(read), shown.append))
    assert shown[0].startswith(
        "You play a text game, one action a turn, until the goal is reached or 30 turns are over."
    )
    assert shown[1] == "Room: the amber arch. Reach the stairs down (>)."
    assert shown[2].startswith("Map:")
    assert "not an action" not in shown[3], "thoughts are not sent to the game"
    assert shown[4].startswith("That is not an action, and nothing happened.")
    assert len(shown) == 5


def test_playing_through_a_pipe():
    result = crl(
        "play", DOORS, "--rendering", "compact", "--episodes", "2", stdin="north\nup\nsouth\n"
    )
    assert result.exit_code == 0
    lines = [line for line in result.output.splitlines() if line]
    assert lines[:6] == [
        lines[0],
        "eight doors, all shut.",
        "> north",
        "locked.",
        "> up",
        "unknown door.",
    ]
    assert lines[0].startswith("Doors: the ")
    assert lines[6] == "turn limit reached: lost in 2 turns, reward 0"
    assert lines[-2:] == ["stopped", "won 0 of 1 episode"]


def test_the_scripted_player_is_shown_with_its_success_rate():
    result = crl("play", "room", "--scripted", "--split", "unseen", "--episodes", "3")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[-1] == "won 3 of 3 episodes"
    assert sum(line.startswith("> ") for line in lines) >= 3
    assert lines.count("You reach the stairs down.") == 3
    assert sum(line.startswith("won in ") for line in lines) == 3


def test_seed_and_split_choose_the_tasks():
    def goal(*options: str) -> str:
        return crl("play", "room", "--rendering", "compact", *options).output.splitlines()[0]

    assert goal() == goal("--seed", "0", "--split", "train") != goal("--seed", "1")
    assert (
        goal("--split", "unseen")
        == goal("--split", "unseen", "--seed", "1")
        == "Room: the amber arch. Reach the stairs down (>)."
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ("three",),
            "TASK = 'three': is a mixture. Play one of its tasks: room, webshop, alfworld.",
        ),
        (("rom",), "TASK = 'rom': is not a known task. Did you mean room?"),
        (
            ("room", "--rendering", "small"),
            "--rendering = 'small': is not one of the choices. Available: full, compact.",
        ),
        (
            ("room", "--split", "sen"),
            "--split = 'sen': is not one of the choices. Did you mean seen?",
        ),
        (
            ("room", "--split", "unseen", "--episodes", "200000"),
            "--episodes = 200000: 200,000 places were requested, but there are only 100,000.",
        ),
        (
            ("webshop", "--split", "seen", "--episodes", "200000"),
            "--split = 'seen': the seen split needs permanent places",
        ),
        (
            (DOORS, "--scripted"),
            "TASK = 'doors': has no scripted player. Play it yourself, without --scripted.",
        ),
    ],
)
def test_an_unplayable_task_is_a_one_line_error(args: tuple[str, ...], words: str):
    result = crl("play", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


INVALID_GAME = """
from crl.envs.base import ActionSpace, EnvSpec
from crl.envs.seeded import SeededTasks
from crl.types import StepResult

class Game:
    def reset(self, task):
        return {reset}
    def step(self, action):
        return {step}
    def close(self):
        {close}

TASKS = SeededTasks("unruly", "Try.")
SPEC = EnvSpec("unruly", lambda rendering: Game(), TASKS.tasks, \
ActionSpace(description="any text"), turns=2)
"""
WINNING = {
    "reset": "'say something.'",
    "step": "StepResult('won.', 1.0, True, True)",
    "close": "pass",
}


def play_game(folder: Path, **parts: str):
    folder.mkdir(exist_ok=True)
    (folder / "unruly.py").write_text(INVALID_GAME.format(**WINNING | parts))
    (folder / "unruly.toml").write_text(
        'env = "unruly.py:SPEC"\nrendering = "full"\nmax_turns = 2\nmax_response_tokens = 4\n'
    )
    return crl("play", str(folder / "unruly.toml"), stdin="go\n")


@pytest.mark.parametrize(
    ("part", "code", "message"),
    [
        (
            "reset",
            "None",
            "reset: TypeError: reset must return the observation as a str, not NoneType",
        ),
        ("step", "{'text': 'won.'}", "step: TypeError: step must return a StepResult, not dict"),
        (
            "step",
            "StepResult('won.', float('nan'), True)",
            "step: ValueError: a reward must be finite, not nan",
        ),
        (
            "step",
            "StepResult('won.', 5.0, True, True)",
            "step: ValueError: the total reward of an episode must be in [0, 1], not 5",
        ),
        (
            "step",
            "int('one\\ntwo')",
            "step: ValueError: invalid literal for int() with base 10: 'one\\ntwo'",
        ),
        ("step", "exit('enough')", "step: SystemExit: enough"),
    ],
)
def test_an_invalid_result_is_a_one_line_error(tmp_path: Path, part: str, code: str, message: str):
    result = play_game(tmp_path, **{part: code})
    assert (result.exit_code, result.stderr) == (1, f"error: env: unruly: {message}\n")
    assert "won in" not in result.output


def test_an_error_in_close_is_shown_and_hides_no_other_error(tmp_path: Path):
    result = play_game(tmp_path, close="raise RuntimeError('no end')")
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line for line in result.output.splitlines() if line][-2:] == [
        "won in 1 turn, reward 1",
        "env: unruly: close: RuntimeError: no end",
    ]
    result = play_game(tmp_path / "lost", step="1 / 0", close="raise RuntimeError('no end')")
    assert (result.exit_code, result.stderr) == (
        1,
        "error: env: unruly: step: ZeroDivisionError: division by zero\n",
    )
    assert "env: unruly: close: RuntimeError: no end" in result.output


def test_an_invalid_stream_is_a_one_line_error(tmp_path: Path):
    (tmp_path / "hall.toml").write_text(
        catalog.task_file("room").read_text().replace("permanent = 8 ", "permanent = 33 ")
    )
    result = crl("play", str(tmp_path / "hall.toml"), "--scripted")
    assert result.exit_code == 2
    message = (
        "places must be at least 1, and permanent must be between 0 and places, not 32 and 33. "
        "Choose another value."
    )
    assert (
        result.stderr
        == f"error: tasks.hall.stream = {{'places': 32, 'permanent': 33, 'visits': 5}}: {message}\n"
    )


def test_ctrl_c_at_the_prompt_ends_the_game(monkeypatch: pytest.MonkeyPatch):
    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    result = crl("play", DOORS, "--episodes", "2")
    assert result.exit_code == 130
    assert result.output.splitlines()[-2:] == ["stopped", "won 0 of 0 episodes"]
    assert result.stderr == ""

"""`crl episodes` and `crl replay` on recorded episodes."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, PagerContext
from typer.testing import CliRunner, Result

from crl.cli.main import app
from crl.cli.runs.episode_text import episode_table, replay_lines
from crl.cli.runs.episodes import _paged, _print_lines
from crl.records.shards import write_shard
from crl.types import ExperienceUse, Segment, Task, TokenTrace, Trajectory
from support.hostile_texts import FORBIDDEN, HOSTILE
from support.snapshots import group
from support.trajectories import build_trajectory

GOAL = "find the \x1b[31mexit"


def crl(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def free(step: int, member: int, task: str = "room", **facts) -> Trajectory:
    return build_trajectory(
        Task(task, 7, "train", GOAL), step=step - 1, group=5, member=member, turns=1, **facts
    )


def guided() -> Trajectory:
    """Return an episode with a question, two turns in the turn limit and one in overtime."""
    trace = TokenTrace(
        (1, 2, 3, 4, 5, 6, 7, 8),
        (0, 1, 0, 1, 1, 0, 1, 0),
        (0.0, -0.5, 0.0, -0.25, -1.0, 0.0, -2.0, 0.0),
        (-1, 4, -1, 4, 5, -1, 5, -1),
    )
    segments = (
        Segment("system", "You play.", "task"),
        Segment("user", "Go west.", "experience"),
        Segment("user", "a door\n\x1b[2Jand a wall", "env"),
        Segment("assistant", "ask: where?", "tool_call"),
        Segment("user", "West of here.", "tool_result"),
        Segment("assistant", "west", "policy"),
        Segment("user", "a hall", "env"),
        Segment("assistant", "north", "policy"),
        Segment("user", "a wall", "env"),
        Segment("assistant", "south", "policy"),
    )
    uses = (ExperienceUse("run/0/1/2#0", 3, "g", "start"), ExperienceUse("e2", 1, "q", "ask"))
    return build_trajectory(
        Task("room", 7, "train", GOAL),
        step=1,
        group=5,
        member=2,
        condition="guided",
        traces=(trace,),
        segments=segments,
        used=uses,
        shown=("Go west.", "West of here."),
        rewards={"outcome": 1.0, "turns": -0.5},
        turn_rewards=(0.25, 0.75),
        overtime_turns=1,
        sampled_tokens=5,
        success=True,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    write_shard(run / "episodes", 1, [free(1, 0), free(1, 1, error="env: it died")])
    write_shard(run / "episodes", 2, [free(2, 0, "webshop", truncated=True), free(2, 1), guided()])
    return run


def test_the_newest_episodes_come_first(run: Path):
    result = crl("episodes", run, "--limit", 3)
    assert result.stdout.splitlines() == [
        "step  group  member  task     how     outcome  reward  turns  tokens  "
        "guided by            goal",
        "   2      5       2  room     guided  won        0.50      2       5  "
        "run/0/1/2#0@3, e2@1  find the \\x1b[31mexit",
        "   2      5       1  room     free    lost       0.00      1       0  "
        "–                    find the \\x1b[31mexit",
        "   2      5       0  webshop  free    cut off    0.00      1       0  "
        "–                    find the \\x1b[31mexit",
    ]
    assert result.stderr == "showing 3 of 5; use --limit 0 for all\n"


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ("--step 1", [(1, 1), (1, 0)]),
        ("--member 1", [(2, 1), (1, 1)]),
        ("--group 4", []),
        ("--task webshop", [(2, 0)]),
        ("--won", [(2, 2)]),
        ("--failed --step 1", [(1, 1), (1, 0)]),
        ("--guided", [(2, 2)]),
        ("--free --step 2", [(2, 1), (2, 0)]),
        ("run/1/5/2", [(2, 2)]),
        ("run-3/0/5/1", [(1, 1)]),
        ("run/0/5/2", []),
    ],
)
def test_episodes_are_chosen(run: Path, options: str, chosen: list):
    result = crl("episodes", run, "--json", *options.split())
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(record["step"], record["member"]) for record in records] == chosen
    hint = (
        "no results\nthe run has episodes of the steps 1 to 2, counted from 1; ids of episodes "
        "count them from 0\n"
    )
    assert (result.exit_code, result.stderr) == (0, "" if chosen else hint)


def test_an_episode_is_replayed_with_its_experience_and_rewards(run: Path):
    result = crl("replay", run)
    assert "\x1b" not in result.stdout
    rule = "── {} ".format
    lines = [line.rstrip("─") for line in result.stdout.splitlines()]
    assert lines == [
        "step 2, group 5, member 2: room, guided",
        "goal    find the \\x1b[31mexit",
        "result  won in 2 turns, reward 0.5 (outcome 1, turns -0.5)",
        "tokens  5 sampled, 4 of context in 1 training sample",
        "guided by  run/0/1/2#0@3, retrieved at the start",
        "guided by  e2@1, retrieved for a question and rewritten",
        *("", rule("task"), "You play."),
        *("", rule("experience"), "Go west."),
        *("", rule("environment"), "a door", "\\x1b[2Jand a wall"),
        *("", rule("question"), "ask: where?"),
        *("", rule("answer to the question"), "West of here."),
        *("", rule("answer of turn 1"), "west", "reward 0.25"),
        *("", rule("environment"), "a hall"),
        *("", rule("answer of turn 2"), "north", "reward 0.75"),
        *("", rule("environment"), "a wall"),
        *("", rule("answer in overtime"), "south"),
        "",
    ]
    assert result.stderr == "showing 1 of 5; use --limit 0 for all\n"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_escaped(tmp_path: Path, name: str):
    text = HOSTILE[name][:100_000]
    played = [
        replace(t, task=replace(t.task, goal=text), outcome=replace(t.outcome, error=error))
        for t, error in zip(group(0, text), (None, text), strict=True)
    ]
    write_shard(tmp_path / "episodes", 1, played)
    for command in ("replay", "episodes"):
        result = crl(command, tmp_path, "--limit", 0)
        assert result.exit_code == 0
        assert not FORBIDDEN & set(result.stdout)
        assert "\x1b" not in result.stdout
        assert result.stdout.encode("utf-8")


def test_an_episode_that_is_cut_off_is_lost(run: Path):
    result = crl("replay", run, "--task", "webshop")
    assert "\nresult  lost: cut off after 1 turn, reward 0\n" in result.stdout


def test_columns_are_left_out_in_a_narrow_terminal():
    facts = {
        "step": 1, "group": 5, "member": 2, "condition": "free", "success": True, "error": None,
        "truncated": False, "reward": 0.5, "turns": 2, "sampled_tokens": 5, "used": [],
        "goal": "g" * 50,
    }  # fmt: skip
    records = [{**facts, "task": task} for task in ("room", "scienceworld")]
    for width in (75, 80, 120):
        assert max(map(len, episode_table(records, width))) <= width
    assert "tokens" in episode_table(records, 120)[0]
    assert "tokens" not in episode_table(records, 80)[0]


def test_an_episode_is_replayed_by_its_id(run: Path):
    result = crl("replay", run, "run/1/5/1")
    assert result.stdout.startswith("step 2, group 5, member 1: room, free\n")
    assert (result.exit_code, result.stderr) == (0, "")


def test_tokens_stand_with_their_answers():
    lines = [line.plain for line in replay_lines(guided(), 80, lambda token: f"t{token}\n")]
    west = lines.index("west")
    assert lines[lines.index("ask: where?") + 1] == "        2   -0.5000  version 4  't2\\\\n'"
    assert lines[west + 1 : west + 4] == [
        "        4   -0.2500  version 4  't4\\\\n'",
        "        5   -1.0000  version 5  't5\\\\n'",
        "reward 0.25",
    ]
    assert lines[lines.index("south") + 1] == "", "overtime answers have no recorded tokens"


def test_experience_is_highlighted_on_a_terminal():
    console = Console(force_terminal=True, color_system="standard", width=80)
    with console.capture() as output:
        _print_lines(console, replay_lines(guided(), 80))
    assert "\x1b[32mGo west.\x1b[0m" in output.get()
    assert "\x1b[32mWest of here.\x1b[0m" in output.get()


@pytest.mark.parametrize("text", ["ab c\td\n", "\x1b[0m\u202e"])
def test_a_long_text_is_printed_completely_and_soon(tmp_path: Path, text: str):
    """It took minutes, because rich laid out every line."""
    count = 2_000_000 // len(text)
    played = build_trajectory(
        Task("room", 7, "train", GOAL), segments=(Segment("user", text * count, "env"),), turns=0
    )
    write_shard(tmp_path / "episodes", 1, [played])
    started = time.process_time()
    result = crl("replay", tmp_path)
    assert time.process_time() - started < 15
    assert result.exit_code == 0
    shown = {"ab c\td\n": "ab c    d\n"}.get(text, "\\x1b[0m\\u202e")
    assert result.stdout.count(shown) == count


def test_several_episodes_and_an_error(run: Path):
    result = crl("replay", run, "--failed", "--step", 1, "--limit", 0)
    titles = [line for line in result.stdout.splitlines() if line.startswith("step")]
    assert titles == [f"step 1, group 5, member {member}: room, free" for member in (1, 0)]
    assert "\nerror: env: it died\n" in result.stdout


def test_the_answer_of_a_failed_turn_is_not_in_overtime():
    segments = (Segment("user", "a hall", "env"), Segment("assistant", "north", "policy"))
    failed = build_trajectory(
        Task("room", 7, "train", GOAL), segments=segments, turns=0, error="env: it died"
    )
    lines = [line.plain.rstrip("─") for line in replay_lines(failed, 80)]
    assert "── answer of turn 1 " in lines
    assert lines[-4:] == ["north", "", "error: env: it died", ""], "no reward"


@pytest.mark.parametrize(
    ("pager", "paged"),
    [("cat", True), ("A=b cat", True), ("no-such-pager -R", False), ("'", False)],
)
def test_a_pager_that_does_not_exist_is_not_used(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], pager: str,
    paged: bool,
):  # fmt: skip
    monkeypatch.setenv("PAGER", pager)
    monkeypatch.delenv("MANPAGER", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    console = Console(force_terminal=True, width=80)
    context = _paged(console)
    assert isinstance(context, PagerContext) is paged
    with context:
        console.print("the episode")
    assert "the episode" in capfd.readouterr().out


@pytest.mark.parametrize("command", ["episodes", "replay"])
def test_wrong_input_is_refused(run: Path, tmp_path: Path, command: str):
    for options, message in (
        ((run, "--step", 9), "has no episodes of these steps. Its episodes are of the steps 1 to"),
        ((tmp_path / "none",), "has no episodes. Use the directory of a run"),
        ((run, "--won", "--failed"), "excludes --failed"),
        ((run, "--guided", "--free"), "excludes --free"),
        ((run, "2/5/1"), "'2/5/1': is not the id of an episode. Give an id such as run/2/47/3,"),
        ((run, "run/1/5/1#0"), "is not the id of an episode"),
        ((run, "run/1/5/1", "--step", 2), "excludes --step, --group and --member"),
        ((run, "run/9/5/1"), "has no episodes of these steps"),
    ):
        result = crl(command, *options)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr

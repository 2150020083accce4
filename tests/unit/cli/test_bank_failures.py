"""`crl bank failures`: the library of failures, by mode."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from crl.config import load
from crl.config.load import dump
from crl.config.schema import RunConfig
from crl.manager import ExperienceManager
from crl.manager.failure_notes import failure_modes, read_answer
from support.managers import PROMPTS, NoteEngine, open_manager, request, task
from support.whole_runs import crl, one_line

FAILURES = (
    ("room", "Goal 1.", "navigation_loop", "Follow the wall."),
    ("room", "Goal 2.", "navigation_loop", "Mark \x1b[31mvisited cells."),
    ("room", "Goal 2.", "navigation_loop", "Turn left."),
    ("maze", "Goal 1.", "premature_give_up", "Go on."),
)


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bank with the notes of `FAILURES`, one step after the other."""
    path = tmp_path_factory.mktemp("failures") / "bank.sqlite"
    answers = {
        str(i): f"DOMINANT_TYPE: {mode}\nCORE_LESSON: {lesson}\nRETRIEVAL_QUERY: query {i}"
        for i, (*_, mode, lesson) in enumerate(FAILURES)
    }
    prompts = replace(
        PROMPTS, notes=True, read_note=lambda _, text: read_answer(text, failure_modes("room"))
    )

    async def write() -> None:
        manager = await open_manager(path, NoteEngine(answers), prompts=prompts)
        for i, (name, goal, *_) in enumerate(FAILURES):
            manager.advance(i)
            failed = request(i, note=str(i), of=task(name, goal), success=False)
            await manager.submit(failed)
            await manager.drain()
        await manager.aclose()

    asyncio.run(write())
    return path


def test_modes_are_listed_the_most_frequent_first(bank: Path) -> None:
    result = crl("bank", "failures", bank)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "mode               failures  goals  last step  last lesson",
        "navigation_loop           3      2          2  Turn left.",
        "premature_give_up         1      1          3  Go on.",
    ]
    only = crl("bank", "failures", bank, "--task", "maze", "--json")
    assert json.loads(only.stdout) == [
        {"mode": "premature_give_up", "failures": 1, "goals": 1, "step": 3, "lesson": "Go on."}
    ]


def test_the_failures_of_a_mode_are_listed_the_newest_first(bank: Path) -> None:
    result = crl("bank", "failures", bank, "--mode", "navigation_loop", "--limit", "2")
    assert result.stdout.splitlines() == [
        "uid      step  goal     lesson",
        "2/0/0#0     2  Goal 2.  Turn left.",
        "1/0/0#0     1  Goal 2.  Mark \\x1b[31mvisited cells.",
    ]
    assert result.stderr == "showing 2 of 3; use --limit 0 for all\n"
    listed = crl("bank", "failures", bank, "--mode", "premature_give_up", "--json")
    assert json.loads(listed.stdout) == [
        {
            "uid": "run/3/0/0#0", "step": 3, "task": "maze", "goal": "Goal 1.",
            "note": {
                "mode": "premature_give_up", "detail": "", "critical_step": "",
                "lesson": "Go on.", "query": "query 3",
            },
        }
    ]  # fmt: skip
    assert crl("bank", "failures", bank, "--mode", "other").stderr == "no results\n"


def test_a_run_lists_its_own_failures_only(bank: Path, tmp_path: Path) -> None:
    """The run has started with a bank, and has written nothing yet."""
    asyncio.run(ExperienceManager.start_from(bank, tmp_path / "bank.sqlite"))
    assert len(json.loads(crl("bank", "failures", tmp_path, "--json").stdout)) == 2
    save(load(["room"], options={"method": "role_agent"}), tmp_path)
    assert crl("bank", "failures", tmp_path).stderr == "no results\n"


def test_a_run_of_another_method_has_no_failures(bank: Path, tmp_path: Path) -> None:
    shutil.copy(bank, tmp_path / "bank.sqlite")
    save(load(["room"], options={"method": "role_agent"}), tmp_path)
    assert len(json.loads(crl("bank", "failures", tmp_path, "--json").stdout)) == 2
    save(load(["room"], options={"method": "complementary"}), tmp_path)
    refused = crl("bank", "failures", tmp_path)
    assert refused.exit_code == 2
    assert one_line(refused).strip() == (
        f"error: run = '{tmp_path}': its method is complementary, which keeps no failures. "
        "Give a run of role_agent."
    )


@pytest.mark.parametrize("command", ["failures", "ls", "stats"])
def test_a_run_without_a_bank_says_so(tmp_path: Path, command: str) -> None:
    sets = ["role_agent.replay_ratio=0"]
    save(load(["room"], options={"method": "role_agent"}, sets=sets), tmp_path)
    refused = crl("bank", command, tmp_path)
    assert refused.exit_code == 2
    assert one_line(refused).strip() == (
        f"error: run = '{tmp_path}': has no bank: role_agent does not use one with the settings of "
        "this run. Give another run."
    )


def save(config: RunConfig, run: Path) -> None:
    """Write the config.json of a run."""
    dump(config, run / "config.json")


def test_an_unknown_mode_is_refused(bank: Path) -> None:
    refused = crl("bank", "failures", bank, "--mode", "clumsiness")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: --mode = 'clumsiness': is not a failure mode. Choose")

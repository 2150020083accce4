"""`crl bank build`: experiences from finished episodes, without training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from crl.config import load_saved, resolve_model
from crl.records.reader import episode_shards, read_episode_records
from crl.run.halves.build import recorded_requests
from crl.types import GUIDANCE_ORIGINS
from support.whole_runs import DETERMINISTIC, crl, episodes, one_line

SIZES = ("--set", "rollout.groups=4", "--set", "rollout.group_size=4")
SMALL = [
    word
    for name in ("seen", "unseen", "online_places")
    for word in ("--set", f"tasks.room.eval.{name}=0")
] + [word for text in DETERMINISTIC for word in ("--set", text)]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return rollouts of the actor alone, two steps."""
    run = tmp_path_factory.mktemp("played") / "run"
    command = ["rollout", "--tasks", "room", "--method", "grpo", "--steps", "2", *SIZES]
    result = crl(*command, "--run-dir", run)
    assert (result.exit_code, result.stderr) == (0, "")
    return run


def goals(bank: Path) -> set[str]:
    result = crl("bank", "export", bank)
    assert (result.exit_code, result.stderr) == (0, "")
    entries = [json.loads(line) for line in result.stdout.splitlines()[1:]]  # after the header
    return {entry["goal"] for entry in entries}


def test_a_bank_of_recorded_episodes_guides_a_run(played: Path, tmp_path: Path) -> None:
    bank, run = tmp_path / "bank", tmp_path / "run"
    result = crl("bank", "build", "--from", played, "--run-dir", bank)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"in the new bank: {bank / 'bank.sqlite'}" in result.stdout
    assert goals(bank) <= {episode["goal"] for episode in read_episode_records(played)}
    assert len(goals(bank)) > 2
    frozen = ("--set", f"bank.init={bank / 'bank.sqlite'}", "--set", "bank.frozen=true")
    again = crl("train", "--tasks", "room", "--steps", "1", "--run-dir", run,
                "--set", "eval.probe_every=0", *SIZES, *SMALL, *frozen)  # fmt: skip
    assert (again.exit_code, again.stderr) == (0, "")
    assert any(episode["used"] for episode in episodes(run))


def test_one_recorded_step_and_another_extractor(played: Path, tmp_path: Path) -> None:
    step = played / "episodes" / "000002.jsonl.gz"
    other = shutil.copytree(resolve_model("tiny-extractor"), tmp_path / "other")
    result = crl("bank", "build", "--from", step, "--extractor", other,
                 "--run-dir", tmp_path / "bank")  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    of_step = {e["goal"] for e in read_episode_records(played) if e["step"] == 2}
    assert goals(tmp_path / "bank")
    assert goals(tmp_path / "bank") <= of_step
    assert load_saved(tmp_path / "bank").config.extractor.model == str(other)


def test_requests_of_guided_episodes_have_no_experience(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = crl("train", "--tasks", "room", "--steps", "2", "--run-dir", run,
                 "--set", "tasks.room.stream.places=1", "--set", "tasks.room.stream.permanent=1",
                 "--set", "eval.probe_every=0", "--set", "rollout.max_staleness=0",
                 *SIZES, *SMALL)  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    assert any(episode["used"] for episode in episodes(run))
    requests = [r for batch in recorded_requests(episode_shards(run)) for r in batch]
    assert len(requests) == 32
    assert not any(request.shown for request in requests)
    assert not any(s.origin in GUIDANCE_ORIGINS for r in requests for s in r.segments)
    assert all(any(s.origin == "policy" for s in r.segments) for r in requests)


def test_a_bank_of_a_run_whose_extractor_had_auxiliary_rewards(tmp_path: Path) -> None:
    run, bank = tmp_path / "run", tmp_path / "bank"
    result = crl("train", "--tasks", "room", "--steps", "1", "--run-dir", run,
                 "--set", "extractor.perplexity.weight=0.5", "--set", "eval.probe_every=0",
                 *SIZES, *SMALL)  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    result = crl("bank", "build", "--from", run, "--run-dir", bank)
    assert (result.exit_code, result.stderr) == (0, "")
    assert load_saved(bank).config.extractor.perplexity.weight == 0, "nothing is trained"
    assert goals(bank)


def test_a_bank_of_groups_of_another_method_and_size(tmp_path: Path) -> None:
    """No group is played again, so its size need not suit `complementary`."""
    run, bank = tmp_path / "run", tmp_path / "bank"
    result = crl("rollout", "--tasks", "room", "--method", "grpo", "--steps", "1", "--run-dir", run,
                 "--set", "rollout.groups=4", "--set", "rollout.group_size=3")  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    result = crl("bank", "build", "--from", run, "--run-dir", bank)
    assert (result.exit_code, result.stderr) == (0, "")
    assert goals(bank)


def line(**changes: object) -> str:
    messages = [
        {"role": "user", "content": "at 2 3\ndark east south"},
        {"role": "assistant", "content": "east"},
    ]
    goal = "Room: the amber hall. Reach the stairs down (>)."
    return json.dumps(
        {"task": "room", "goal": goal, "success": True, "messages": messages} | changes
    )


def write_episodes(run: Path, file: Path) -> Path:
    """Write the episodes of a run to a file as another program would. Return the file."""
    file.write_text(
        "\n".join(
            line(
                task=episode["task"],
                goal=episode["goal"],
                success=episode["success"],
                messages=[
                    {"role": s["role"], "content": s["text"]}
                    for s in episode["segments"]
                    if s["origin"] != "task"
                ],
            )
            for episode in read_episode_records(run)
        )
    )
    return file


@pytest.mark.parametrize("tasks", [(), ("--tasks", "room")])
def test_episodes_of_other_programs(tasks: tuple[str, ...], played: Path, tmp_path: Path) -> None:
    file, bank = write_episodes(played, tmp_path / "episodes.jsonl"), tmp_path / "bank"
    result = crl("bank", "build", "--from", file, *tasks, "--run-dir", bank)
    assert (result.exit_code, result.stderr) == (0, "")
    assert [*load_saved(bank).config.tasks] == ["room"]
    assert goals(bank) <= {episode["goal"] for episode in read_episode_records(played)}
    assert len(goals(bank)) > 2


TASKS = "room,webshop,alfworld,search_qa"


def test_episodes_of_other_tasks_from_a_file(tmp_path: Path) -> None:
    run, bank = tmp_path / "run", tmp_path / "bank"
    sizes = ("--set", "rollout.groups=8", "--set", "rollout.group_size=2")
    command = ["rollout", "--scripted", "--tasks", TASKS, "--method", "grpo", "--steps", "1"]
    assert crl(*command, *sizes, "--run-dir", run).exit_code == 0
    file = write_episodes(run, tmp_path / "episodes.jsonl")
    result = crl("bank", "build", "--from", file, "--run-dir", bank)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "could not be distilled" not in result.stdout
    assert {episode["task"] for episode in read_episode_records(run)} == set(TASKS.split(","))


def test_an_episode_that_the_environment_did_not_write(tmp_path: Path) -> None:
    file, bank = tmp_path / "episodes.jsonl", tmp_path / "bank"
    file.write_text(line(task="alfworld", goal="Do it."))
    result = crl("bank", "build", "--from", file, "--run-dir", bank)
    assert result.exit_code == 0, result.output
    warning = f"warning: 1 episode could not be distilled; the reasons: crl bank dead {bank}"
    assert warning in result.stdout
    reason = "alfworld did not write this episode: the text names no chore: 'Do it.'"
    assert reason in " ".join(crl("bank", "dead", bank).stdout.split())


@pytest.mark.parametrize(
    ("text", "arguments", "error"),
    [
        ("", ("--tasks", "room"), "has no episodes. Give another file."),
        ("", (), "has no episodes. Give another file."),
        (line(task="maze.py:SPEC"), (), "line 1': is of the task 'maze.py:SPEC', which is not"),
        ("[]", (), "line 1': is not a JSON object with a task. Correct it, or name"),
        (f"{line()}\n{{", ("--tasks", "room"), "line 2': is not JSON (Expecting property"),
        (line(success=1), ("--tasks", "room"), "line 1': has no text as goal"),
        (line(task="maze"), ("--tasks", "room"), "is of the task 'maze', which --tasks does not"),
        (line(task=["room"]), ("--tasks", "room"), "is of the task ['room'], which --tasks does"),
        (line(goal="\ud800"), ("--tasks", "room"), "line 1': has no text as goal"),
        ("[" * 100_000, ("--tasks", "room"), "line 1': is not JSON (maximum recursion depth"),
        (
            line(messages=[{"role": "user", "content": "\ud800"}]),
            ("--tasks", "room"),
            "the content of message 1 is not a text",
        ),
        (line(messages=[]), ("--tasks", "room"), "has no message of the assistant"),
    ],
)
def test_faulty_files(tmp_path: Path, text: str, arguments: tuple[str, ...], error: str) -> None:
    (file := tmp_path / "episodes.jsonl").write_text(text)
    run = tmp_path / "bank"
    result = crl("bank", "build", "--from", file, *arguments, "--run-dir", run)
    assert result.exit_code == 2
    assert error in result.stderr
    assert not run.exists(), "nothing was started"


def test_options_without_effect(played: Path, tmp_path: Path) -> None:
    result = crl("bank", "build", "--from", played, "--tasks", "room", "--run-dir", tmp_path / "b")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--tasks = room: does not apply to recorded episodes" in result.stderr.replace("'", "")
    for text in ("method=grpo", "bank.frozen=true", "extractor.train=true"):
        refused = crl("bank", "build", "--from", played, "--set", text, "--run-dir", tmp_path / "b")
        assert "has no effect: the bank is new, and nothing is trained" in refused.stderr
    missing = crl("bank", "build", "--from", tmp_path / "none", "--run-dir", tmp_path / "b")
    assert "is neither a run nor a file. Give a run, or a file of episodes." in missing.stderr


def test_a_bank_without_experience_is_reported(played: Path, tmp_path: Path) -> None:
    bank = tmp_path / "bank"
    result = crl("bank", "build", "--from", played, "--extractor", "tiny-actor", "--run-dir", bank)
    assert result.exit_code == 0, result.output
    assert f"warning: no experience in the new bank: {bank / 'bank.sqlite'}" in result.stdout
    assert "start a run" not in result.stdout


def test_a_bank_is_no_source(played: Path, tmp_path: Path) -> None:
    source = tmp_path / "bank.sqlite"
    source.touch()
    result = crl("bank", "build", "--from", source, "--run-dir", tmp_path / "bank")
    assert result.exit_code == 2
    assert "is a bank, but a bank is built from episodes. Give a run" in one_line(result)

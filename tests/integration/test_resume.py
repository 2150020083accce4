"""Runs that are killed or interrupted and continue from a checkpoint."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import pytest
from huggingface_hub import DatasetCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from crl.config.models import resolve_model
from crl.monitor import files
from crl.monitor.run_dir import RunDir
from crl.protocols import State
from crl.records import position
from crl.report.results import next_commands
from crl.report.run_record import read_runs
from crl.run import checkpoint
from crl.run.checkpoint import MANIFEST
from crl.run.loop import TrainingLoop
from support.complementary_runs import SIZES, address, dump, log, manifest, rows
from support.whole_runs import (
    DETERMINISTIC,
    arguments,
    contents,
    crl,
    episode_files,
    episodes,
    equal_weights,
    lines,
    metrics,
    one_line,
    untimed,
)

ROOM = (*SIZES, "run.checkpoint_every=2")
EXACT = (*ROOM, *DETERMINISTIC)
STEPS = 6
SNAPSHOT_METRICS = {"ops/snapshot", "log/seq"}
TASKS = ("room", "webshop", "alfworld")
MIXTURE = (
    *("rollout.groups=6", "rollout.group_size=4", "extractor.batch=8", "eval.probe_every=2"),
    *("run.checkpoint_every=2", *DETERMINISTIC),
    *(
        f"tasks.{task}.{setting}"
        for task in TASKS
        for setting in (
            *("stream.places=2", "stream.permanent=1", "eval.seen=4", "eval.unseen=2"),
            *("eval.online_places=1", "eval.probe_places=2"),
        )
    ),
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a deterministic run of the room that nothing disturbed."""
    return undisturbed(tmp_path_factory.mktemp("straight") / "run", "room", EXACT, STEPS)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same run, killed between the checkpoints of the steps 2 and 4."""
    run = tmp_path_factory.mktemp("killed") / "run"
    kill(run, "room", EXACT, STEPS, lambda: trained(run) == 3 and "2" in checkpoints(run))
    assert checkpoints(run) == {"2"}
    return run


def undisturbed(run: Path, tasks: str, sets: tuple[str, ...], steps: int) -> Path:
    result = crl(*arguments(run, tasks, sets, steps, 0, "complementary"))
    assert (result.exit_code, result.stderr) == (0, "")
    return run


def kill(
    run: Path, tasks: str, sets: tuple[str, ...], steps: int, ready: Callable[[], bool],
    number: signal.Signals = signal.SIGKILL,
) -> str:  # fmt: skip
    """Start a run and send a signal to its process when `ready()` is true. Return its output."""
    return _kill(arguments(run, tasks, sets, steps, 0, "complementary"), ready, number)


def kill_resumed(
    run: Path, ready: Callable[[], bool], number: signal.Signals = signal.SIGKILL
) -> str:
    """Resume a run and send a signal to its process when `ready()` is true. Return its output."""
    return _kill(["resume", str(run), "--plain"], ready, number)


def _kill(command: Sequence[str], ready: Callable[[], bool], number: signal.Signals) -> str:
    with subprocess.Popen(
        [sys.executable, "-m", "crl", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        while not ready():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.005)
        process.send_signal(number)
        return process.communicate(timeout=300)[0]


def trained(run: Path) -> int:
    """Return the number of trained steps of a run that may be writing."""
    path = run / "metrics.jsonl"
    text = path.read_text("utf-8") if path.exists() else ""
    return text.count('"kind": "train"')


def resumed(run: Path) -> bool:
    """Return whether a resumed process has taken back what was after the checkpoint."""
    return "resuming at step" in (run / "log.txt").read_text("utf-8")


def checkpoints(run: Path) -> set[str]:
    return {path.parent.name for path in (run / "checkpoints").glob(f"*/{MANIFEST}")}


def resume(run: Path, *options: object, code: int = 0) -> str:
    result = crl("resume", run, "--plain", *options)
    assert result.exit_code == code, result.output + "".join(map(str, [result.exception]))
    assert code or result.stderr == ""
    return result.stdout if not code else one_line(result)


def bank_rows(run: Path) -> list[str]:
    """Return the rows of a run's bank, sorted, because a rollback inserts rows again.

    Snapshots and the rows before them are left out: they depend on the existing checkpoints.
    """
    rows = [line for line in dump(run / "bank.sqlite") if line.startswith("INSERT")]
    return sorted(row for row in rows if '_before"' not in row and '"snapshots"' not in row)


def assert_same_run(resumed: Path, straight: Path, steps: int) -> None:
    """Check that both runs have equal metrics, episodes, banks, models and states.

    Times and the lengths of the files, which depend on them, may differ.
    """
    assert list(map(untimed, lines(resumed / "metrics.jsonl"))) == list(
        map(untimed, lines(straight / "metrics.jsonl"))
    )
    assert episode_files(resumed) == episode_files(straight)
    summary = (straight / "summary.json").read_bytes()
    assert (resumed / "summary.json").read_bytes() == summary
    assert bank_rows(resumed) == bank_rows(straight)
    first, second = manifest(resumed, steps), manifest(straight, steps)
    assert first["files"] == second["files"], "weights and optimizers, by their SHA-256"
    for state in (first["state"], second["state"]):
        del state["records"], state["seconds"], state["totals"]["step_seconds"]
    assert first["state"] == second["state"]
    for role in ("actor", "extractor"):
        path = straight / "checkpoints" / str(steps) / role
        assert not equal_weights(path, resolve_model(f"tiny-{role}")), f"the {role} was trained"


# ── exact continuation ────────────────────────────────────────────────────────────────────────────


def test_a_run_killed_between_two_checkpoints(killed: Path, straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(killed, run)
    output = resume(run)
    assert f"resuming at step 2; 1 step after it is discarded (kept in {run}/discarded/1)" in output
    assert_same_run(run, straight, STEPS)
    discarded = run / "discarded" / "1"
    steps = [line["step"] for line in lines(discarded / "metrics.jsonl")]
    assert (min(steps), max(steps)) == (3, 3)
    assert {t["step"] for t in episodes(discarded)} == {3}
    submitted = [origin for origin, _ in log(discarded / "bank.sqlite", "submit")]
    assert len([origin for origin in submitted if origin.startswith("run/2/")]) == 16


def test_a_checkpoint_of_an_older_version(killed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(killed, run)
    path = run / "checkpoints" / "2" / MANIFEST
    content = json.loads(path.read_text("utf-8"))
    del content["state"]["supervision"], content["state"]["totals"]["errors"]
    del content["sha256"], content["state"]["measurements"]["settings"]
    path.write_text(json.dumps(content), "utf-8")
    resume(run, "--steps", 3)
    assert manifest(run, 3)["state"]["supervision"]["warnings"]["steps"] == 1


def test_a_run_killed_at_a_checkpoint(straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kill(run, "room", EXACT, STEPS, lambda: "4" in checkpoints(run))
    assert "resuming at step 4" in resume(run)
    assert_same_run(run, straight, STEPS)


@pytest.mark.soak
def test_a_mixture_killed_at_a_checkpoint_and_between_two(tmp_path: Path) -> None:
    """Kill one run twice: at the checkpoint of step 2, and after the next step."""
    tasks, straight, run = ",".join(TASKS), tmp_path / "straight", tmp_path / "run"
    undisturbed(straight, tasks, MIXTURE, 4)
    kill(run, tasks, MIXTURE, 4, lambda: "2" in checkpoints(run))
    kill_resumed(run, lambda: resumed(run) and trained(run) >= 3)
    assert "resuming at step 2" in resume(run)
    assert_same_run(run, straight, 4)


def test_a_run_with_auxiliary_losses_and_rewards(tmp_path: Path) -> None:
    """Kill a run with the perplexity reward and self-distillation at every second step."""
    straight, run = tmp_path / "straight", tmp_path / "run"
    sets = (
        *EXACT,
        *("extractor.perplexity.weight=0.5", "extractor.cooldown=0", "eval.probe_every=0"),
        "complementary.self_distillation=0.5",
        "complementary.self_distillation_every=2",
        *("tasks.room.eval.seen=0", "tasks.room.eval.unseen=0", "tasks.room.eval.online_places=0"),
    )
    undisturbed(straight, "room", sets, 4)
    kill(run, "room", sets, 4, lambda: trained(run) == 3 and "2" in checkpoints(run))
    assert "resuming at step 2" in resume(run)
    assert_same_run(run, straight, 4)
    measured = [line["step"] for line in metrics(run, "bank") if line["perplexity/episodes"]]
    assert measured == [2, 3, 4]


def test_an_interrupted_run_continues_where_it_stopped(straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    output = kill(run, "room", EXACT, STEPS, lambda: trained(run) == 3, signal.SIGINT)
    step = trained(run)
    assert f"interrupted after {step} of 6 steps" in output
    assert "the final evaluation was skipped" in output
    assert f"continue: crl resume {run}" in output
    assert f"resuming at step {step}\n" in resume(run)
    assert not (run / "discarded").exists()
    # The checkpoint of the interruption is one more row in the bank's log.
    first, second = (
        [
            {key: value for key, value in untimed(line).items() if key not in SNAPSHOT_METRICS}
            for line in lines(path / "metrics.jsonl")
        ]
        for path in (run, straight)
    )
    assert first == second
    assert equal_weights(run / "checkpoints/6/actor", straight / "checkpoints/6/actor")


def test_an_interrupted_evaluation_is_repeated(straight: Path, tmp_path: Path) -> None:
    """Interrupt a periodic evaluation, and then the final one."""
    run, sets = tmp_path / "run", (*EXACT, "run.eval_every=3")
    kill(run, "room", sets, STEPS, lambda: trained(run) == 3, signal.SIGINT)
    kill_resumed(run, lambda: trained(run) == STEPS, signal.SIGINT)
    resume(run)
    assert [line["step"] for line in metrics(run, "eval")] == [0, 3, 6]
    assert untimed(metrics(run, "eval")[-1]) == untimed(metrics(straight, "eval")[-1])
    assert "the run has completed 6 steps" in resume(run, code=2)
    evaluations = manifest(run, 6)["state"]["measurements"]["evaluations"]
    assert [step for step, _ in evaluations] == [0, 3, 6]


# ── concurrent runs ───────────────────────────────────────────────────────────────────────────────


def test_nothing_is_lost_or_doubled_in_a_concurrent_run(tmp_path: Path) -> None:
    """Kill a run in the background mode twice, in steps that overlap."""
    run, sets = tmp_path / "run", (*ROOM, "rollout.max_staleness=1", "bank.queue_size=16")
    kill(run, "room", sets, 8, lambda: trained(run) == 3 and "2" in checkpoints(run))
    kill_resumed(run, lambda: trained(run) >= 6)
    resume(run)
    played = episodes(run)
    assert [line["step"] for line in metrics(run, "train")] == list(range(1, 9))
    assert len(played) == len({address(t) for t in played}) == 8 * 16
    submitted = [origin for origin, _ in log(run / "bank.sqlite", "submit")]
    assert sorted(submitted) == sorted(address(t) for t in played if not t["error"])
    assert all(line["staleness/max"] <= 1 for line in metrics(run, "train"))
    turns = [line["total/env_turns"] for line in metrics(run, "train")]
    assert turns == sorted(turns)
    updates = [line["extractor/updates"] for line in metrics(run, "extractor")]
    # A batch without signal makes no update.
    assert all(0 <= now - before <= 1 for before, now in pairwise([0, *updates]))
    assert [line["step"] for line in metrics(run, "eval")] == [0, 8]


# ── lengths, settings and forks ───────────────────────────────────────────────────────────────────


def test_a_finished_run_can_be_extended(straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    assert (
        "run.steps = 6: the run has completed 6 steps. Extend it with --steps 7 or more."
        in resume(run, code=2)
    )
    output = resume(run, "--steps", 7)
    assert "resuming at step 6\n" in output
    assert "run.steps: 6 → 7" in output
    assert [line["step"] for line in metrics(run, "train")] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in metrics(run, "eval")] == [0, 6, 7]
    assert checkpoints(run) == {"6", "7"}
    commands = dict(next_commands(read_runs([run])[0]))
    assert " --steps 7 " in commands["another seed"], "the steps of the extended run"
    assert crl("export", run, tmp_path / "actor").exit_code == 0
    card = (tmp_path / "actor" / "README.md").read_text()
    assert "- steps: 7, of" in card
    assert "- settings changed after the command:\n  - `run.steps: 6 → 7`\n" in card


def test_an_older_checkpoint(straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    assert "checkpoint = 3" in resume(run, "--from", 3, code=2)
    (run / "eval").mkdir()
    for name in ("step4-bank.json", "step6-bank.json", "step6-bank.csv"):
        (run / "eval" / name).touch()
    output = resume(run, "--from", 4)
    assert f"resuming at step 4; 2 steps after it are discarded (kept in {run}/discarded/1)" in (
        output
    )
    assert (run / "discarded/1/checkpoints/6" / MANIFEST).is_file()
    assert [path.name for path in (run / "eval").iterdir()] == ["step4-bank.json"]
    assert len(list((run / "discarded/1/eval").iterdir())) == 2, "evaluations of step 6"
    assert_same_run(run, straight, STEPS)


def test_a_fork_has_its_lineage_and_leaves_the_old_run_alone(
    straight: Path, tmp_path: Path
) -> None:
    run, before = tmp_path / "fork", contents(straight)
    result = crl("fork", straight, run, "--from", 4, "--set", "eval.probe_every=0")
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"forked {straight} at step 4 to {run}" in result.stdout
    assert "eval.probe_every: 2 → 0" in result.stdout
    assert f"continue it with: crl resume {run}" in result.stdout
    saved = json.loads((run / "config.json").read_text())
    assert saved["lineage"] == [{"run": str(straight), "step": 4}]
    resume(run)
    assert contents(straight) == before
    old, new = (metrics(path, "train") for path in (straight, run))
    assert list(map(untimed, new)) == list(map(untimed, old))
    assert equal_weights(run / "checkpoints/6/actor", straight / "checkpoints/6/actor")
    assert [t["step"] for t in episodes(run)][:1] == [5]


def test_a_fork_has_the_bank_of_its_checkpoint(straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "fork"
    assert crl("fork", straight, run, "--from", 4).exit_code == 0
    assert {path.name for path in run.iterdir()} == {
        "config.json", "metrics.jsonl", "checkpoints", "bank.sqlite",
    }  # fmt: skip
    ((last,),) = rows(run / "bank.sqlite", "SELECT MAX(step) FROM log")
    assert last == 4
    result = crl("fork", straight, run)
    assert "exists and is not empty" in one_line(result)
    finished = tmp_path / "finished"
    result = crl("fork", straight, finished)
    assert f"continue it with: crl resume {finished} --steps 12\n" in result.stdout


def test_evaluations_of_other_sets_are_not_compared(straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    output = resume(run, "--steps", 7, "--set", "tasks.room.eval.seen=4")
    assert "the summary is not compared with evaluations before this point" in output
    (row,) = [line for line in output.splitlines() if line.startswith("  seen, without")]
    assert len(row.split("[")) == 2, "there is one rate with its interval"
    assert [line["step"] for line in metrics(run, "eval")] == [0, 6, 7]


def test_evaluations_with_other_settings_are_not_compared_in_forks_and_after_a_kill(
    killed: Path, tmp_path: Path
) -> None:
    """The settings changed before the run was resumed: in the fork, or by a killed resume."""
    for run, command in (
        (tmp_path / "fork", ["fork", killed, tmp_path / "fork"]),
        (tmp_path / "copy", None),
    ):
        if command is None:
            shutil.copytree(killed, run)
            config = json.loads((run / "config.json").read_text("utf-8"))
            config["config"]["tasks"]["room"]["max_turns"] = 3
            (run / "config.json").write_text(json.dumps(config), "utf-8")
        else:
            assert crl(*command, "--set", "tasks.room.max_turns=3").exit_code == 0
        output = resume(run, "--steps", 3)
        note = "tasks.room.max_turns changed after the last evaluation: the summary is not compared"
        assert note in output
        (row,) = [line for line in output.splitlines() if line.startswith("  seen, without")]
        assert len(row.split("[")) == 2, "there is one rate with its interval"


def test_a_model_that_has_moved(straight: Path, tmp_path: Path) -> None:
    run, model = tmp_path / "run", tmp_path / "moved"
    shutil.copytree(straight, run)
    shutil.copytree(resolve_model("tiny-actor"), model)
    config = json.loads((run / "config.json").read_text("utf-8"))
    config["config"]["actor"]["model"] = str(tmp_path / "gone")
    (run / "config.json").write_text(json.dumps(config), "utf-8")
    assert "is neither a known model nor a directory" in resume(run, "--steps", 7, code=2)
    output = resume(run, "--steps", 7, "--set", f"actor.model={model}")
    assert f"actor.model: {tmp_path / 'gone'} → {model}" in output
    assert [line["step"] for line in metrics(run, "train")] == [1, 2, 3, 4, 5, 6, 7]


def test_changed_prompts_and_packages_are_named(straight: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    config = json.loads((run / "config.json").read_text("utf-8"))
    config["prompts"]["distil"] = "0" * 64
    torch, config["versions"]["torch"] = config["versions"]["torch"], "1.0"
    (run / "config.json").write_text(json.dumps(config), "utf-8")
    output = resume(run, "--steps", 7)
    assert "  prompts.distil: the text has changed\n" in output
    assert f"  torch: 1.0 → {torch}\n" in output


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("method=grpo", "the checkpoint belongs to a run of another method"),
        ("run.seed=1", "all random draws of the run depend on it"),
        ("actor.model=tiny-extractor", "the checkpoint has the models of the run"),
        ("tasks.room.stream.places=5", "the run has drawn its tasks with this value"),
        ("bank.scope=shared", "the bank of the run already exists"),
        ("extractor.train=false", "the checkpoint has the trained models of the run"),
        ("critic.enabled=true", "the checkpoint has the success rates of a run with a critic"),
    ],
)
def test_settings_that_would_make_another_run(killed: Path, setting: str, reason: str) -> None:
    before = contents(killed)
    error = resume(killed, "--set", setting, code=2)
    assert f"in a run that continues: {reason}" in error
    assert contents(killed) == before


# ── damaged checkpoints and other errors ──────────────────────────────────────────────────────────


def test_a_truncated_checkpoint_is_named_and_the_one_before_is_used(
    straight: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    weights = run / "checkpoints/6/actor/model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size - 1)
    result = crl("resume", run, "--plain")
    assert result.exit_code == 0
    assert result.stderr == (
        f"{weights} has {size - 1:,} bytes instead of {size:,}: the checkpoint of step 6 is not "
        "used\n"
    )
    assert result.stderr in (run / "log.txt").read_text("utf-8")
    assert_same_run(run, straight, STEPS)
    flipped = run / "checkpoints/6/extractor/optimizer.safetensors"
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    assert "its SHA-256 differs" in resume(run, "--from", 6, "--steps", 7, code=2)


def test_a_checkpoint_without_a_manifest_is_named_and_kept(straight: Path, tmp_path: Path) -> None:
    run, fork = tmp_path / "run", tmp_path / "fork"
    shutil.copytree(straight, run)
    (lost := run / "checkpoints/6" / MANIFEST).unlink()
    before = contents(run)
    result = crl("fork", run, fork)
    assert f"{lost} is missing: the checkpoint of step 6 is not used" in result.stderr
    assert (checkpoints(fork), contents(run)) == ({"4"}, before)
    assert crl("resume", run, "--plain").exit_code == 0
    assert (run / "discarded/1/checkpoints/6/actor/model.safetensors").is_file()
    assert_same_run(run, straight, STEPS)


def test_a_run_in_progress_is_not_resumed(killed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(killed, run)
    code = (
        "import sys, time; from pathlib import Path; from crl.monitor.run_dir import RunDir\n"
        "with RunDir(Path(sys.argv[1])).lock():\n"
        "    print('locked', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        before = contents(run)
        error = resume(run, code=2)
        forked = crl("fork", run, tmp_path / "fork")
        process.kill()
    assert "another process is training this run" in error
    assert "another process is training this run" in one_line(forked)
    assert not (tmp_path / "fork").exists()
    assert contents(run) == before
    assert "resuming at step 2" in resume(run)


def test_runs_without_a_checkpoint_or_a_bank(killed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(killed, run)
    (run / "bank.sqlite").unlink()
    before = contents(run)
    error = resume(run, "--steps", 9, "--set", "rollout.groups=3", code=2)
    assert "its bank file bank.sqlite is missing. Restore the file." in error
    assert contents(run).keys() - {run / ".lock"} == before.keys() - {run / ".lock"}
    assert all(contents(run)[path] == value for path, value in before.items())
    shutil.rmtree(run / "checkpoints")
    assert "has no complete checkpoint" in resume(run, code=2)
    assert "is not a run directory" in resume(tmp_path, code=2)


def test_a_resume_that_is_killed_while_it_discards_can_be_repeated(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(straight, run)

    def killed(run: RunDir, saved: State, step: int, target: Path) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(position, "discard", killed)
        assert crl("resume", run, "--plain", "--from", 4).exit_code == 1
    assert "resuming at step 4" in resume(run)
    assert_same_run(run, straight, STEPS)


def test_a_checkpoint_whose_replacement_was_killed_is_used(straight: Path, tmp_path: Path) -> None:
    """The process was killed after the old checkpoint was renamed, before the new one was."""
    run, fork = tmp_path / "run", tmp_path / "fork"
    shutil.copytree(straight, run)
    (run / "checkpoints/6").rename(run / "checkpoints/.6.old")
    assert "the run has completed 6 steps" in resume(run, code=2)
    (run / "checkpoints/6").rename(run / "checkpoints/.6.old")
    assert crl("fork", run, fork).exit_code == 0
    assert checkpoints(fork) == {"6"}
    assert_same_run(run, straight, STEPS)


def test_a_metric_that_was_written_in_part_is_repeated(
    killed: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full in the middle of the line of the final evaluation."""
    run = tmp_path / "run"
    shutil.copytree(killed, run)
    write = files._write

    def in_part(stream: TextIO, record: Mapping[str, Any]) -> None:
        if (record["kind"], record["step"]) == ("eval", STEPS):
            stream.write(json.dumps(record)[:50])
            stream.flush()
            raise OSError(errno.ENOSPC, "No space left on device")
        write(stream, record)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_write", in_part)
        assert "No space left on device" in resume(run, code=1)
    resume(run)
    evaluations = [list(map(untimed, metrics(path, "eval"))) for path in (run, straight)]
    assert evaluations[0] == evaluations[1]


def test_a_failed_evaluation_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The periodic evaluation after step 1 fails. No checkpoint was due before."""

    measure = TrainingLoop._measure_if_due

    async def fail_after_step_1(self: TrainingLoop, step: int) -> None:
        if step == 1:
            raise RuntimeError("no evaluation")
        await measure(self, step)

    run, sets = tmp_path / "run", (*EXACT, "run.checkpoint_every=0", "run.eval_every=1")
    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_measure_if_due", fail_after_step_1)
        result = crl(*arguments(run, "room", sets, 2, 0, "complementary"))
    assert result.exit_code == 1
    assert "last checkpoint: step 1; continue with" in one_line(result)
    resume(run)
    assert [line["step"] for line in metrics(run, "eval")] == [0, 1, 2]


def test_a_last_checkpoint_that_fails_leaves_the_one_before_usable(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the final checkpoint replaces that of the same step."""
    run = tmp_path / "run"
    shutil.copytree(straight, run)

    def full(root: Path, model_dirs: list[Path]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_require_space", full)
        patch.setattr(TrainingLoop, "_step", stop_at_once)
        assert crl("resume", run, "--plain", "--steps", 8).exit_code == 1
    assert "resuming at step 6" in resume(run, "--steps", 7)


async def stop_at_once(self: TrainingLoop, step: int) -> bool:
    self.stop.set()
    return False


def test_lost_metrics_are_noticed(killed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(killed, run)
    (run / "metrics.jsonl").unlink()
    assert f"warning: {run}/metrics.jsonl has 0 bytes instead of" in resume(run, "--steps", 3)


# ── exports ───────────────────────────────────────────────────────────────────────────────────────


def test_an_exported_model_is_the_model_of_the_checkpoint_with_a_card(
    straight: Path, tmp_path: Path
) -> None:
    before = contents(straight)
    for role in ("actor", "extractor"):
        folder = tmp_path / role
        result = crl("export", straight, folder, "--role", role, "--step", 4)
        assert (result.exit_code, result.stderr) == (0, "")
        source = straight / "checkpoints" / "4" / role
        assert result.stdout == f"exported the {role} of {source.parent} to {folder}\n"
        assert equal_weights(folder, source)
        names = {path.name for path in source.iterdir()}
        assert {path.name for path in folder.iterdir()} == (
            names - {"optimizer.safetensors"} | {"README.md"}
        )
        AutoTokenizer.from_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(folder)
        card = (folder / "README.md").read_text()
        assert card.startswith("---\nlibrary_name: transformers\nlicense: apache-2.0\n")
        assert "- method: complementary\n- tasks: room\n- steps: 4, of 4 groups of 4 episo" in card
        assert "- command: `crl train --tasks room" in card
        evaluation = metrics(straight, "eval")[0]
        value = evaluation["eval/room/seen/success/free"]
        assert f"| room | seen | without experience | 8 | {value:.3f} [" in card
    assert contents(straight) == before
    result = crl("export", straight, tmp_path / "actor")
    assert "exists and is not an empty directory" in one_line(result)
    assert "Did you mean actor?" in one_line(
        crl("export", straight, tmp_path / "x", "--role", "act")
    )


def test_an_exported_bank_is_the_bank_at_the_checkpoint(straight: Path, tmp_path: Path) -> None:
    before, folder = contents(straight), tmp_path / "bank"
    result = crl("export", straight, folder, "--bank", "--step", 4)
    assert (result.exit_code, result.stderr) == (0, "")
    assert contents(straight) == before
    assert {path.name for path in folder.iterdir()} == {"bank.sqlite", "README.md"}
    size = [line["bank/size"] for line in metrics(straight, "bank")][3]
    active = rows(folder / "bank.sqlite", "SELECT uid FROM entries WHERE status = 'active'")
    assert len(active) == size
    assert f"has {size} active experiences" in (folder / "README.md").read_text()
    metadata = DatasetCard.load(folder / "README.md").data.to_dict()
    assert metadata["size_categories"] == ["n<1K"]
    assert "license" not in metadata
    assert rows(folder / "bank.sqlite", "SELECT * FROM requests") == []

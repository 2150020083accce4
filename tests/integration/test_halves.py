"""The halves of a run: `crl rollout` plays episodes, `crl learn` trains on recorded ones."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from crl.config.models import resolve_model
from crl.run.halves import commands
from support.live_runs import HANGING_CLOSE, start, wait_for
from support.whole_runs import (
    DETERMINISTIC,
    SETS,
    crl,
    episode_files,
    episodes,
    equal_weights,
    lines,
    metrics,
    one_line,
    train,
    untimed,
)
from support.worker_rooms import BROKEN_SETTING

GROUPS = ("rollout.groups=4", "rollout.group_size=8", *SETS, *DETERMINISTIC)
STEPS = 3


def sets(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    train(run, *GROUPS, steps=STEPS)
    return run


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("played") / "run"
    result = crl("rollout", "--tasks", "room", "--method", "grpo", "--steps", 2, "--run-dir", run,
                 *sets(*GROUPS))  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"the episodes: {run}/episodes" in result.stdout
    return run


def test_rollouts_are_the_episodes_of_the_first_step(played: Path, trained: Path) -> None:
    files = [episode_files(run) for run in (played, trained)]
    for name in ("000001.jsonl.gz", "000001.npz"):
        assert files[0][name] == files[1][name]
    assert len(episodes(played)) == 2 * 32
    assert {v for t in episodes(played) for v in t["versions"]} == {-1, 0}, "nothing is trained"
    assert {line["kind"] for line in lines(played / "metrics.jsonl")} == {"train"}
    (first, second) = metrics(played, "train")
    assert (first["step"], second["step"]) == (1, 2)
    trained_line = metrics(trained, "train")[0]
    for name, value in untimed(first).items():
        if name.startswith(("rollout/", "staleness/")):
            assert trained_line[name] == value, name
    assert not (played / "checkpoints").exists()


def test_learning_from_a_run_gives_the_weights_of_the_run(trained: Path, tmp_path: Path) -> None:
    """The same steps on the recorded episodes change the weights in the same way, bit for bit."""
    learned = tmp_path / "learned"
    result = crl("learn", "--from", trained, "--run-dir", learned)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"the trained actor, in Hugging Face format: {learned}/actor" in result.stdout
    assert equal_weights(learned / "actor", trained / "checkpoints" / str(STEPS) / "actor")
    assert not equal_weights(learned / "actor", resolve_model("tiny-actor"))
    for own, of_run in zip(metrics(learned, "train"), metrics(trained, "train"), strict=True):
        for name in ("step", "actor/loss", "actor/grad_norm", "rollout/groups_with_signal"):
            assert own[name] == of_run[name], name
    names = {path.name for path in (learned / "actor").iterdir()}
    assert "optimizer.safetensors" not in names
    again = tmp_path / "again"
    assert crl("train", "--tasks", "room", "--method", "grpo", "--run-dir", again, "--steps", 1,
               *sets(*GROUPS, f"actor.model={learned}/actor")).exit_code == 0  # fmt: skip


def test_truncated_sampling_in_a_run_and_from_its_recorded_episodes(tmp_path: Path) -> None:
    """The trainer agrees with the engine, because it renormalises over the kept tokens."""
    run, learned = tmp_path / "run", tmp_path / "learned"
    train(run, *GROUPS, "actor.top_p=0.9", "actor.kl_coef=0.01", steps=2)
    with np.load(run / "episodes" / "000002.npz") as columns:
        sizes = columns["kept_counts"][columns["mask"] == 1]
        assert sizes.min() == 1
        assert 1 < sizes.max() < 100
    updated = [line for line in metrics(run, "train") if line["actor/updates"]]
    assert len(updated) == 2
    assert all(line["actor/mismatch_kl"] < 1e-8 for line in updated)
    assert crl("learn", "--from", run, "--run-dir", learned).exit_code == 0
    assert equal_weights(learned / "actor", run / "checkpoints" / "2" / "actor")


def test_learning_from_rollouts_with_other_settings(played: Path, tmp_path: Path) -> None:
    learned = tmp_path / "learned"
    options = (
        "--steps",
        1,
        *sets("actor.optimizer.learning_rate=1e-3", "actor.optimizer.warmup_steps=0"),
    )
    result = crl("learn", "--from", played, "--run-dir", learned, *options)
    assert result.exit_code == 0
    assert "train 1/1 " in result.stdout
    (line,) = metrics(learned, "train")
    assert line["actor/updates"] > 0
    assert line["actor/learning_rate"] == 1e-3


def test_one_recorded_step_is_enough(trained: Path, tmp_path: Path) -> None:
    file = trained / "episodes" / "000001.jsonl.gz"
    for name, options in (("whole", (trained, "--steps", 1)), ("file", (file,))):
        result = crl("learn", "--from", *options, "--run-dir", tmp_path / name)
        assert (result.exit_code, result.stderr) == (0, "")
    assert equal_weights(tmp_path / "whole" / "actor", tmp_path / "file" / "actor")
    second = trained / "episodes" / "000002.jsonl.gz"
    assert crl("learn", "--from", second, "--run-dir", tmp_path / "second").exit_code == 0
    assert [line["step"] for line in metrics(tmp_path / "second", "train")] == [2]


@pytest.mark.parametrize("name", ["000002.jsonl.gz", "000002.npz"])
def test_a_damaged_shard_is_found_before_the_training(
    name: str, played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, new = tmp_path / "copy", tmp_path / "new"
    shutil.copytree(played, copy)
    with (copy / "episodes" / name).open("r+b") as file:
        file.seek(200)
        file.write(bytes(100))
    with monkeypatch.context() as patch:
        patch.setattr(commands, "learn", None)
        result = crl("learn", "--from", copy, "--run-dir", new)
    assert result.exit_code == 2
    assert "or train on the steps before it with --steps N" in one_line(result)
    assert not new.exists()
    assert crl("learn", "--from", copy, "--run-dir", new, "--steps", 1).exit_code == 0


def test_another_model_with_the_same_tokenizer_learns(
    played: Path, trained: Path, tmp_path: Path
) -> None:
    other = trained / "checkpoints" / str(STEPS) / "actor"
    learn = ("learn", "--from", played, "--run-dir", tmp_path / "learned", "--steps", 1)
    assert crl(*learn, *sets(f"actor.model={other}")).exit_code == 0
    (line,) = metrics(tmp_path / "learned", "train")
    assert line["actor/approx_kl"] > 0


def test_rollouts_read_a_bank(tmp_path: Path) -> None:
    bank = tmp_path / "bank"
    small = (*GROUPS, "rollout.groups=2")
    result = crl("train", "--tasks", "room", "--run-dir", bank, "--steps", 2, *sets(*small))
    assert result.exit_code == 0, result.output
    before = (bank / "bank.sqlite").read_bytes()
    run = tmp_path / "run"
    result = crl("rollout", "--tasks", "room", "--steps", 3, "--run-dir", run,
                 *sets(*small, f"bank.init={bank}/bank.sqlite"))  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    used = [t for t in episodes(run) if t["used"]]
    assert used
    assert {t["condition"] for t in used} == {"guided"}
    assert (bank / "bank.sqlite").read_bytes() == before, "the bank is only read"
    assert not (run / "bank.sqlite").exists()


def test_episodes_that_all_fail_are_an_error(tmp_path: Path) -> None:
    run, learned = tmp_path / "run", tmp_path / "learned"
    settings = sets(*GROUPS[2:], "rollout.groups=1", "rollout.group_size=4", BROKEN_SETTING)
    result = crl("rollout", "--tasks", "room", "--method", "grpo", "--run-dir", run, *settings)
    error = "env: room: step: OSError: the game is broken"
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "error: task room: no episode has worked so far, and all 4 of this step failed. "
        f"The last error: {error} (traceback: {run / 'log.txt'})"
    )
    assert 'raise OSError("the game is broken")' in result.stdout
    assert len(episodes(run)) == 4
    result = crl("learn", "--from", run, "--run-dir", learned)
    assert result.exit_code == 1
    assert one_line(result).startswith(
        f"error: all 4 recorded episodes failed. The first error: {error} (traceback: "
    )


def test_episodes_without_a_signal_change_no_weights(tmp_path: Path) -> None:
    run, learned = tmp_path / "run", tmp_path / "learned"
    crl(
        "rollout",
        "--tasks",
        "room",
        "--method",
        "grpo",
        "--steps",
        1,
        "--run-dir",
        run,
        *sets(*GROUPS[2:], "rollout.groups=1", "rollout.group_size=4", "tasks.room.max_turns=1"),
    )
    result = crl("learn", "--from", run, "--run-dir", learned)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == (
        f"trained on 1 step; no update was made: the weights in {learned / 'actor'} are unchanged"
    )
    assert equal_weights(resolve_model("tiny-actor"), learned / "actor")


def test_wrong_input_is_refused(played: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    for options, message in (
        (("learn", "--from", tmp_path / "none", "--run-dir", new), "is not a run directory"),
        (("learn", "--from", played, "--run-dir", played), "exists and is not empty"),
        (
            ("learn", "--from", played, "--run-dir", new, "--steps", 5),
            "has episodes of only 2 steps",
        ),
        (
            ("learn", "--from", played / "metrics.jsonl", "--run-dir", new),
            "is not a file of recorded episodes. Give a file RUN/episodes/STEP.jsonl.gz",
        ),
        (
            ("learn", "--from", played / "episodes" / "000001.npz", "--run-dir", new),
            "is not a file of recorded episodes. Give a file RUN/episodes/STEP.jsonl.gz",
        ),
        (("rollout", "--tasks", "room", "--run-dir", played), "exists and is not empty"),
        (("rollout", "--tasks", "rom", "--run-dir", new), "is not a known task"),
        (
            ("rollout", "--tasks", "room", "--run-dir", new, *sets(f"bank.init={new}")),
            f"bank.init = '{new}': ",
        ),
        (
            ("learn", "--from", played, "--run-dir", new, *sets("actor.model=tiny-extractor")),
            "actor.model = 'tiny-extractor': does not have the tokenizer of ",
        ),
    ):
        result = crl(*options)
        assert result.exit_code == 2, result.output
        assert message in one_line(result)
    assert not new.exists()


@pytest.mark.parametrize("program", [pytest.param("", marks=pytest.mark.soak), HANGING_CLOSE])
def test_a_second_ctrl_c_ends_rollouts_that_do_not_close(
    program: str, mark: str, tmp_path: Path
) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    words = ["rollout", "--tasks", "room", "--steps", "1000", "--run-dir", str(run), *sets(*GROUPS)]
    with output.open("w") as stream:
        process = start(words, mark, tmp_path, stream, python=program)
        wait_for("train +2/1000", output, process)
        process.send_signal(signal.SIGINT)
        if program:
            wait_for("interrupted:", output, process)
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    last = output.read_text().splitlines()[-1]
    interrupted = f"interrupted: {run} is incomplete (press Ctrl-C again to exit immediately)"
    assert interrupted in output.read_text().splitlines()
    assert last == (f"exiting immediately: {run} is incomplete" if program else interrupted)
    assert "Traceback" not in output.read_text()


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (
            "empo2",
            "has an intrinsic reward, which crl rollout does not compute. "
            "Add --set empo2.novelty_coef=0, or use crl train.",
        ),
        (
            "reflexion",
            "reflects between attempts, but crl rollout writes no experience. Use crl train.",
        ),
        (
            "role_agent",
            "draws tasks again by their failures, but crl rollout analyses no failures. "
            "Add --set role_agent.replay_ratio=0, or use crl train.",
        ),
    ],
)
def test_methods_that_play_episodes_only_in_training(
    tmp_path: Path, method: str, reason: str
) -> None:
    result = crl("rollout", "--tasks", "room", "--method", method, "--run-dir", tmp_path / "run")
    assert result.exit_code == 2
    assert reason in one_line(result)
    assert not (tmp_path / "run").exists()


def test_role_agent_without_replay_plays_episodes(tmp_path: Path) -> None:
    run, replay = tmp_path / "run", "role_agent.replay_ratio=0"
    words = ["--tasks", "room", "--method", "role_agent", "--steps", "1", "--run-dir", run]
    assert crl("rollout", *words, *sets(replay, *GROUPS)).exit_code == 0
    assert episodes(run)


def test_episodes_of_a_method_that_trains_no_model(tmp_path: Path) -> None:
    run, new = tmp_path / "run", tmp_path / "new"
    train(run, *GROUPS, "method=reflexion", "reflexion.writer=extractor", steps=1)
    refused = crl("learn", "--from", run, "--run-dir", new)
    assert refused.exit_code == 2
    assert one_line(refused).strip() == (
        f"error: --from = '{run}': its method is reflexion, which trains no model. "
        "Add --set method=grpo."
    )
    learned = crl("learn", "--from", run, "--run-dir", new, *sets("method=grpo"))
    assert learned.exit_code == 0, learned.output
    assert "trained on 1 step" in learned.stdout

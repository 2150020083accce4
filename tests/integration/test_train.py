"""Whole runs through the command line, in seconds: the real loop, the tiny actor and the room.

In addition to the room, there are games that this file defines. Task files name them, like any
user's games.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from crl.engines.torch import Decoder, TorchEngine
from crl.envs.base import ActionSpace, EnvSpec, EnvTasks, Game
from crl.envs.places import UNSEEN_LAYOUTS, PlaceStream, fixed_tasks, seen_tasks
from crl.evaluation.evaluate import SuccessRate
from crl.methods.parts.training import SurrogateLoss
from crl.monitor.files import FileMonitor
from crl.records import writer
from crl.records.shards import COLUMNS
from crl.run import loop
from crl.run.checkpoint import latest_checkpoint
from crl.types import StepResult, Task
from support.whole_runs import (
    DETERMINISTIC,
    SMALL,
    WIDER,
    arguments,
    contents,
    crl,
    episode_files,
    episodes,
    equal_weights,
    lines,
    metrics,
    one_line,
    train,
    untimed,
    weights,
)

# ── games of this file ────────────────────────────────────────────────────────────────────────────


class Lottery:
    """Game in which every second ticket of a task wins, regardless of the action.

    Every group therefore contains both outcomes.
    """

    sold: ClassVar[dict[int, Iterator[int]]] = {}

    def reset(self, task: Task) -> str:
        self.tickets = self.sold.setdefault(task.seed, itertools.count())
        return "Say something."

    def step(self, action: str) -> StepResult:
        won = next(self.tickets) % 2 == 0
        return StepResult("", reward=float(won), done=True, success=won)

    def close(self) -> None: ...


class Broken(Lottery):
    def step(self, action: str) -> StepResult:
        raise OSError("the game\nis broken")


class Shaky(Lottery):
    """Lottery in which a loss raises an error.

    A method that trains on failed episodes learns from the difference. All other methods learn
    nothing.
    """

    def step(self, action: str) -> StepResult:
        result = super().step(action)
        if not result.success:
            raise ValueError("lost")
        return result


class Unruly(Lottery):
    """Lottery with invalid results.

    Of four episodes of a task, one ends without a text and one ends with a reward above the range.
    The other texts contain lone surrogates.
    """

    def reset(self, task: Task) -> str:
        return f"{super().reset(task)} \ud83d"

    def step(self, action: str) -> StepResult:
        results = (
            StepResult("\udcff", done=True),
            StepResult("", 1.0, done=True, success=True),
            StepResult(None),  # type: ignore[arg-type]
            StepResult("", 5.0),
        )
        return results[next(self.tickets) % 4]


class Bell(Lottery):
    """Lottery that presses Ctrl-C in its first step. Every step takes 0.2 s."""

    rung = False

    def step(self, action: str) -> StepResult:
        if not Bell.rung:
            Bell.rung = True
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        return super().step(action)


def spec_of(name: str, make: Callable[[], Game]) -> EnvSpec:
    goal = "In the {place}:"
    return EnvSpec(
        name=name,
        make_game=lambda rendering: make(),
        tasks=EnvTasks(
            lambda seed, settings: PlaceStream(name, goal, seed, settings),
            lambda split, n, seed, settings: (
                seen_tasks(name, goal, n, seed, settings)
                if split == "seen"
                else fixed_tasks(name, goal, UNSEEN_LAYOUTS, n)
            ),
        ),
        actions=ActionSpace(description="any text"),
        turns=1,
    )


class Stuck(Lottery):
    """Lottery whose steps hang until the test ends."""

    released = threading.Event()

    def step(self, action: str) -> StepResult:
        Stuck.released.wait(120)
        return super().step(action)


LOTTERY, BROKEN = spec_of("lottery", Lottery), spec_of("broken", Broken)
SHAKY, BELL, UNRULY = spec_of("shaky", Shaky), spec_of("bell", Bell), spec_of("unruly", Unruly)
STUCK = spec_of("stuck", Stuck)


def task_file(folder: Path, name: str, rendering: str = "compact") -> str:
    path = folder / f"{name}.toml"
    path.write_text(
        f'env = "{__name__}:{name.upper()}"\nrendering = "{rendering}"\nmax_turns = 2\n'
        "max_response_tokens = 6\n"
        "[stream]\nplaces = 4\npermanent = 2\n[eval]\nseen = 4\nunseen = 4\n"
    )
    return str(path)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of three deterministic steps in the room."""
    run = tmp_path_factory.mktemp("done") / "run"
    train(run, *WIDER, *DETERMINISTIC, steps=3)
    assert sum(line["actor/updates"] for line in metrics(run, "train")) > 0, (
        "a run that trains nothing proves nothing"
    )
    return run


# ── the run directory ─────────────────────────────────────────────────────────────────────────────


def test_a_run_in_half_precision_samples_with_what_it_trains(tmp_path: Path) -> None:
    """Check that engine and learner agree up to rounding.

    The checkpoint can also be evaluated.
    """
    run = tmp_path / "run"
    sets = (
        "learner.precision=bfloat16",
        "learner.activation_checkpointing=true",
        "rollout.max_staleness=0",
        "run.deterministic=true",
    )
    out = train(run, *sets, steps=3).stdout
    updated = [line for line in metrics(run, "train") if line["actor/samples"]]
    assert all(line["actor/mismatch_kl"] < 0.02 for line in updated)
    assert all(line["actor/mismatch_correlation"] > 0.99 for line in updated)
    assert any(line["actor/mismatch_kl"] > 0 for line in updated), "bfloat16 rounds"
    assert "nats per token" not in out
    saved = weights(latest_checkpoint(run / "checkpoints", print) / "actor")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert crl("eval", run).exit_code == 0


def test_files_of_a_run(done: Path) -> None:
    assert {path.name for path in done.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "episodes",
        ".lock",
        "log.txt",
        "summary.json",
        "checkpoints",
    }
    saved = json.loads((done / "config.json").read_text())
    assert saved.keys() == {"config", "prompts", "versions", "command", "lineage"}
    assert (
        saved["config"]["run"]["steps"],
        saved["config"]["tasks"]["room"]["eval"]["unseen"],
    ) == (
        3,
        8,
    )
    assert [path.name for path in (done / "checkpoints").iterdir()] == ["3"]
    manifest = json.loads((done / "checkpoints" / "3" / "manifest.json").read_text())
    assert (manifest["step"], manifest["models"], manifest["state"]["source"]["drawn"]) == (
        3,
        ["actor"],
        12,
    )
    assert "trained models: " in (done / "log.txt").read_text()


def test_metrics_are_flat(done: Path) -> None:
    log = lines(done / "metrics.jsonl")
    assert [(line["step"], line["kind"]) for line in log] == [
        (0, "eval"),
        (1, "train"),
        (2, "train"),
        (3, "train"),
        (3, "eval"),
    ]
    for line in log:
        assert list(line)[:3] == ["step", "kind", "time"]
        assert all(value is None or isinstance(value, int | float | str) for value in line.values())
    train_line, eval_line = log[1], log[0]
    assert not {"perf/process_memory_gib", "perf/cpu_load"} & train_line.keys(), "deterministic"
    for name in (
        "rollout/success",
        "rollout/errors",
        "staleness/max",
        "actor/updates",
        "actor/version",
        "time/wait",
        "perf/episodes_per_s",
    ):
        assert name in train_line
    for name in (
        "eval/room/seen/success/free",
        "eval/room/unseen/success/free/low",
        "eval/errors",
        "time/eval",
    ):
        assert name in eval_line


FIELDS = [
    *("step", "group", "member", "condition", "task", "goal", "seed", "split", "params"),
    *("success", "score", "reward", "rewards", "turns", "turn_rewards", "overtime_turns"),
    *("invalid_actions", "sampled_tokens", "truncated", "error", "segments", "used", "shown"),
    *("rejected", "tokens"),
]
"""Fields of an episode in RUN/episodes."""


def test_every_trajectory_has_the_documented_fields(done: Path) -> None:
    played = episodes(done)
    assert [(t["step"], t["group"], t["member"]) for t in played] == [
        (1 + i // 32, i // 8, i % 8) for i in range(96)
    ]
    for record in played:
        assert list(record) == [*FIELDS, *COLUMNS]
        assert (
            record["task"],
            record["split"],
            record["condition"],
            record["used"],
            record["error"],
        ) == (
            "room",
            "train",
            "free",
            [],
            None,
        )
        assert all(set(segment) == {"role", "origin", "text"} for segment in record["segments"])
        assert len({len(record[column]) for column in ("ids", "mask", "logprobs", "versions")}) == 1
        assert {v for v, m in zip(record["versions"], record["mask"], strict=True) if m} <= {
            0,
            1,
            2,
        }
        assert all(
            (lp == 0) == (m == 0) or lp == 0
            for lp, m in zip(record["logprobs"], record["mask"], strict=True)
        )
    for group in range(12):
        members = [t for t in played if t["group"] == group]
        assert (
            len({(t["seed"], t["segments"][0]["text"], t["segments"][1]["text"]) for t in members})
            == 1
        ), "one task, one start"


def test_the_work_on_a_batch_leaves_the_event_loop_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that metrics, minibatches and records of thousands of tokens are made on threads."""
    threads: dict[str, set[bool]] = defaultdict(set)

    def observe(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def observed(*args: Any, **kwargs: Any) -> Any:
            threads[name].add(threading.current_thread() is threading.main_thread())
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, observed)

    observe(loop, "rollout_metrics")
    observe(loop, "training_batch")
    observe(writer, "write_shard")
    train(tmp_path / "run")
    assert threads == {
        name: {False} for name in ("rollout_metrics", "training_batch", "write_shard")
    }


def test_old_episodes_are_deleted(tmp_path: Path) -> None:
    train(tmp_path / "run", "run.keep_episodes=2", steps=4)
    assert {t["step"] for t in episodes(tmp_path / "run")} == {3, 4}


def test_metrics_match_the_trajectories(done: Path) -> None:
    played = episodes(done)
    for line in metrics(done, "train"):
        batch = [t for t in played if t["step"] == line["step"]]
        assert line["rollout/episodes"] == len(batch) == 32
        assert line["rollout/success"] == pytest.approx(sum(t["success"] for t in batch) / 32)
        assert line["rollout/reward"] == pytest.approx(sum(t["reward"] for t in batch) / 32)
        assert line["rollout/turns"] == pytest.approx(sum(t["turns"] for t in batch) / 32)
        assert line["rollout/sampled_tokens"] == sum(sum(t["mask"]) for t in batch)
        assert line["rollout/env_turns"] == sum(t["turns"] for t in batch), (
            "without experience there is no overtime"
        )
        so_far = [t for t in played if t["step"] <= line["step"]]
        assert line["total/env_turns"] == sum(t["turns"] for t in so_far)
        assert line["total/env_turns/overtime"] == 0
        assert line["total/sampled_tokens/actor"] == sum(sum(t["mask"]) for t in so_far)
        groups = [
            {t["reward"] for t in batch if t["group"] == group}
            for group in {t["group"] for t in batch}
        ]
        assert line["rollout/groups_with_signal"] == sum(len(rewards) > 1 for rewards in groups)


# ── crl eval ──────────────────────────────────────────────────────────────────────────────────────


def test_eval_repeats_the_last_evaluation_and_changes_no_file(done: Path) -> None:
    before = contents(done)
    result = crl("eval", done)
    assert (result.exit_code, result.stderr) == (0, "")
    assert contents(done) == before
    last = metrics(done, "eval")[-1]
    for split in ("seen", "unseen"):
        rate = SuccessRate(round(8 * last[f"eval/room/{split}/success/free"]), 8)
        assert (
            f"  room {split:<6} {'without experience':<25}    8 episodes   {rate}\n"
            in result.stdout
        )
    assert f"{done}/checkpoints/3, after 3 steps\n" in result.stdout
    assert crl("eval", done).stdout == result.stdout


def test_a_dead_engine_ends_eval_with_one_line(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(self: Decoder, arrivals: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Decoder, "step", out_of_memory)
    result = crl("eval", done)
    assert result.exit_code == 1
    assert one_line(result) == "error: the engine failed: RuntimeError: out of memory\n"


# ── the same seed, the same run ───────────────────────────────────────────────────────────────────


def test_deterministic_mode(done: Path, tmp_path: Path) -> None:
    train(tmp_path / "again", *WIDER, *DETERMINISTIC, steps=3)
    train(tmp_path / "other", *WIDER, *DETERMINISTIC, steps=3, seed=1)
    first, again, other = (
        lines(run / "metrics.jsonl") for run in (done, tmp_path / "again", tmp_path / "other")
    )
    assert list(map(untimed, again)) == list(map(untimed, first))
    assert list(map(untimed, other)) != list(map(untimed, first))
    trajectories = [episode_files(run) for run in (done, tmp_path / "again", tmp_path / "other")]
    assert trajectories[0] == trajectories[1] != trajectories[2]
    assert equal_weights(done / "checkpoints/3/actor", tmp_path / "again/checkpoints/3/actor")


def test_evaluations_do_not_change_the_training(done: Path, tmp_path: Path) -> None:
    train(
        tmp_path / "watched",
        *WIDER,
        *DETERMINISTIC,
        "run.eval_every=1",
        "run.checkpoint_every=2",
        steps=3,
    )
    assert episode_files(tmp_path / "watched") == episode_files(done)
    assert [line["step"] for line in metrics(tmp_path / "watched", "eval")] == [0, 1, 2, 3]
    assert untimed(metrics(tmp_path / "watched", "eval")[-1]) == untimed(metrics(done, "eval")[-1])
    assert {path.name for path in (tmp_path / "watched" / "checkpoints").iterdir()} == {"2", "3"}


# ── training ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bound", [0, 1])
def test_staleness_stays_within_its_bound(bound: int, tmp_path: Path) -> None:
    train(
        tmp_path / "run",
        f"rollout.max_staleness={bound}",
        tasks=task_file(tmp_path, "lottery"),
        steps=4,
    )
    log = metrics(tmp_path / "run", "train")
    assert [line["actor/version"] for line in log] == [1, 2, 3, 4], (
        "every step has signal, so every step is one version"
    )
    assert max(line["staleness/max"] for line in log) == bound
    assert all(line["staleness/mean"] <= line["staleness/max"] for line in log)


def test_learning_rate_zero_changes_no_bit(tmp_path: Path, tiny_actor: Path) -> None:
    task = task_file(tmp_path, "lottery")
    train(tmp_path / "still", "actor.optimizer.learning_rate=0.0", tasks=task, steps=2)
    assert [line["actor/updates"] for line in metrics(tmp_path / "still", "train")] == [2, 2], (
        "the updates are made"
    )
    assert equal_weights(tmp_path / "still/checkpoints/2/actor", tiny_actor)
    train(tmp_path / "moved", tasks=task, steps=2)
    assert not equal_weights(tmp_path / "moved/checkpoints/2/actor", tiny_actor)


def test_any_causal_lm_can_be_the_actor(tmp_path: Path, random_qwen3: Path) -> None:
    sets = (
        f"actor.model={random_qwen3}",
        "actor.max_context_tokens=2048",
        "tasks.room.max_turns=3",
        "tasks.room.max_response_tokens=8",
    )
    result = train(tmp_path / "room", *sets)
    assert "room  full rendering: the actor has the full profile" in result.stdout
    played = episodes(tmp_path / "room")
    assert [t["error"] for t in played] == [None] * 8
    assert {t["turns"] for t in played} == {3}
    assert played[0]["segments"][0]["text"].startswith("You play a text game")
    assert "<answer>north</answer>" in played[0]["segments"][0]["text"]
    assert "Map:\n" in played[0]["segments"][2]["text"]

    train(tmp_path / "lottery", *sets[:2], tasks=task_file(tmp_path, "lottery", "full"))
    assert metrics(tmp_path / "lottery", "train")[0]["actor/version"] == 1
    assert not equal_weights(tmp_path / "lottery/checkpoints/1/actor", random_qwen3)
    assert crl("eval", tmp_path / "lottery").exit_code == 0


def test_a_checkpoint_can_be_trained_on(done: Path, tmp_path: Path) -> None:
    actor = done / "checkpoints" / "3" / "actor"
    result = train(tmp_path / "run", *WIDER, *DETERMINISTIC, f"actor.model={actor}")
    assert "room  compact rendering: the actor has the compact profile" in result.stdout
    before, after = metrics(tmp_path / "run", "eval")[0], metrics(done, "eval")[-1]
    assert {**untimed(before), "step": 3} == untimed(after), "the run starts from the checkpoint"


def test_a_window_makes_every_turn_a_sample(tmp_path: Path) -> None:
    train(tmp_path / "run", "tasks.room.context=window(1)")
    played = episodes(tmp_path / "run")
    long = [t for t in played if t["turns"] > 1]
    assert long
    assert all(len(t["ids"]) == len(t["mask"]) == t["turns"] for t in long)


def test_several_tasks_share_a_batch(tmp_path: Path) -> None:
    sets = ("tasks.room.eval.seen=2", "tasks.room.eval.unseen=0")
    train(tmp_path / "run", *sets, tasks=f"room,{task_file(tmp_path, 'lottery')}", steps=1)
    assert [t["task"] for t in episodes(tmp_path / "run")] == ["room"] * 4 + ["lottery"] * 4
    line = metrics(tmp_path / "run", "train")[0]
    assert line["rollout/success"] == pytest.approx(
        (line["rollout/room/success"] + line["rollout/lottery/success"]) / 2
    )
    names = metrics(tmp_path / "run", "eval")[0].keys()
    assert {
        "eval/room/seen/success/free",
        "eval/lottery/seen/success/free",
        "eval/lottery/unseen/success/free",
    } <= names
    assert "eval/room/unseen/success/free" not in names


def test_questions_and_rooms_share_a_batch(tmp_path: Path) -> None:
    sets = [
        f"tasks.{name}.eval.{split}={n}"
        for name in ("room", "search_qa")
        for split, n in (("seen", 2), ("unseen", 0), ("online_places", 0))
    ]
    train(tmp_path / "run", *sets, tasks="room,search_qa", steps=1)
    assert {t["task"] for t in episodes(tmp_path / "run")} == {"room", "search_qa"}
    assert "eval/search_qa/seen/success/free" in metrics(tmp_path / "run", "eval")[0]


def test_a_run_of_zero_steps_only_evaluates(tmp_path: Path, tiny_actor: Path) -> None:
    train(tmp_path / "run", steps=0)
    assert [line["kind"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == ["eval"]
    assert equal_weights(
        latest_checkpoint(tmp_path / "run" / "checkpoints", print) / "actor", tiny_actor
    )


# ── failures ──────────────────────────────────────────────────────────────────────────────────────


def test_an_environment_that_always_raises_ends_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = train(run, tasks=task_file(tmp_path, "broken"), steps=20, code=1)
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(
        "error: task broken: the first 16 episodes all failed. The last error: env: broken: step: "
        f"OSError: the game is broken (traceback: {run / 'log.txt'}"
    )
    for text in (result.stdout, (run / "log.txt").read_text()):
        assert 'raise OSError("the game\\nis broken")' in text, "the traceback shows the origin"


def test_the_evaluation_of_an_environment_that_always_raises_shows_the_origin(
    tmp_path: Path, tiny_actor: Path
) -> None:
    tasks = task_file(tmp_path, "broken")
    many = ("--set", "tasks.broken.eval.seen=16")
    result = crl("eval", tiny_actor, "--tasks", tasks, "--out", tmp_path / "out", *many)
    assert result.exit_code == 1
    assert 'raise OSError("the game\\nis broken")' in result.stderr
    assert "error: task broken: the first 16 episodes all failed" in result.stderr


@pytest.mark.parametrize("others", ["", "room,"])
def test_a_small_run_in_which_no_episode_of_a_task_works_fails(others: str, tmp_path: Path) -> None:
    run, sets = tmp_path / "run", ("tasks.broken.eval.seen=2", "tasks.broken.eval.unseen=0")
    if others:  # two groups of each task
        sets += ("tasks.room.eval.seen=2", "tasks.room.eval.unseen=0", "rollout.groups=4")
    result = train(run, *sets, tasks=others + task_file(tmp_path, "broken"), code=1)
    assert result.stderr.startswith(
        "error: task broken: no episode has worked so far, and all 8 of this step failed. "
        "The last error: env: broken: step: OSError: the game is broken (traceback: "
    )
    assert "trained models" not in result.stdout
    for text in (result.stdout, (run / "log.txt").read_text()):
        assert 'raise OSError("the game\\nis broken")' in text
    assert len(episodes(run)) == (16 if others else 8), "the failed episodes can be read"


def test_an_environment_that_always_hangs_ends_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    sets = ("rollout.env_timeout=0.05",)
    try:
        result = train(run, *sets, tasks=task_file(tmp_path, "stuck"), steps=20, code=1)
    finally:
        Stuck.released.set()
    assert "error: task stuck: the first 16 episodes all failed" in result.stderr
    assert "exceeded its timeout (rollout.env_timeout = 0.05 s)" in result.stderr


def test_a_run_in_which_nothing_finishes_reports_where_it_waits(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Stuck.released.clear()
    sets = ("run.stall_seconds=5", "run.stall_ends_run=true")
    try:
        result = train(run, *sets, tasks=task_file(tmp_path, "stuck"), code=1)
    finally:
        Stuck.released.set()
    assert "error: the run has stalled: nothing has finished for " in one_line(result)
    log = (run / "log.txt").read_text()
    assert re.search(r"\d+ × .*: crl/envs/hosting/threads\.py:\d+ in \w+, for \d+ s", log), log
    assert "crl/failures.py" not in log.split("nothing has finished")[1]
    assert re.search(r"environments: stuck: 8 in step, the longest for \d+ s\n", log), log
    for line in (
        "0 of 1 steps completed",
        "rollouts: the next group is 0; groups up to 3 may start (0 steps completed, max_s",
        "environments: 8 environments in use, 0 failed, 0 replaced",
        "actor engine: 0 requests in flight, 0 of them not begun",
    ):
        assert line in log
    assert not (run / "checkpoints").exists()


def test_rollouts_in_which_nothing_finishes_report_where_they_wait(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Stuck.released.clear()
    sets = [*("--set", "run.stall_seconds=2"), *("--set", "run.stall_ends_run=true")]
    try:
        result = crl("rollout", "--tasks", task_file(tmp_path, "stuck"), "--run-dir", run, *sets)
    finally:
        Stuck.released.set()
    assert result.exit_code == 1
    assert "error: the run has stalled: nothing has finished for " in one_line(result)
    assert re.search(
        r"\d+ × .*: crl/envs/hosting/threads\.py:\d+ in", (run / "log.txt").read_text()
    )


def test_errors_are_never_trained_on(
    tmp_path: Path, tiny_actor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = []
    monkeypatch.setattr(TorchEngine, "update_weights", lambda engine, handle: syncs.append(handle))
    result = train(tmp_path / "run", tasks=task_file(tmp_path, "shaky"), steps=2)
    assert syncs == [], "unchanged weights are not sent"
    errors = sum(line["rollout/errors"] for line in metrics(tmp_path / "run", "train"))
    for text in (
        f"\n{errors} training episodes failed with an error and were not trained on\n",
        "warning: in 2 of 2 steps no sample could be trained on\n",
        "\nno update of the actor was made: its weights are unchanged\n",
        f"\ncheckpoint: {tmp_path / 'run'}/checkpoints/2\n",
    ):
        assert text in result.stdout
    assert equal_weights(tmp_path / "run/checkpoints/2/actor", tiny_actor)
    for line in metrics(tmp_path / "run", "train"):
        assert 0 < line["rollout/errors"] < 8
        assert (line["rollout/groups_with_signal"], line["actor/updates"]) == (0, 0)
        assert line["env/failures"] >= line["rollout/errors"]
        assert line["env/replaced"] == 0


def test_invalid_results_fail_only_their_episodes(tmp_path: Path) -> None:
    train(tmp_path / "run", tasks=task_file(tmp_path, "unruly"))
    (line,) = metrics(tmp_path / "run", "train")
    assert (line["rollout/errors"], line["env/replaced"], line["actor/version"]) == (4, 0, 1)
    errors = [t["error"] for t in episodes(tmp_path / "run") if t["error"]]
    assert sum("a result's text must be a str" in error for error in errors) == 2
    assert (
        sum("the total reward of an episode must be in [0, 1], not 5" in error for error in errors)
        == 2
    )


def test_an_engine_that_dies_ends_the_run_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Decoder.step

    def failing_step(self: Decoder, arrivals: Any) -> Any:
        if self.version == 1:
            raise RuntimeError("out of memory")
        return step(self, arrivals)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "step", failing_step)
        result = train(
            tmp_path / "run",
            "rollout.max_staleness=0",
            tasks=task_file(tmp_path, "lottery"),
            steps=3,
            code=1,
        )
    assert one_line(result) == (
        "error: the engine failed: RuntimeError: out of memory (traceback: "
        f"{tmp_path / 'run' / 'log.txt'}; last checkpoint: step 1; "
        f"continue with: crl resume {tmp_path / 'run'})\n"
    )
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "Traceback (most recent call last)" in log
    assert "EngineError: the engine failed: RuntimeError: out of memory" in log
    assert latest_checkpoint(tmp_path / "run" / "checkpoints", print).name == "1"
    assert crl("eval", tmp_path / "run").exit_code == 0


def test_a_crash_in_the_middle_of_a_step_writes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that no checkpoint is written when the weights have changed but the counters have not.

    A run that is resumed from this state would train the step twice.
    """

    def failing_load(self: Decoder, weights: Any) -> None:
        raise RuntimeError("cable pulled")

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "load", failing_load)
        result = train(tmp_path / "run", tasks=task_file(tmp_path, "lottery"), code=1)
    assert "the engine failed: RuntimeError: cable pulled" in one_line(result)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_learner_that_dies_ends_the_run_without_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, calls = SurrogateLoss.__call__, []

    def failing_step(self: SurrogateLoss, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        if len(calls) > 2:  # the minibatches of the first step
            raise RuntimeError("shapes differ")
        return loss(self, *args, **kwargs)

    monkeypatch.setattr(SurrogateLoss, "__call__", failing_step)
    result = train(tmp_path / "run", tasks=task_file(tmp_path, "lottery"), steps=3, code=1)
    assert one_line(result) == (
        "error: the learner failed: RuntimeError: shapes differ (traceback: "
        f"{tmp_path / 'run' / 'log.txt'})\n"
    )
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "LearnerError: the learner failed: RuntimeError: shapes differ" in log
    assert 'raise RuntimeError("shapes differ")' in log, "the traceback shows the origin"
    assert [line["step"] for line in metrics(tmp_path / "run", "train")] == [1]
    assert not (tmp_path / "run" / "checkpoints").exists(), "its weights can no longer be trusted"
    assert "has no complete checkpoint" in one_line(crl("eval", tmp_path / "run"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_writes_a_checkpoint(number: signal.Signals, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [
        sys.executable,
        "-c",
        "from crl.cli.main import main; main()",
        *arguments(run, "room", SMALL, 10_000, 0),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("train     2/"):
                break
        process.send_signal(number)
        output, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (130, "")
    assert "interrupted" in output
    step = metrics(run, "train")[-1]["step"]
    assert latest_checkpoint(run / "checkpoints", print).name == str(step)
    assert f"interrupted after {step} of 10,000 steps" in output
    assert len(episodes(run)) == 8 * step
    assert crl("eval", run).exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_interrupted_before_its_start_shuts_down_cleanly(
    number: signal.Signals, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-c",
        "from crl.cli.main import main; main()",
        *arguments(tmp_path / "run", "room", (), 10_000, 0),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("run ")
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    text = f"interrupted before the first step of {tmp_path / 'run'}: there is nothing to resume. "
    assert errors.startswith(text)
    assert text in (tmp_path / "run" / "log.txt").read_text()


def test_a_run_in_the_background_ignores_ctrl_c_and_not_sigterm(tmp_path: Path) -> None:
    """Run with SIGINT ignored, as a shell starts a job with `&`."""
    run = tmp_path / "run"
    main = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "from crl.cli.main import main; main()"
    )
    command = [sys.executable, "-c", main, *arguments(run, "room", (), 10_000, 0)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("run ")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
    assert process.returncode == 130
    assert f"interrupted before the first step of {run}: " in (run / "log.txt").read_text()


def test_ctrl_c_after_the_run_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = FileMonitor.close

    def interrupted(monitor: FileMonitor) -> None:
        signal.raise_signal(signal.SIGTERM)
        close(monitor)

    monkeypatch.setattr(FileMonitor, "close", interrupted)
    assert "trained models: " in train(tmp_path / "run").stdout
    (line,) = metrics(tmp_path / "run", "train")
    assert line["perf/process_memory_gib"] > 0
    assert 0 < line["perf/machine_memory"] < 1


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(root: Path, **kept: int) -> None:
        raise PermissionError(13, "Permission denied", str(root))

    monkeypatch.setattr(loop, "prune_checkpoints", failing)
    result = train(tmp_path / "run")
    assert "warning: an old checkpoint cannot be deleted: [Errno 13] Permission" in result.stdout


def test_ctrl_c_does_not_wait_for_an_evaluation(tmp_path: Path) -> None:
    result = train(
        tmp_path / "run", "tasks.bell.eval.unseen=500", tasks=task_file(tmp_path, "bell"), code=130
    )
    assert latest_checkpoint(tmp_path / "run" / "checkpoints", print).name == "0"
    assert lines(tmp_path / "run" / "metrics.jsonl") == [], "an incomplete evaluation is not logged"
    assert "interrupted after 0 of 1 step: " in result.stdout


# ── user errors ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tasks", "rom"], "tasks = 'rom': is not a known task. Did you mean room?"),
        (
            ["--tasks", "room", "--set", "rollout.group=3"],
            "rollout.group = 3: is not a setting. Did you mean rollout.groups?",
        ),
        (
            ["--tasks", "room", "--set", "rollout.groups=x"],
            "rollout.groups = 'x': should be a valid integer",
        ),
        (
            ["--tasks", "room", "--set", "rollout.group_size=1"],
            "rollout.group_size = 1: should be greater than or equal to 2",
        ),
        (
            ["--tasks", "room", "--set", "actor.model=no/such"],
            "actor.model = 'no/such': is neither a known model nor a directory",
        ),
        (
            ["--tasks", "room", "--set", "run.deterministic=true"],
            "requires rollout.max_staleness = 0",
        ),
        (
            [
                *("--tasks", "room", "--set", "actor.model={folder}/hollow"),
                *("--set", "actor.max_context_tokens=1024"),
                *("--set", "tasks.room.max_response_tokens=64"),
            ],
            "the directory contains no weights",
        ),
        (
            ["--tasks", "{folder}/lottery.toml", "--set", "tasks.lottery.env=nowhere:SPEC"],
            "there is no module 'nowhere'",
        ),
        (
            ["--tasks", "room", "--set", "tasks.room.eval.unseen=100001"],
            "100,001 places were requested, but there are only 100,000",
        ),
    ],
)
def test_a_user_error_is_one_line_and_leaves_no_files(
    args: list[str], message: str, tmp_path: Path, tiny_actor: Path
) -> None:
    task_file(tmp_path, "lottery")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "config.json").write_bytes((tiny_actor / "config.json").read_bytes())
    arguments = [arg.format(folder=tmp_path) for arg in args]
    result = crl(
        "train", *arguments, "--method", "grpo", "--steps", "1", "--run-dir", tmp_path / "run"
    )
    assert result.exit_code == 2, result.output
    assert message in one_line(result)
    assert not list((tmp_path / "run").glob("*")), "the directory was cleared"


def test_a_run_is_never_overwritten(done: Path) -> None:
    before = contents(done)
    result = crl("train", "--tasks", "room", "--run-dir", done)
    assert result.exit_code == 2
    assert ": exists and is not empty" in one_line(result)
    assert contents(done) == before


def test_eval_of_a_directory_that_is_no_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        result = crl("eval", path)
        assert result.exit_code == 2
        assert "is not a run directory" in one_line(result)

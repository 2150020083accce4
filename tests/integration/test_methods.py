"""Whole runs of the methods of the field, with the bundled models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.whole_runs import DETERMINISTIC, arguments, crl, metrics

SETS = (
    "rollout.groups=4",
    "rollout.group_size=4",
    "tasks.room.eval.seen=4",
    "tasks.room.eval.unseen=4",
    *DETERMINISTIC,
)


def trained(run: Path, method: str, *sets: str, steps: int = 2) -> list[dict[str, Any]]:
    """Return the lines of the training steps of a run, without times."""
    result = crl(*arguments(run, "room", (*SETS, *sets), steps, 0, method))
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return [
        {key: value for key, value in line.items() if not key.startswith(("time", "perf/"))}
        for line in metrics(run, "train")
    ]


def test_gigpo_is_grpo_with_step_advantages(tmp_path: Path) -> None:
    grpo = trained(tmp_path / "grpo", "grpo")
    without = trained(tmp_path / "without", "gigpo", "gigpo.step_weight=0")
    gigpo = trained(tmp_path / "gigpo", "gigpo")
    assert without == grpo
    assert gigpo[0]["rollout/reward"] == grpo[0]["rollout/reward"], "the same first episodes"
    assert gigpo[0]["actor/grad_norm"] != grpo[0]["actor/grad_norm"]


def test_only_bank_and_extractor_learn_if_the_actor_is_not_trained(tmp_path: Path) -> None:
    """Train, evaluate, resume and export a run whose actor keeps its weights."""
    run = tmp_path / "run"
    sizes = ("tasks.room.eval.online_places=0", "eval.probe_every=0", "extractor.batch=4")
    places = ("tasks.room.stream.places=1", "tasks.room.stream.permanent=1")
    sets = ("actor.train=false", "rollout.max_staleness=0", *sizes, *places)
    steps = trained(run, "complementary", *sets, steps=3)
    assert not any(key.startswith("actor/l") for line in steps for key in line), "no learner"
    assert (
        "total/trained_tokens/actor" not in steps[-1] or not steps[-1]["total/trained_tokens/actor"]
    )
    assert any(line["extractor/updates"] for line in metrics(run, "extractor"))
    assert {path.name for path in (run / "checkpoints" / "3").iterdir()} == {
        "extractor",
        "manifest.json",
    }
    first, last = metrics(run, "eval")
    same = "eval/room/unseen/success/free"
    assert first[same] == last[same], "the same weights in the same episodes"

    assert crl("eval", run).exit_code == 0
    assert crl("eval", run, "--tasks", "room,maze", "--set", "tasks.maze.eval.seen=2",
               "--set", "tasks.maze.eval.unseen=2").exit_code == 0  # fmt: skip
    resumed = crl("resume", run, "--steps", "4")
    assert (resumed.exit_code, resumed.stderr) == (0, "")
    assert "the actor was not trained (actor.train)" in resumed.stdout
    assert "no sample could be trained on" not in resumed.stdout
    exported = crl("export", run, tmp_path / "actor")
    assert (exported.exit_code, exported.stdout) == (2, "")
    assert exported.stderr.startswith("error: role = 'actor': ")
    assert exported.stderr.endswith(
        "has no actor, because the run did not train one. Export the extractor.\n"
    )
    changed = crl("resume", run, "--steps", "5", "--set", "actor.train=true")
    assert "actor.train = True: cannot change from False" in changed.stderr
    learned = crl("learn", "--from", run, "--run-dir", tmp_path / "learned", "--steps", "1")
    assert learned.exit_code == 0, "recorded episodes can train the actor"

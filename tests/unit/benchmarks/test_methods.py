"""Tuning of the methods and the duration of their steps, on numbers worked by hand."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from crl.config import load
from crl.config.layers import leaves
from support.paths import ROOT, benchmark

coevolution = benchmark("coevolution")
figures = benchmark("figures")
methods = benchmark("methods")


def metrics(seen: float, online: float | None = None) -> list[dict[str, Any]]:
    last = {"kind": "eval", "eval/room/seen/success/free": seen}
    if online is not None:
        last["eval/room/unseen/success/online"] = online
    return [{"kind": "eval", "eval/room/seen/success/free": 0.1}, last]


def test_the_score_is_the_mean_of_the_metrics_that_a_run_has() -> None:
    assert methods.score(metrics(0.6, 0.8)) == pytest.approx(0.7)
    assert methods.score(metrics(0.6)) == pytest.approx(0.6)


def test_every_method_is_tried_with_the_same_changes_and_seeds() -> None:
    runs = methods.runs()
    for arm in figures.TRAINED_METHODS:
        for change in ("", *figures.CHANGES):
            of_setting = [run for run in runs if run.arm == figures.changed(arm, change)]
            assert sorted(run.seed for run in of_setting) == [*methods.SEEDS]
    assert not {*methods.SEEDS} & {*figures.FIGURES["methods"].seeds}


def test_scores_are_means_over_seeds_and_the_best_setting_is_marked() -> None:
    bonus = {"gigpo 4 minibatches": 0.2, "gigpo short warm-up": 0.1}
    stored = {
        run: {"metrics": metrics(0.5 + bonus.get(run.arm, 0.0) + 0.02 * run.seed)}
        for run in methods.runs()
    }
    scores = methods.scores(stored)
    assert scores["gigpo"] == pytest.approx(
        {"": 0.51, "4 minibatches": 0.71, "short warm-up": 0.61}
    )
    assert methods.best(scores["gigpo"]) == "4 minibatches"
    assert methods.best(scores["none"]) == "", "of equal settings, the preset"
    del stored[methods.runs()[-1]]
    assert [*methods.scores(stored)] == [arm for arm in scores if arm != "self-distillation"]
    assert "| gigpo | 0.510 | **0.710** | 0.610 |" in methods.table(scores).splitlines()


def test_the_documented_table_and_the_settings_in_use_are_those_of_the_stored_runs() -> None:
    scores = methods.stored_scores()
    documented = (ROOT / "docs" / "results" / "tiny-models.md").read_text("utf-8")
    assert methods.table(scores) in documented
    choices = {arm: methods.best(of_method) for arm, of_method in scores.items()}
    assert {arm: change for arm, change in choices.items() if change} == figures.TUNED
    assert [*scores] == [*figures.TRAINED_METHODS], "no run is missing"


def test_the_first_steps_are_not_timed() -> None:
    ends = [10.0, 19.0, 28.0, 37.0, 46.0, 48.0, 49.0]
    lines = [{"kind": "train", "time": end} for end in ends]
    lines.insert(6, {"kind": "extractor", "time": 47.0})
    assert methods.step_seconds(lines) == pytest.approx(1.5), "steps 6 and 7: 2 s and 1 s"


def test_a_measurement_of_seconds_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, made = tmp_path / "seconds.json", []

    def seconds(task: str, arm: str, steps: int) -> float:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append((task, arm))
        return 1.0

    monkeypatch.setattr(methods, "seconds_per_step", seconds)
    with pytest.raises(KeyboardInterrupt):
        methods.time_steps(25, out)
    first, made = made, []
    with pytest.raises(KeyboardInterrupt):
        methods.time_steps(25, out)
    assert not {*first} & {*made}
    with pytest.raises(SystemExit, match="has results of other settings"):
        methods.time_steps(30, out)


def test_seconds_are_shown_with_their_ratio_to_grpo_in_the_same_task() -> None:
    none = figures.tuned("none")
    timings = [
        {"task": task, "arm": arm, "seconds": seconds}
        for task, arm, seconds in (
            ("room", none, 2.0), ("room", "empo2", 3.0),
            ("webshop", none, 4.0), ("webshop", "empo2", 2.0),
        )
    ]  # fmt: skip
    rows = methods.seconds_table(timings).splitlines()
    assert rows[0] == "|  | room | webshop |"
    assert rows[-1] == "| empo2 | 3.00 (1.50×) | 2.00 (0.50×) |"


def test_the_documented_seconds_are_the_stored_ones() -> None:
    results = ROOT / "benchmarks" / "results" / "methods_seconds.json"
    rows = json.loads(results.read_text("utf-8"))["rows"]
    figure = figures.FIGURES["methods"]
    arms = {(task, arm) for task in figure.settings for arm in figure.arms}
    assert {(row["task"], row["arm"]) for row in rows} == arms
    documented = (ROOT / "docs" / "results" / "speed.md").read_text("utf-8")
    assert methods.seconds_table(rows) in documented


def test_the_stored_runs_are_complete_and_have_the_settings_of_today() -> None:
    """A change of a default would otherwise mix runs with different settings in one figure."""
    figure, sweep = figures.FIGURES["methods"], methods.sweep()
    today: dict[tuple[str, str], dict[str, Any]] = {}
    differences = set()
    for run in coevolution.runs_of(figure, figure.seeds):
        if (stored := sweep.stored(run)) is None:
            continue
        options = sweep.options(run)
        sets = [text for name, text in pairwise(options) if name == "--set"]
        if (run.setting, run.arm) not in today:
            config = load(figures.SETTINGS[run.setting], sets=sets)
            today[run.setting, run.arm] = dict(leaves(config.model_dump(mode="json")))
        now, then = today[run.setting, run.arm], dict(leaves(stored["config"]["config"]))
        evaluated = [line["step"] for line in stored["metrics"] if line["kind"] == "eval"]
        assert evaluated == [0, then["run.steps"]], run
        differences |= {
            (run.arm, key, then.get(key), now.get(key))
            for key in now.keys() | then.keys()
            if now.get(key) != then.get(key) and key != "run.seed"
        }
    # No task of the figure has variations (test_elsewhere_a_goal_has_no_variations).
    assert differences == {("reflexion", "bank.scope", "goal", "variation")}

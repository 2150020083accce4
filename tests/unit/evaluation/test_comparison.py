"""Comparison of runs: intervals worked by hand, and which runs are paired."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crl.config.load import dump, load, load_saved
from crl.errors import ConfigError
from crl.evaluation.comparison import (
    RunResult,
    arms_of,
    compare,
    read_run,
    repeated_seeds,
    welch_half_width,
)
from crl.evaluation.evaluate import EvalKey
from crl.evaluation.report import Estimate
from crl.evaluation.saved import save
from crl.prompts import FOLDER, hashes
from crl.report.run_record import read_runs
from support.evaluations import episode, evaluation
from support.whole_runs import crl

KEY: EvalKey = ("room", "unseen", "free")


def run(name: str, seed: int, value: float, **settings: object) -> RunResult:
    rates = {KEY: Estimate(value, value - 0.1, value + 0.2)}
    return RunResult(Path(name), seed, {"actor.x": 1, **settings}, rates)


def test_paired_over_seeds_by_hand() -> None:
    comparison = compare(
        [
            run("a0", 0, 0.50), run("a1", 1, 0.60), run("a2", 2, 0.40),
            run("b1", 1, 0.71, lr=2), run("b0", 0, 0.60, lr=2), run("b2", 2, 0.49, lr=2),
        ]
    )  # fmt: skip
    (difference,) = comparison.differences
    # Differences 0.10, 0.11, 0.09: mean 0.10, s = 0.01, t of 2 degrees of freedom is 4.302653.
    assert difference.value == pytest.approx(0.10)
    half = 4.302653 * 0.01 / 3**0.5
    assert (difference.low, difference.high) == pytest.approx((0.1 - half, 0.1 + half))
    assert (difference.arms, difference.method) == ("B − A", "paired over 3 seeds")
    assert comparison.differing == {"lr": ["unset", 2]}
    assert [arm.seeds for arm in comparison.arms] == [[0, 1, 2], [1, 0, 2]]
    mean = comparison.means[KEY][0]
    assert mean is not None
    assert mean.value == pytest.approx(0.5)


def test_of_different_tasks_only_the_names_differ() -> None:
    a = {"tasks.room.max_turns": 8, "tasks.room.context": "full"}
    b = {"tasks.room.max_turns": 9, "tasks.maze.max_turns": 8}
    assert compare([run("a", 0, 0.5, **a), run("b", 0, 0.6, **b, lr=2)]).differing == {
        "tasks": ["room", "maze, room"],
        "lr": ["unset", 2],
    }
    other = {"tasks.room.max_turns": 9, "tasks.room.context": "full"}
    same = compare([run("a", 0, 0.5, **a), run("b", 0, 0.6, **other)])
    assert same.differing == {"tasks.room.max_turns": [8, 9]}


def test_rates_of_a_task_stand_together() -> None:
    keys = [("room", "seen", "free"), ("maze", "seen", "free"), ("room", "unseen", "online")]
    rates = dict.fromkeys(keys, Estimate(0.5, 0.4, 0.6))
    runs = [RunResult(Path(name), 0, {"lr": name}, rates) for name in "ab"]
    assert [*compare(runs).means] == [keys[0], keys[2], keys[1]]


def test_other_seeds_are_not_paired() -> None:
    comparison = compare(
        [run("a0", 0, 0.2), run("a1", 1, 0.4), run("b2", 2, 0.6, lr=2), run("b3", 3, 0.8, lr=2)]
    )
    (difference,) = comparison.differences
    # Variances 0.02 / 2 each: total 0.02, 0.02² / (2 · 0.01²) = 2 degrees of freedom.
    half = 4.302653 * 0.02**0.5
    assert difference.value == pytest.approx(0.4)
    assert (difference.low, difference.high) == pytest.approx((0.4 - half, 1.0)), "cut"
    assert difference.method == "not paired, over runs (Welch)"
    assert welch_half_width([0.5, 0.5], [0.5, 0.5]) == 0.0


def test_intervals_are_cut_to_possible_rates() -> None:
    comparison = compare(
        [run("a0", 0, 0.2), run("a1", 1, 0.5), run("b0", 0, 0.9, lr=2), run("b1", 1, 0.4, lr=2)]
    )
    assert [str(mean) for mean in comparison.means[KEY]] == [
        "0.350 [0.000, 1.000]",
        "0.650 [0.000, 1.000]",
    ]
    assert str(comparison.differences[0]) == "+0.300 [-1.000, +1.000]"


def test_equal_differences_have_no_interval() -> None:
    comparison = compare(
        [run("a0", 0, 0.5), run("a1", 1, 0.6), run("b0", 0, 0.6, lr=2), run("b1", 1, 0.7, lr=2)]
    )
    assert str(comparison.differences[0]) == "+0.100 [–, –]"
    assert str(compare([run("a", 0, 0.5), run("b", 1, 0.5)]).means[KEY][0]) == "0.500 [–, –]"


def test_one_run_per_arm_is_compared_over_episodes() -> None:
    (difference,) = compare([run("a", 0, 0.3), run("b", 0, 0.5, lr=2)]).differences
    half = (0.2**2 + 0.1**2) ** 0.5
    # MOVER: the lower ends are 0.1 below, the upper ends 0.2 above.
    assert (difference.value, difference.low, difference.high) == pytest.approx(
        (0.2, 0.2 - half, 0.2 + half)
    )
    assert difference.method == "not paired, over episodes: without the spread between seeds"


def test_intervals_of_saved_evaluations_are_over_goals(tmp_path: Path) -> None:
    folder = saved_run(tmp_path / "run", []) / "eval"
    save(evaluation(), folder, "name")
    saved = read_run(folder.parent, "name")
    assert saved.clustered
    other = RunResult(Path("b"), 0, {"lr": 2}, saved.rates, clustered=True)
    (difference,) = compare([saved, other]).differences
    assert difference.method == "not paired, over goals: without the spread between seeds"


def test_runs_of_one_arm_have_no_difference() -> None:
    comparison = compare([run("a", 0, 0.3), run("b", 1, 0.5)])
    assert (len(comparison.arms), comparison.differences, comparison.differing) == (1, [], {})


def test_a_rate_that_a_run_lacks_is_left_out() -> None:
    other = RunResult(Path("b"), 0, {"method": "grpo"}, {})
    comparison = compare([run("a", 0, 0.3), other])
    assert comparison.differences == []
    assert comparison.means[KEY][1] is None


@pytest.mark.parametrize(
    ("seeds", "found"),
    [
        ([0, 1, 2], []),
        ([0, 0, 1], ["seed 0 occurs twice in r0, r1: "]),
        ([3, 3, 3], ["seed 3 occurs 3 times in r0, r1, r2: "]),
    ],
)
def test_a_seed_that_an_arm_has_twice_is_named(seeds: list[int], found: list[str]) -> None:
    runs = [run(f"r{i}", seed, 0.5) for i, seed in enumerate(seeds)]
    other = run("other arm", seeds[0], 0.5, lr=2)
    warnings = repeated_seeds([*runs, other])
    assert [text[: len(start)] for text, start in zip(warnings, found, strict=True)] == found


@pytest.mark.parametrize(
    ("runs", "reason"), [(["a"], "is a single run"), (["a", "b", "a"], "is given twice")]
)
def test_fewer_than_two_runs_are_refused(runs: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        compare([run(name, i, 0.5) for i, name in enumerate(runs)])


def saved_run(path: Path, lines: list[dict]) -> Path:
    path.mkdir()
    dump(load(["room"], options={"run.steps": 4, "run.seed": 5}), path / "config.json")
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def eval_line(step: int, value: float) -> dict:
    name = "eval/room/unseen/success/free"
    metrics = {name: value, f"{name}/low": value - 0.1, f"{name}/high": None}
    return {"step": step, "kind": "eval", "time": None, **metrics, "eval/errors": 0}


def test_sections_that_a_method_ignores_are_not_compared(tmp_path: Path) -> None:
    runs = []
    for method in ("complementary", "grpo"):
        (run := tmp_path / method).mkdir()
        dump(load(["room"], options={"method": method}), run / "config.json")
        line = {"step": 100, "kind": "eval", "eval/room/seen/success/free": 0.5}
        (run / "metrics.jsonl").write_text(json.dumps(line) + "\n", "utf-8")
        runs.append(read_run(run))
    assert compare(runs).differing == {"method": ["complementary", "grpo"]}


def test_the_last_evaluation_of_a_finished_run_is_read(tmp_path: Path) -> None:
    path = saved_run(tmp_path / "run", [eval_line(0, 0.1), eval_line(4, 0.5)])
    result = read_run(path)
    assert (result.seed, result.rates[KEY].value, result.rates[KEY].low) == (5, 0.5, 0.4)
    assert result.settings["run.steps"] == 4
    assert "run.seed" not in result.settings


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    path = saved_run(tmp_path / "run", [eval_line(0, 0.1), eval_line(2, 0.5)])
    with pytest.raises(ConfigError, match=r"no evaluation after its last step, 4.*Leave it out"):
        read_run(path)
    manifest = path / "checkpoints" / "2" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    with pytest.raises(ConfigError, match=r"Continue it: crl resume"):
        read_run(path)


def test_damaged_lines_of_metrics_are_reported(tmp_path: Path) -> None:
    whole = saved_run(tmp_path / "whole", [eval_line(0, 0.1), eval_line(4, 0.5)])
    path = saved_run(tmp_path / "run", [eval_line(0, 0.1), eval_line(4, 0.5)])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ki\n{"step": 4, "kind"')
    assert (read_run(whole).damaged_lines, read_run(path).damaged_lines) == (0, 1)
    result = crl("compare", whole, path)
    assert result.exit_code == 0
    damage = f"warning: {path}/metrics.jsonl: 1 damaged line is left out\n"
    assert result.stderr.startswith(f"{damage}warning: seed 5 occurs twice in {whole}, {path}: ")


def test_a_damaged_last_evaluation_is_the_reason(tmp_path: Path) -> None:
    path = saved_run(tmp_path / "run", [eval_line(0, 0.1)])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ki\n')
    with pytest.raises(ConfigError, match="1 damaged line is left out"):
        read_run(path)


def test_a_saved_evaluation_is_read_by_name(tmp_path: Path) -> None:
    path = saved_run(tmp_path / "run", [])
    saved = evaluation(episode(0, 0), episode(1, 0, success=False), options={"samples": 1})
    save(saved, path / "eval", "step4")
    result = read_run(path, "step4")
    assert (result.rates[KEY].value, result.settings["--samples"]) == (0.5, 1)
    with pytest.raises(ConfigError, match="step4"):
        read_run(path, "step9")


def evaluated(tmp_path: Path, seed: int, **about: Any) -> RunResult:
    """Return a result of a run of 4 steps with a saved evaluation."""
    path = saved_run(tmp_path / f"run{seed}", [])
    save(evaluation(**({"step": 4} | about)), path / "eval", "mine")
    return replace(read_run(path, "mine"), seed=seed)


def test_an_evaluation_with_another_seed_is_another_arm(tmp_path: Path) -> None:
    path = saved_run(tmp_path / "other", [])
    save(evaluation(step=4, seed=6), path / "eval", "mine")
    comparison = compare([evaluated(tmp_path, 0), replace(read_run(path, "mine"), seed=1)])
    assert comparison.differing["seed of the evaluation"] == ["unset", 6]


def test_runs_of_one_arm_need_no_equal_options(tmp_path: Path) -> None:
    model = {"actor": {"model": str(tmp_path)}, "eval": {"concurrency": 7, "temperature": 1.0}}
    results = [
        evaluated(tmp_path, 0),
        evaluated(tmp_path, 1, options={"step": 4, "samples": 1, "experience": "none"}),
        evaluated(tmp_path, 2, options={"set": ["eval.concurrency=7"]}, settings=model),
    ]
    assert len(compare(results).arms) == 1
    banks = [
        {"path": str(tmp_path / "run3" / "bank.sqlite"), "snapshot": 8},
        {"path": str(tmp_path / "run4" / "bank.sqlite"), "snapshot": None},
    ]
    results = [
        evaluated(tmp_path, seed, experience="bank", bank=bank)
        for seed, bank in enumerate(banks, start=3)
    ]
    assert len(compare(results).arms) == 1


def test_sections_that_a_method_ignores_do_not_split_its_evaluations(tmp_path: Path) -> None:
    runs = []
    for seed in (0, 1):
        path = tmp_path / f"grpo{seed}"
        path.mkdir()
        dump(load(["room"], options={"method": "grpo"}), path / "config.json")
        settings = {"bank": {"max_per_goal": seed}}
        save(evaluation(step=4, settings=settings), path / "eval", "mine")
        runs.append(replace(read_run(path, "mine"), seed=seed))
    assert len(compare(runs).arms) == 1


@pytest.mark.parametrize(
    ("about", "key", "values"),
    [
        ({"samples": 4}, "--samples", [1, 4]),
        ({"step": 3}, "--step", ["last", 3]),
        ({"temperature": 0.5}, "eval.temperature", [1.0, 0.5]),
        ({"experience": "online"}, "--experience", ["none", "online"]),
        ({"bank": {"path": "x.sqlite", "snapshot": None}}, "--bank", ["unset", "another"]),
        ({"settings": {"retrieval": {"k": 9}}}, "retrieval.k", ["unset", 9]),
    ],
)
def test_other_evaluations_are_other_arms(
    tmp_path: Path, about: dict[str, Any], key: str, values: list[Any]
) -> None:
    comparison = compare([evaluated(tmp_path, 0), evaluated(tmp_path, 1, **about)])
    assert comparison.differing[key] == values


# ── prompts ───────────────────────────────────────────────────────────────────────────────────────


def run_with_prompt(path: Path, file: Path | None, *, seed: int = 5, recorded: bool = True) -> Path:
    """Write a finished run of a language model. `file` replaces its prompt `actor`."""
    sets = ["tasks.room.rendering=full", "actor.profile=full", "extractor.profile=full"]
    sets += [f"prompts.actor={file}"] if file else []
    config = load(["room"], options={"run.steps": 4, "run.seed": seed}, sets=sets)
    path.mkdir()
    texts = hashes(config.prompts.files) if recorded else {}
    dump(config, path / "config.json", prompts=texts)
    (path / "metrics.jsonl").write_text(json.dumps(eval_line(4, 0.5)) + "\n", "utf-8")
    return path


def prompt_file(path: Path, more: str = "") -> Path:
    """Write a copy of the bundled prompt `actor` with more text."""
    path.parent.mkdir(exist_ok=True)
    path.write_text((FOLDER / "actor.txt").read_text("utf-8") + more, "utf-8")
    return path


def test_prompts_are_compared_by_their_text(tmp_path: Path) -> None:
    first = run_with_prompt(tmp_path / "first", prompt_file(tmp_path / "a.txt", "Be brief."))
    same = run_with_prompt(tmp_path / "same", prompt_file(tmp_path / "b.txt", "Be brief."), seed=6)
    changed = run_with_prompt(tmp_path / "changed", prompt_file(tmp_path / "a.txt", "Be quick."))
    runs = [read_run(path) for path in (first, same, changed)]
    comparison = compare(runs)
    assert [len(arm.runs) for arm in comparison.arms] == [2, 1]
    assert comparison.differing.keys() == {"prompts.actor"}
    digests = [load_saved(path).prompts["actor"] for path in (first, changed)]
    assert comparison.differing["prompts.actor"] == [f"SHA-256 {d[:16]}" for d in digests]
    assert len(set(digests)) == 2
    records = read_runs([first, same])
    assert [len(arm.runs) for arm in arms_of([run.result for run in records])] == [2]


def test_a_copy_of_the_bundled_prompt_is_no_other_prompt(tmp_path: Path) -> None:
    bundled = read_run(run_with_prompt(tmp_path / "bundled", None))
    copy = prompt_file(tmp_path / "copy.txt")
    assert (
        len(compare([bundled, read_run(run_with_prompt(tmp_path / "a", copy, seed=6))]).arms) == 1
    )
    own = read_run(run_with_prompt(tmp_path / "b", prompt_file(tmp_path / "own.txt", "Be brief.")))
    assert compare([bundled, own]).differing.keys() == {"prompts.actor"}


def test_prompts_without_a_recorded_text_are_compared_by_path(tmp_path: Path) -> None:
    files = [prompt_file(tmp_path / name) for name in ("a.txt", "b.txt")]
    runs = [
        read_run(run_with_prompt(tmp_path / str(seed), file, seed=seed, recorded=False))
        for seed, file in enumerate([files[0], files[0], files[1]])
    ]
    comparison = compare(runs)
    assert [len(arm.runs) for arm in comparison.arms] == [2, 1]
    values = [f"{file} (text not recorded)" for file in files]
    assert comparison.differing == {"prompts.actor": values}


def test_prompts_of_saved_evaluations_are_compared_by_their_text(tmp_path: Path) -> None:
    files = [prompt_file(tmp_path / "a.txt"), prompt_file(tmp_path / "b.txt", "Be brief.")]
    runs = []
    for seed, file in enumerate([None, *files, files[1]]):
        path = run_with_prompt(tmp_path / str(seed), None, seed=seed)
        settings = {"prompts": {"actor": file and str(file), "distil": None}}
        texts = hashes({"actor": file} if file else {})
        saved = evaluation(step=4, seed=seed, settings=settings, prompts=texts)
        save(saved, path / "eval", "mine")
        runs.append(read_run(path, "mine"))
    comparison = compare(runs)
    assert [arm.seeds for arm in comparison.arms] == [[0, 1], [2, 3]], "a is the bundled text"
    digest = hashes({"actor": files[1]})["actor"]
    assert comparison.differing == {
        "prompt actor of the evaluation": ["unset", f"SHA-256 {digest[:16]}"]
    }


def test_prompts_of_older_evaluations_are_compared_by_path(tmp_path: Path) -> None:
    runs = []
    for seed, sets in enumerate(([], ["run.max_error_rate=1"], ["prompts.actor=a.txt"])):
        path = run_with_prompt(tmp_path / str(seed), None, seed=seed)
        options = {"set": sets} if sets else {}
        save(evaluation(step=4, seed=seed, options=options), path / "eval", "mine")
        runs.append(read_run(path, "mine"))
    comparison = compare(runs)
    assert [arm.seeds for arm in comparison.arms] == [[0, 1], [2]]
    assert comparison.differing == {
        "prompt actor of the evaluation": ["unset", "a.txt (text not recorded)"]
    }

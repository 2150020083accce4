"""Tests that run the benchmarks at a small size.

They check that a benchmark completes and that its output has the right shape. Times are not
checked.
"""

from __future__ import annotations

import importlib
import json
import lzma
import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from crl.config import load
from support.paths import ROOT, benchmark
from support.simulator import simulated

ARMS = ("off", "on", "ask", "critic")


@pytest.mark.soak
def test_rollout_latency_measures_all_arms_on_both_engines(tmp_path: Path):
    out = tmp_path / "results.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "rollout_latency.py"),
        "--quick",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    results = json.loads(out.read_text("utf-8"))
    rows = results["rows"]
    assert [(row["engine"], row["environments"], row["arm"]) for row in rows] == [
        *(("latency model", 32, arm) for arm in ARMS),
        *(("tiny model", 16, arm) for arm in ARMS),
    ]
    assert len(
        [line for line in done.stdout.splitlines() if line.startswith(("latency", "tiny"))]
    ) == len(rows)
    for row in rows:
        guided = 0 if row["arm"] == "off" else row["environments"] // 2
        assert row["failed"] == 0
        distilled = row["environments"] if guided else 0
        assert row["distilled"] == [distilled] * results["repetitions"]
        assert len(row["search_ms_each"]) == (results["repetitions"] if guided else 0)
        asked = row["searches"] - guided * results["repetitions"]
        assert asked >= 0 if row["arm"] == "ask" else asked == 0
        assert set(row["search_ms"]) == ({"p50", "p95", "max"} if guided else set())
        assert 0 < row["lag_ms"]["p50"] <= row["lag_ms"]["p99"] <= row["lag_ms"]["max"]
        assert (
            len(row["rollout_s"])
            == len(row["ratio"])
            == len(row["left_s"])
            == results["repetitions"]
        )
        assert min(row["rollout_s"]) > 0
    assert [f"### Figure {name}\n" in done.stdout for name in ("9c", "12", "14b")] == [True] * 3
    assert [row["ratio"] for row in rows if row["arm"] == "off"] == [
        [1.0] * results["repetitions"]
    ] * 2


@pytest.mark.soak
def test_the_environments_are_measured_separately_and_together(tmp_path: Path):
    out = tmp_path / "results.json"
    names = ["sokoban", "room", "webshop", "alfworld"]
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "environments.py"),
        *names,
        "--quick",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    rows = json.loads(out.read_text("utf-8"))["rows"]
    assert [row["tasks"] for row in rows] == [
        *({name: n} for name in names for n in (2, 4)),
        {"room": 1, "webshop": 1, "alfworld": 1},
    ]
    assert len(done.stdout.splitlines()) == len(rows) + 1
    for row in rows:
        assert row["episodes"] == sum(row["tasks"].values())
        assert min(row["make_ms"], row["reset_ms"], row["steps_per_s"]) > 0
        assert row["steps"] >= row["episodes"]
        assert row["in_all_mib"] > row["memory_mib"]


def test_the_numbers_of_episodes_may_be_chosen() -> None:
    script = str(ROOT / "benchmarks" / "environments.py")
    command = [sys.executable, script, "sokoban", "--quick", "--episodes", "3", "5"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [
        ["sokoban", "3"],
        ["sokoban", "5"],
    ]


def test_the_measured_memory_of_a_process():
    code = (
        "from environments import memory; before = memory(); held = b'x' * (64 << 20); "
        "print(memory() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "benchmarks",
        check=True,
        capture_output=True,
        text=True,
    )
    assert 32 < float(done.stdout) < 96, "64 MiB, give or take what others share with it meanwhile"


OF_TORCH = {
    "accelerate", "huggingface-hub", "jinja2", "numpy", "packaging", "pyyaml", "safetensors",
    "setuptools", "tokenizers", "torch", "transformers",
}  # fmt: skip
"""crl's dependencies that come with torch and transformers."""


def hidden_modules() -> list[str]:
    """Return the modules of crl's other dependencies, and of some that only tests use."""
    requirements = [Requirement(text) for text in requires("crl") or ()]
    hidden = {canonicalize_name(r.name) for r in requirements if "extra" not in str(r.marker)}
    hidden -= OF_TORCH
    modules = [
        module
        for module, packages in packages_distributions().items()
        if hidden & {canonicalize_name(package) for package in packages}
    ]
    assert {"rapidfuzz", "pydantic", "Stemmer"} <= set(modules)
    return [*modules, "deepspeed", "hypothesis", "pkg_resources", "pytest_asyncio", "vllm"]


BARE_MACHINE = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({hidden_modules()!r}))
"""
"""First lines of a program that imitate a bare machine, like many GPU machines.

Only torch and transformers with their dependencies, and pytest, can be imported.
"""


def test_the_gpu_tests_need_only_torch_and_transformers():
    code = (
        f"{BARE_MACHINE}import pytest; "
        "sys.exit(pytest.main(['-m', 'gpu', '--collect-only', 'tests/gpu']))"
    )
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/gpu/test_cuda.py::" in done.stdout


def test_the_gpu_tests_can_open_a_learner() -> None:
    """Check on the CPU that they have all settings of a learner."""
    code = (
        f"{BARE_MACHINE}sys.path.insert(0, 'tests/gpu')\n"
        "import torch\n"
        "from test_cuda import TINY_ACTOR, load_model, new_learner\n"
        "new_learner(load_model(TINY_ACTOR, torch.device('cpu')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_learner_is_compared_with_a_plain_step(tmp_path: Path):
    """Run the learner's benchmark with torch and transformers alone."""
    out = tmp_path / "results.json"
    start = (
        f"{BARE_MACHINE}sys.argv = ['', '--quick', '--out', {str(out)!r}]; "
        "sys.path.insert(0, 'benchmarks'); "
    )
    command = [
        sys.executable,
        "-c",
        start + "runpy.run_path('benchmarks/learner_throughput.py', run_name='__main__')",
    ]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    results = json.loads(out.read_text("utf-8"))
    crl, plain = results["rows"]
    assert (crl["step"], plain["step"]) == ("crl", "plain")
    assert len([line for line in done.stdout.splitlines() if line.startswith("tiny")]) == 2
    for row in (crl, plain):
        assert len(row["seconds"]) == 2
        assert min(row["seconds"]) > 0
        assert (
            row["tokens_per_s"] * sorted(row["seconds"])[0]
            <= row["tokens"]
            <= row["tokens_per_s"] * sorted(row["seconds"])[1] + 1
        )
        assert 0 < row["mfu"] < 1
        assert row["trained_tokens"] < row["tokens"]
    assert crl["read_tokens"] == crl["tokens"] == plain["tokens"] < plain["read_tokens"]
    assert crl["snapshot_s"] > 0
    assert min(results["copies_gb_per_s"].values()) > 0
    assert results["machine"]["cpus"] >= 1


def test_needed_operations_against_a_calculation_by_hand():
    code = """
from learner_throughput import SHAPES, needed_operations
from crl.types import Minibatch, TokenTrace, TrainSample
sample = TrainSample(TokenTrace((1, 2, 3), (0, 1, 1), (0.0, 0.0, 0.0), (-1, 0, 0)), 1.0, 1.0)
print(needed_operations("tiny", Minibatch((sample,) * 2, 4)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "benchmarks",
        check=True,
        capture_output=True,
        text=True,
    )
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128  # query, key and value, output, MLP
    assert float(done.stdout) == 6 * 2 * layer * 6 + 6 * 2 * 64 * (9 + 9) + 6 * 64 * 1024 * 4


def test_arms_are_compared_and_finished_runs_are_not_repeated(tmp_path: Path):
    out = tmp_path / "results.json"
    arms = ["none", "co-evolved", "always right"]
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "main_command.py"),
        "--quick",
        "--settings",
        "room",
        "--out",
        str(out),
    ]
    command += ["--arms", *arms, "--seeds", "10"]
    # The command was killed while it was writing this line.
    out.with_suffix(".jsonl").write_text('{"setting": "room", "arm": "none", "se')
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    runs = json.loads(out.read_text("utf-8"))["runs"]
    assert [(run["arm"], run["seed"]) for run in runs] == [(arm, 10) for arm in arms]
    for run in runs:
        metrics = run["metrics"]
        assert {
            "eval/room/unseen/success/online",
            "eval/room/unseen/success/alone",
            "eval/room/seen/success/free",
        } <= metrics.keys()
        assert ("eval/room/lessons/correct" in metrics) == (run["arm"] == "co-evolved")
        if run["arm"] == "none":
            assert (
                metrics["eval/room/unseen/success/online"]
                == metrics["eval/room/unseen/success/alone"]
            )
        assert {"start/probe/room/right", "end/probe/room/right"} <= metrics.keys()
        assert run["totals"]["total/env_turns"] > 0
    assert "online: co-evolved − none" in done.stdout
    again = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert (again.stdout, again.stderr) == (done.stdout, "")


COMPARISON_SCRIPT = """
import argparse, json
from pathlib import Path
from arms import ARMS, finished_runs, shared_options
from main_command import METRICS, PAIRS, tables
arguments = argparse.Namespace(steps=None, quick=False, set=[], out=Path(OUT))
def run_result(arm, seed, **changes):
    names = ("seen/success/free", "unseen/success/free", "unseen/success/online",\
 "unseen/success/alone")
    names += () if arm == "none" else ("seen/success/guided", "lessons/correct",\
 "lessons/correct/untrained")
    metrics = {f"eval/room/{name}": 0.1 * seed for name in names}
    metrics |= {f"{end}/probe/room/{advice}": value for end in ("start", "end")\
 for advice, value in (("none", 0.5), ("right", 0.9))}
    return {"setting": "room", "arm": arm, "seed": seed, **shared_options(arguments),\
 "metrics": metrics, "totals": {}, **changes}
runs = [run_result(arm, seed) for seed in (1, 2) for arm in ARMS]
others = [run_result("none", 1, quick=True, metrics={}),\
 run_result("none", 3, set=["run.steps=1"]), run_result("none", 4, **{"asked steps": 2})]
arguments.out.with_suffix(".jsonl").write_text("".join(json.dumps(run) + "\\n"\
 for run in [*runs, *others]))
assert list(finished_runs(arguments)) == [("room", run["arm"], run["seed"]) for run in runs],\
 "runs with other options are ignored"
table = tables(runs)
assert len([line for line in table.splitlines() if "by seed" in line]) == len(PAIRS),\
 "every comparison is printed"
assert "lessons, co-evolved − 3 × lessons, untrained, co-evolved: -0.300 ± 1.271  \
 by seed -0.200 -0.400" in table
assert "advice, co-evolved − 0.9 × advice, start, co-evolved: 0.080 ± 0.000" in table
assert METRICS["advice"](runs[0], "room") == 0.8
"""


def test_supervised_starts_of_smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the options, and that the remains of a training are removed."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    smollm2 = importlib.import_module("smollm2")
    commands: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> None:
        run_dir, role = Path(command[-1]), command[command.index("--role") + 1]
        assert not run_dir.exists()
        commands.append(command)
        (run_dir / role).mkdir(parents=True)
        (run_dir / role / "config.json").touch()

    monkeypatch.setattr(smollm2.subprocess, "run", run)
    monkeypatch.setattr(
        smollm2, "demonstrated", lambda name, role, seed, folder: Path(f"{name}-{role}.jsonl")
    )
    setting = ["--set", "learner.precision=bfloat16"]
    starts = (
        ("grpo", "actor", "start-short-actor-20", "drills --demonstrations 200"),
        ("complementary", "actor", "start-long-actor-20", "drills --demonstrations 1000"),
        ("short start", "extractor", "start-short-extractor-20", "drills --demonstrations 1000"),
        ("grpo full", "actor", "start-full-actor-20", "scripted"),
        ("three tasks", "extractor", "start-three-tasks-extractor-20", "three-tasks-extractor"),
        ("complementary full", "actor", "start-both-full-actor-20", "both-full-actor"),
    )
    for arm, role, name, _ in starts:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
        for _ in range(2):
            model = smollm2.start(arm, role, 20, tmp_path, setting)
            assert model == tmp_path / name / role
    assert [command[-4:-2] for command in commands] == [setting] * len(starts)
    for command, (*_, source) in zip(commands, starts, strict=True):
        assert f"--from {source}" in " ".join(command).replace("--batch-tokens 1024 ", "")
        sets = [value for option, value in pairwise(command) if option == "--set"]
        tasks = command[command.index("--tasks") + 1].split(",")
        load(tasks, preset="smollm2", sets=sets)  # the run of crl sft does this first


def test_only_runs_with_equal_options_are_compared(tmp_path: Path):
    code = COMPARISON_SCRIPT.replace("OUT", repr(str(tmp_path / "results.json")))
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "benchmarks", check=True)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("options", "switch", "last"),
    [
        ([], "eq. 5 alone", []),
        (["--grpo"], "no warm-up", ["best by the mean of training and seen"]),
    ],
)
def test_switches_are_compared_with_the_preset(
    options: list[str], switch: str, last: list[str], tmp_path: Path
):
    out = tmp_path / "results.json"
    script = str(ROOT / "benchmarks" / "switches.py")
    sizes = ["--quick", "--seeds", "0", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, script, *options, *sizes, "--switches", switch],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    runs = json.loads(out.read_text("utf-8"))["runs"]
    assert [run["arm"] for run in runs] == ["the preset", switch]
    rows = [re.split(r"  |: ", line)[0] for line in done.stdout.splitlines()[1:]]
    assert rows == ["the preset", switch, *last]


def test_switches_are_valid():
    code = (
        "from crl.config import load; from switches import GRPO_SWITCHES, SWITCHES; "
        "[load(['room'], sets=list(sets)) for switches in (SWITCHES, GRPO_SWITCHES)"
        " for sets in switches.values()]"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "benchmarks", check=True)


def test_the_best_switch_has_the_highest_mean_of_training_and_seen():
    code = """
from switches import best
def run(arm, training, seen):
    curves = {"success/free": [0.0] * 90 + [training] * 10}
    return {"arm": arm, "curves": curves, "metrics": {"eval/room/seen/success/free": seen}}
runs = [run("a", 0.5, 0.9), run("a", 0.5, 0.7), run("b", 0.9, 0.6), run("b", 0.7, 0.6)]
assert best(runs, ["a", "b"]) == "b"  # 0.65 and 0.7
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "benchmarks", check=True)


def test_embedders_are_compared_on_right_lessons(tmp_path: Path):
    pytest.importorskip("alfworld")
    out = tmp_path / "results.json"
    script = str(ROOT / "benchmarks" / "embedders.py")
    command = [sys.executable, script, "--quick", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    results = json.loads(out.read_text("utf-8"))
    rows = results["rows"]
    assert len(rows) == (5 + 1) * 2 * 3 * 3, "tasks and all of them, embedders, wordings, keys"
    for row in rows:
        assert 0 <= row["recall@1"] <= min(row["right"], row["recall@5"]) <= 1
        low, high = row["right_interval"]
        assert low <= row["right"] <= high
        if row["key"] == "goal, 0.1 text":
            assert row["own"] > 0.99
    right = {
        (row["embedder"][:4], row["wording"]): row["right"]
        for row in rows
        if (row["task"], row["key"]) == ("all", "text")
    }
    for wording in ("same words", "other words"):
        assert right["word", wording] > right["hash", wording], "the reason for the default"
    assert len(results["differences"]) == 3 * 3
    assert [(speed["texts"], speed["per_second"] > 0) for speed in results["speed"]] == [
        ("short", True), ("long", True),
    ] * 2  # fmt: skip


@pytest.mark.soak
def test_figures_are_made_from_stored_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import coevolution  # pyright: ignore[reportMissingImports]
    import figures  # pyright: ignore[reportMissingImports]

    metrics = ("training", "unseen visits alone")
    figure = figures.Figure("A claim.", (), ("room",), ("offline", "none"), (20,), metrics)
    monkeypatch.setitem(coevolution.FIGURES, "tiny", figure)
    folders = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", ["coevolution.py", "--figure", "tiny", "--quick", *folders])
    coevolution.main()
    table, made = capsys.readouterr()
    assert "*Claim:* A claim." in table
    assert made.splitlines() == [
        "room, experience only, seed 20", "room, offline, seed 20", "room, none, seed 20",
    ]  # fmt: skip
    stored = sorted((tmp_path / "results" / "room").glob("*/20.json.xz"))
    assert [path.parent.name for path in stored] == ["experience-only", "none", "offline"]
    runs = [json.loads(lzma.decompress(path.read_bytes())) for path in stored]
    for run in runs:
        assert [line["step"] for line in run["metrics"] if line["kind"] == "train"] == [1, 2]
        assert "eval/room/unseen/success/alone" in run["metrics"][-1]
    source = str(tmp_path / "runs" / "room" / "experience-only" / "20" / "bank.sqlite")
    assert runs[2]["config"]["config"]["bank"]["init"] == source
    coevolution.main()
    assert capsys.readouterr() == (table, ""), "no run is repeated"


def test_the_lag_of_the_event_loop_is_measured_for_every_part(tmp_path: Path):
    out = tmp_path / "results.json"
    script = str(ROOT / "benchmarks" / "loop_lag.py")
    command = [sys.executable, script, "--quick", "--repetitions", "1", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    rows = json.loads(out.read_text("utf-8"))["rows"]
    parts = ["idle", "records", "metrics", "minibatches", "samples", "prompt", "checkpoint", "bank"]
    assert [row["part"] for row in rows] == parts
    for row in rows:
        assert 0 < row["p50"] <= row["p99"] <= row["max"]
        alone = row["part"] in ("idle", "bank")
        assert (row["on_loop"] is None, row["ratio"] is None) == (alone, alone)


def test_the_speed_of_the_engine_is_compared_with_generate(tmp_path: Path):
    out = tmp_path / "results.json"
    script = str(ROOT / "benchmarks" / "engine_speed.py")
    command = [sys.executable, script, "--quick", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    rows = json.loads(out.read_text("utf-8"))["rows"]
    kinds = ("torch", "generate")
    assert [(row["engine"], row["requests"]) for row in rows] == [
        (kind, requests) for requests in (1, 16) for kind in kinds
    ]
    assert all(row["tokens_per_s"] > 0 and row["repetitions"] == 1 for row in rows)
    assert all(row["ratio"] == 1 for row in rows if row["engine"] == "generate")


def test_the_memory_of_engine_and_learner_is_measured(tmp_path: Path) -> None:
    """Check the whole work. Without a GPU, memory is not measured."""
    out = tmp_path / "results.json"
    script = str(ROOT / "benchmarks" / "gpu_memory.py")
    command = [sys.executable, script, "--quick", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    rows = json.loads(out.read_text("utf-8"))["rows"]
    assert [row["part"] for row in rows] == ["engine", "learner", "sync"]
    assert rows[-1]["weights_bytes"] > 1e5
    assert min(rows[-1]["publish_s"], rows[-1]["load_s"]) > 0


@pytest.mark.soak
def test_the_replies_to_every_kind_of_prompt_are_counted(tmp_path: Path):
    out = tmp_path / "results.json"
    script = str(ROOT / "benchmarks" / "prompts.py")
    command = [sys.executable, script, "--quick", "--tasks", "room", "sokoban", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    rows = json.loads(out.read_text("utf-8"))["rows"]
    without_advisor = ["first turn", "later turn", "distil"]
    assert [row["kind"] for row in rows if row["task"] == "sokoban"] == without_advisor
    room = {row["kind"]: row for row in rows if row["task"] == "room"}
    assert [*room] == [
        "first turn", "later turn", "advice", "may ask", "distil", "refine", "merge", "critic",
    ]  # fmt: skip
    assert len(done.stdout.splitlines()) == len(rows) + 2
    for row in rows:
        assert row["replies"] == 4
        assert row["prompt_tokens"] > row["reply_tokens"] > 0
        assert sum(row["content"].values()) >= 1
    for kind in ("first turn", "advice", "distil"):
        assert room[kind]["usable"] == 1, "the bundled models know these prompts"
    assert room["advice"]["prompt_tokens"] > room["first turn"]["prompt_tokens"]

    results = json.loads(out.read_text("utf-8"))
    interrupted = {**results, "rows": [row for row in rows if row["kind"] != "later turn"]}
    out.write_text(json.dumps(interrupted), "utf-8")
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    again = json.loads(out.read_text("utf-8"))["rows"]
    assert done.stderr.count(": done") == 2, "the others are not repeated"
    assert sorted(again, key=str) == sorted(rows, key=str)
    other = [*command, "--tokens", "5"]
    done = subprocess.run(other, cwd=ROOT, check=False, capture_output=True, text=True)
    assert "has results of other settings" in done.stderr
    assert json.loads(out.read_text("utf-8"))["rows"] == again


@pytest.mark.soak
@simulated
def test_the_skills_of_the_bundled_models_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "new" / "skills.json"
    command = [sys.executable, "benchmarks/warm_start.py", "--places", "2", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    skills = json.loads(out.read_text("utf-8"))
    assert len(done.stdout.splitlines()) == sum(len(metrics) + 1 for metrics in skills.values())
    for task in ("", "shop: ", "house: ", "maze_small: ", "search: ", "experiment: "):
        assert skills["tiny-actor"][f"{task}success, right advice"]["n"] == 2
    assert skills["tiny-actor"]["experiment: verdict readable"]["n"] == 4
    for task in ("shop: ", "house: ", "search: ", "experiment: "):
        assert skills["tiny-extractor"][f"{task}lesson malformed"]["n"] == 2
    assert any(name.startswith("experiment: merge") for name in skills["tiny-extractor"])


def test_agents_search_with_the_settings_of_a_run() -> None:
    """A search of the measured tiny actor has one document, as in tasks/search_qa.toml."""
    spec = benchmark("warm_start").SEARCH.spec
    game, (task,) = spec.make_game("compact"), spec.curriculum.probe_tasks(1)
    game.reset(task)
    name = spec.curriculum.advisor.right(task).removeprefix("search ").removesuffix(".")
    assert len(game.step(f"search[ {name}]").text.splitlines()) == 1

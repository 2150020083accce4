"""Training runs for comparisons, and their measurements.

An arm is `crl train` with some settings, or with an adviser in place of the bank. `run_arm` makes
one run in this process. `run_missing` makes the missing runs of a benchmark, each in a separate
process. Benchmarks that compare arms share this module.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import commit, set_options

from crl.protocols import Monitor

QUICK = ("run.steps=2", "rollout.groups=3")
"""Settings of --quick, in addition to small eval sets. They only test that the benchmark works."""

Run = Mapping[str, Any]
"""Result of `run_arm`, with its setting, arm and seed."""


@dataclass(frozen=True)
class Arm:
    """Configuration of training."""

    sets: tuple[str, ...] = ()
    """Settings in addition to those that all arms share."""
    advised: bool = False
    """True if guided episodes receive the truth instead of experience from a bank."""


ARMS: Mapping[str, Arm] = {
    "none": Arm(("method=grpo",)),
    "static": Arm(("extractor.train=false",)),
    "co-evolved": Arm(),
    "experience only": Arm(("actor.optimizer.learning_rate=0.0",)),
    "always right": Arm(advised=True),
}
"""Arms by name.

* none: the actor alone.
* static: the extractor is not trained.
* experience only: the actor is not trained.
* always right: episodes are guided by the truth, the upper bound of the benefit of lessons.
"""


def run_arm(
    arm: Arm, tasks: Sequence[str], seed: int, steps: int | None = None, sets: Sequence[str] = ()
) -> dict[str, Any]:
    """Train one arm with one seed and return its measurements.

    The measurements are the metrics of the last evaluation (`eval/…`, in the same episodes for all
    arms), the advice probe at the start (`start/probe/…`) and at the end (`end/probe/…`), the run's
    totals, and the curves of training success and of right lessons.
    """
    from crl.config import load

    options = {"run.seed": seed} | ({"run.steps": steps} if steps is not None else {})
    config = load(list(tasks), options=options, sets=["eval.probe_every=1000000", *arm.sets, *sets])
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_train(arm, config, Path(folder)))


class TruthRetriever:
    """`Retriever` that returns the truth about every place. `specs`: `EnvSpec` by task."""

    def __init__(self, specs: Mapping[str, Any]) -> None:
        self._specs = specs

    async def search(self, requests: Sequence[Any]) -> list[Any]:
        from crl.protocols import Hit
        from crl.types import ExperienceUse

        use = ExperienceUse("told", 1, "told", "start")
        tasks = [request.task for request in requests]
        # The truth may come from playing the game, which takes time.
        texts = await asyncio.to_thread(
            lambda: [self._specs[t.name].curriculum.advisor.right(t) for t in tasks]
        )
        return [Hit(text, use, task.goal) for text, task in zip(texts, tasks, strict=True)]

    async def refine(self, question: Any, hit: Any) -> Any:
        return hit


class Recorder(Monitor):
    """`Monitor` that stores the metrics in memory."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def log(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        self.lines.append({"step": step, "kind": kind, **metrics})

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of this kind."""
        return [line for line in self.lines if line["kind"] == kind]


async def _train(arm: Arm, config: Any, folder: Path) -> dict[str, Any]:
    from crl.evaluation.evaluate import Evaluation
    from crl.monitor.run_dir import RunDir
    from crl.planning.tasks import online_tasks
    from crl.planning.tasks import specs as specs_of
    from crl.run.assemble import open_training_loop

    start_time, recorder, specs = time.monotonic(), Recorder(), specs_of(config)
    truth = TruthRetriever(specs) if arm.advised else None
    async with open_training_loop(
        config, RunDir(folder), recorder, retriever_override=truth
    ) as loop:
        loop.measurements.evaluations[0] = Evaluation({}, {}, 0)  # all arms have the same start
        await loop.run()
        end_time = time.monotonic()
        metrics = loop.measurements.evaluations[loop.completed_steps].metrics()
        if loop.experience is None:
            for name, task in online_tasks(config, specs).items():
                metrics |= await _evaluate_online(loop.measurements.evaluator, truth, name, task)
    probes = {
        "start": loop.measurements.probes[0],
        "end": loop.measurements.probes[loop.completed_steps],
    }
    return {
        "steps": loop.completed_steps,
        "metrics": metrics
        | {f"{end}/{name}": v for end, probe in probes.items() for name, v in probe.items()},
        "curves": {
            **{
                f"success/{c}": [
                    line.get(f"rollout/success/{c}") for line in recorder.of_kind("train")
                ]
                for c in ("free", "guided")
            },
            "lessons/correct": [line.get("lessons/correct") for line in recorder.of_kind("bank")],
        },
        "totals": {
            name: value
            for kind in ("train", "bank")
            for line in recorder.of_kind(kind)[-1:]
            for name, value in line.items()
            if name.startswith("total/")
        },
        "extractor updates": max(
            (line["extractor/updates"] for line in recorder.of_kind("extractor")), default=0
        ),
        # The time includes the start and the evaluations, and may be affected by parallel runs.
        "seconds": end_time - start_time,
    }


async def _evaluate_online(
    evaluator: Any, truth: TruthRetriever | None, name: str, task: Any
) -> dict[str, float]:
    """Evaluate the online set without a bank: success alone, and with an adviser.

    The episodes and their draws are the same as in the arms with a bank.
    """
    from crl.evaluation.evaluate import clustered_success_rate
    from crl.evaluation.online import UNCOUNTED_VISITS, VISITS, visit_episodes

    visits = [visit_episodes(name, task, visit) for visit in range(UNCOUNTED_VISITS, VISITS)]
    keys, tasks = (
        [key for keys, _ in visits for key in keys],
        [task for _, tasks in visits for task in tasks],
    )
    alone = await evaluator.scheduler.play(evaluator.runner, "free", keys, tasks)
    online = alone
    if truth:
        online = await evaluator.scheduler.play(
            replace(evaluator.runner, retriever=truth), "guided", keys, tasks
        )
    by_setting = {"alone": alone, "online": online}
    return {
        f"eval/{name}/unseen/success/{setting}": clustered_success_rate(trajectories).value
        for setting, trajectories in by_setting.items()
    }


# ── many runs ─────────────────────────────────────────────────────────────────────────────────────


def sweep_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that benchmarks of many runs share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, help="number of actor steps (default: the preset's)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="setting of all runs"
    )
    parser.add_argument(
        "--quick", action="store_true", help="two small steps per run and small eval sets"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="number of parallel runs, one core each"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required="--one" not in sys.argv,
        help="JSON file for the raw numbers",
    )
    parser.add_argument(
        "--one", nargs=3, metavar=("SETTING", "ARM", "SEED"), help=argparse.SUPPRESS
    )
    return parser


def run_missing(
    script: str, wanted: Sequence[tuple[str, str, int]], arguments: argparse.Namespace
) -> list[Run]:
    """Make the runs (setting, arm, seed) that the .jsonl file beside --out lacks. Return all runs.

    `script`: path of the benchmark, which makes one run for `--one SETTING ARM SEED`.
    """
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results = finished_runs(arguments)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(
            pool.map(
                lambda run: _run_in_subprocess(script, run, arguments),
                [run for run in wanted if run not in results],
            )
        )
    results = finished_runs(arguments)
    return [results[run] for run in wanted]


def run_and_print(arm: Arm, tasks: Sequence[str], seed: int, arguments: argparse.Namespace) -> None:
    """Make one run and print its result as JSON."""
    sizes = {"seen": 8, "unseen": 8, "online_places": 2, "probe_places": 4}
    quick = [
        *QUICK,
        *(f"tasks.{task}.eval.{name}={size}" for task in tasks for name, size in sizes.items()),
    ]
    print(
        json.dumps(
            run_arm(
                arm,
                tasks,
                seed,
                arguments.steps,
                [*(quick if arguments.quick else ()), *arguments.set],
            )
        )
    )


def shared_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that all runs of a command share.

    Runs that differ in these options are not compared.
    """
    return {"asked steps": arguments.steps, "quick": arguments.quick, "set": arguments.set}


def finished_runs(arguments: argparse.Namespace) -> dict[tuple[str, str, int], Run]:
    """Return the finished runs of the command, by setting, arm and seed."""
    path, runs = _records_path(arguments.out), {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            run = json.loads(line)
        except json.JSONDecodeError:  # the line was written only in part
            continue
        if shared_options(arguments).items() <= run.items():
            runs[run["setting"], run["arm"], run["seed"]] = run
    return runs


def _run_in_subprocess(
    script: str, run: tuple[str, str, int], arguments: argparse.Namespace
) -> None:
    """Train one arm in a separate process and append the result to the .jsonl file."""
    setting, arm, seed = run
    command = [sys.executable, script, "--one", setting, arm, str(seed)]
    command += [] if arguments.steps is None else ["--steps", str(arguments.steps)]
    command += ["--quick"] if arguments.quick else []
    command += set_options(arguments.set)
    labels = {
        "setting": setting,
        "arm": arm,
        "seed": seed,
        **shared_options(arguments),
        "commit": commit(),
    }
    completed = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    result = labels | json.loads(completed.stdout)
    with _records_path(arguments.out).open("a+b") as stream:
        stream.seek(max(0, stream.tell() - 1))
        incomplete_line = stream.read(1) not in (b"", b"\n")
        stream.write(b"\n" * incomplete_line + json.dumps(result).encode() + b"\n")
    print(f"{setting}, {arm}, seed {seed}: {result['seconds']:.0f} s", file=sys.stderr, flush=True)


def _records_path(out: Path) -> Path:
    return out.with_suffix(".jsonl")

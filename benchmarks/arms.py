"""Training runs that are compared, and what is measured at their ends.

An arm is `crl train` with a few settings, or with an adviser in the place of the bank. `run_arm` is one
run, in this process; `run_missing` makes those runs of a benchmark that it has not made yet, each in a
process of its own. Benchmarks that compare arms share this module.
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

from common import commit

QUICK = ("run.steps=2", "rollout.groups=3")
"""Settings of --quick, beside small eval sets: whether it works, not what comes of it."""

Run = Mapping[str, Any]
"""What `run_arm` returns, with the setting, the arm and the seed that it is of."""


@dataclass(frozen=True)
class Arm:
    """A way to train."""

    sets: tuple[str, ...] = ()
    """Settings beside those that all arms share."""
    advised: bool = False
    """Whether guided episodes are told the truth instead of what a bank holds."""


ARMS: Mapping[str, Arm] = {
    "none": Arm(("method=grpo",)),
    "static": Arm(("extractor.train=false",)),
    "co-evolved": Arm(),
    "experience only": Arm(("actor.optimizer.learning_rate=0.0",)),
    "always right": Arm(advised=True),
}
"""none: the actor alone. static: the extractor is not trained. experience only: the actor is not.
always right: guided by the truth, the ceiling of what lessons can be worth."""


def run_arm(arm: Arm, tasks: Sequence[str], seed: int, steps: int | None = None, sets: Sequence[str] = ()) -> dict[str, Any]:
    """Train one arm with one seed and return its measurements.

    Returns the metrics of the last evaluation (`eval/…`, for all arms in the same episodes), the
    advice probe's at the start (`start/probe/…`) and at the end (`end/probe/…`), the run's totals
    and the curves of training success and of right lessons.
    """
    from crl.config import load

    options = {"run.seed": seed} | ({"run.steps": steps} if steps is not None else {})
    config = load(list(tasks), options=options, sets=["eval.probe_every=1000000", *arm.sets, *sets])
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_train(arm, config, Path(folder)))


class AlwaysRight:
    """A `Retriever` that knows the truth about every place. specs: `EnvSpec` by task."""

    def __init__(self, specs: Mapping[str, Any]) -> None:
        self._specs = specs

    async def search(self, requests: Sequence[Any]) -> list[Any]:
        from crl.protocols import Hit
        from crl.types import ExperienceUse

        use = ExperienceUse("told", 1, "told", "start")
        tasks = [request.task for request in requests]
        # The truth may come from playing the game, which takes its time.
        texts = await asyncio.to_thread(lambda: [self._specs[t.name].advisor.right(t) for t in tasks])
        return [Hit(text, use, task.goal) for text, task in zip(texts, tasks, strict=True)]

    async def refine(self, question: Any, hit: Any) -> Any:
        return hit


class Recorder:
    """A `Monitor` that keeps the metrics in memory."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def log(self, step: int, kind: str, figures: Mapping[str, Any]) -> None:
        self.lines.append({"step": step, "kind": kind, **figures})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]

    def trajectories(self, trajectories: Sequence[Any]) -> None: ...
    def experiences(self, experiences: Sequence[Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


async def _train(arm: Arm, config: Any, folder: Path) -> dict[str, Any]:
    from crl.monitor.run_dir import RunDir
    from crl.run.assemble import training
    from crl.run.evaluate import Evaluation
    from crl.run.tasks import online_tasks
    from crl.run.tasks import specs as specs_of

    begin, recorder, specs = time.monotonic(), Recorder(), specs_of(config)
    adviser = AlwaysRight(specs) if arm.advised else None
    async with training(config, RunDir(folder), recorder, adviser=adviser) as loop:
        loop.evaluations[0] = Evaluation({}, {}, 0)  # the start is the same in all arms
        await loop.run()
        trained = time.monotonic()
        last = loop.evaluations[loop.completed].figures()
        if loop.experience is None:
            for name, task in online_tasks(config, specs).items():
                last |= await _online_places(loop.evaluator, adviser, name, task)
    probes = {"start": loop.probes[0], "end": loop.probes[loop.completed]}
    return {
        "steps": loop.completed,
        "metrics": last | {f"{end}/{name}": v for end, probe in probes.items() for name, v in probe.items()},
        "curves": {
            **{f"success/{c}": [line.get(f"rollout/success/{c}") for line in recorder.of("train")] for c in ("free", "guided")},
            "lessons/correct": [line.get("lessons/correct") for line in recorder.of("bank")],
        },
        "totals": {
            name: value
            for kind in ("train", "bank")
            for line in recorder.of(kind)[-1:]
            for name, value in line.items()
            if name.startswith("total/")
        },
        "extractor updates": max((line["extractor/updates"] for line in recorder.of("extractor")), default=0),
        "seconds": trained - begin,  # of the start and the evaluations too, and beside other runs
    }


async def _online_places(evaluator: Any, adviser: AlwaysRight | None, name: str, task: Any) -> dict[str, float]:
    """The online set without a bank: success alone, and with an adviser in the bank's place.

    The episodes and their draws are those that the arms with a bank play.
    """
    from crl.run.evaluate import rate_of_visits
    from crl.run.online import UNCOUNTED_VISITS, VISITS, visited

    settled = [visited(name, task, visit) for visit in range(UNCOUNTED_VISITS, VISITS)]
    keys, tasks = [key for keys, _ in settled for key in keys], [task for _, tasks in settled for task in tasks]
    alone = await evaluator.scheduler.play(evaluator.runner, "free", keys, tasks)
    online = alone
    if adviser:
        online = await evaluator.scheduler.play(replace(evaluator.runner, retriever=adviser), "guided", keys, tasks)
    played = {"alone": alone, "online": online}
    return {f"eval/{name}/new/success/{setting}": rate_of_visits(ts).value for setting, ts in played.items()}


# ── many runs ───────────────────────────────────────────────────────────────────────────────────


def sweep_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that benchmarks of many runs share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="actor steps (default: the preset's)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all runs")
    parser.add_argument("--quick", action="store_true", help="two small steps of each run and small eval sets")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each")
    parser.add_argument("--out", type=Path, required="--one" not in sys.argv, help="write the raw numbers here, as JSON")
    parser.add_argument("--one", nargs=3, metavar=("SETTING", "ARM", "SEED"), help=argparse.SUPPRESS)
    return parser


def run_missing(script: str, wanted: Sequence[tuple[str, str, int]], arguments: argparse.Namespace) -> list[Run]:
    """Make those runs (setting, arm, seed) that the .jsonl file beside --out does not hold; return all of them.

    script: the benchmark, which makes one run when it is asked for `--one SETTING ARM SEED`.
    """
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    done = finished(arguments)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda run: _run_apart(script, run, arguments), [run for run in wanted if run not in done]))
    done = finished(arguments)
    return [done[run] for run in wanted]


def run_here(arm: Arm, tasks: Sequence[str], seed: int, arguments: argparse.Namespace) -> None:
    """Make one run and print it as JSON."""
    sizes = {"known": 8, "new": 8, "online": 2, "probe": 4}
    quick = [*QUICK, *(f"tasks.{task}.eval.{name}={size}" for task in tasks for name, size in sizes.items())]
    print(json.dumps(run_arm(arm, tasks, seed, arguments.steps, [*(quick if arguments.quick else ()), *arguments.set])))


def shared(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what all runs of a command have in common: runs that differ in it are not compared."""
    return {"asked steps": arguments.steps, "quick": arguments.quick, "set": arguments.set}


def finished(arguments: argparse.Namespace) -> dict[tuple[str, str, int], Run]:
    """Return the finished runs of the command, by setting, arm and seed."""
    path, found = _records(arguments.out), {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            run = json.loads(line)
        except json.JSONDecodeError:  # the writing of it was interrupted
            continue
        if shared(arguments).items() <= run.items():
            found[run["setting"], run["arm"], run["seed"]] = run
    return found


def _run_apart(script: str, run: tuple[str, str, int], arguments: argparse.Namespace) -> None:
    """Train one arm in a process of its own and append the result to the .jsonl file."""
    setting, arm, seed = run
    command = [sys.executable, script, "--one", setting, arm, str(seed)]
    command += [] if arguments.steps is None else ["--steps", str(arguments.steps)]
    command += ["--quick"] if arguments.quick else []
    command += [word for text in arguments.set for word in ("--set", text)]
    about = {"setting": setting, "arm": arm, "seed": seed, **shared(arguments), "commit": commit()}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    result = about | json.loads(done.stdout)
    with _records(arguments.out).open("a+b") as stream:
        stream.seek(max(0, stream.tell() - 1))
        torn = stream.read(1) not in (b"", b"\n")
        stream.write(b"\n" * torn + json.dumps(result).encode() + b"\n")
    print(f"{setting}, {arm}, seed {seed}: {result['seconds']:.0f} s", file=sys.stderr, flush=True)


def _records(out: Path) -> Path:
    return out.with_suffix(".jsonl")

"""Does it matter that the extractor learns too? The arms of CRL Fig. 3a, in the room of the tiny models.

    python benchmarks/coevolution.py --figure 3a --seeds 0 1 2 3 4 --out benchmarks/results/coevolution_3a.json

Arms, each `crl train --tasks room --seed S`: `none` (--method grpo), `static` (extractor.train=false: it distils and is not trained),
`co-evolved` (the default), `always-right` (guided by the true direction instead of a bank: what advice could be worth at most).

Metrics, named before the runs. Primary: `fresh` = success in 64 rooms never trained on, visits 3 to 5 of 5, four episodes a visit, with a
bank that starts empty of them and is built on the way; and `lessons` = right ones among the extractor's answers that came in during the
last 19 steps and after them, until all had settled.
Beside them: `fresh, alone` = the same rooms and dynamics without experience; `lift` = fresh − fresh, alone; `gap` = guided − free in the
same groups over the second half of the run; the advice probe at the end. All sampled at temperature 1. The seed is the unit: mean ± 95 % by
Student's t over seeds, differences paired by seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import mean_and_interval, write_results

ARMS: dict[str, tuple[str, ...]] = {
    "co-evolved": (),
    "static": ("extractor.train=false",),
    "none": ("method=grpo",),
    "always-right": (),
}
COLUMNS = ("fresh", "fresh, alone", "lift", "lessons", "gap", "probe none", "probe right")
PAIRS = (("co-evolved", "static"), ("co-evolved", "none"), ("static", "none"), ("always-right", "none"))


# ── one run ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def one_run(arm: str, seed: int, steps: int | None, sets: Sequence[str]) -> dict[str, Any]:
    """Trains in this process and measures."""
    from crl.config import load

    options = {"run.seed": seed} | ({"run.steps": steps} if steps is not None else {})
    unused = [*(f"tasks.room.eval.{name}=0" for name in ("known", "new")), "eval.probe_every=1000000"]  # the ends are always probed
    config = load(["room"], options=options, sets=[*unused, *ARMS[arm], *sets])
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_train(arm, config, Path(folder)))


async def _train(arm: str, config: Any, folder: Path) -> dict[str, Any]:
    from crl.envs.room import SPEC
    from crl.monitor.run_dir import RunDir
    from crl.protocols import Hit
    from crl.run.assemble import training
    from crl.run.evaluate import Evaluation
    from crl.run.figures import group_gaps
    from crl.run.tasks import online_tasks
    from crl.types import ExperienceUse

    class AlwaysRight:
        async def search(self, requests: Sequence[Any]) -> list[Hit | None]:
            use = ExperienceUse("told", 1, "told", "start")
            return [Hit(SPEC.advisor.right(r.task), use, r.task.goal) for r in requests]  # pyright: ignore[reportOptionalMemberAccess]

        async def refine(self, question: Any, hit: Hit) -> Hit:
            return hit

    class Recorder:
        """A monitor that keeps what the table needs."""

        def __init__(self) -> None:
            self.gaps: list[list[float]] = []
            self.lines: list[dict[str, Any]] = []

        def log(self, step: int, kind: str, figures: Mapping[str, Any]) -> None:
            self.lines.append({"step": step, "kind": kind, **figures})

        def trajectories(self, trajectories: Sequence[Any]) -> None:
            self.gaps.append(group_gaps(trajectories))

        def experiences(self, experiences: Sequence[Any]) -> None: ...
        def note(self, text: str) -> None: ...
        def close(self) -> None: ...

    begin, recorder = time.monotonic(), Recorder()
    adviser = AlwaysRight() if arm == "always-right" else None
    async with training(config, RunDir(folder), recorder, adviser=adviser) as loop:
        loop.evaluations[0] = Evaluation({}, {}, 0)  # the start is the same in all arms
        await loop.run()
        last = loop.evaluations[loop.completed]
        (task,) = online_tasks(config, {"room": SPEC}).values()
        alone = await _fresh(loop.evaluator, "free", task)
        if adviser:
            visits = await _fresh(loop.evaluator, "guided", task, retriever=adviser)
        elif loop.experience:
            visits = [rate.value for rate in last.visits["room"]]
        else:
            visits = alone
        lessons = loop.experience.diagnostics.lessons if loop.experience else []
        updates = loop.experience.trainer.updates if loop.experience and loop.experience.trainer else 0
    gaps = [gap for step in recorder.gaps[len(recorder.gaps) // 2 :] for gap in step]
    tail = lessons[-20:]
    probe = loop.probes[loop.completed]
    fresh, fresh_alone = statistics.fmean(visits[2:]), statistics.fmean(alone[2:])
    return {
        "seed": config.run.seed,
        "steps": config.run.steps,
        "fresh": fresh,
        "fresh, alone": fresh_alone,
        "lift": fresh - fresh_alone,
        "lessons": sum(right for right, _ in tail) / max(sum(n for _, n in tail), 1) if tail else None,
        "gap": statistics.fmean(gaps) if gaps else None,
        "probe none": probe["probe/room/none"],
        "probe right": probe["probe/room/right"],
        "visits": visits,
        "extractor updates": updates,
        "lessons by step": [right / n if n else None for right, n in lessons],
        "seconds": time.monotonic() - begin,
    }


async def _fresh(evaluator: Any, condition: Any, task: Any, **parts: Any) -> list[float]:
    """Success by visit. parts: replace those of the evaluator's runner."""
    from dataclasses import replace

    from crl.run.online import VISITS, visited

    runner, rates = replace(evaluator.runner, **parts), []
    for visit in range(VISITS):
        played = await evaluator.scheduler.play(runner, condition, *visited("room", task, visit))
        rates.append(statistics.fmean(t.success for t in played))
    return rates


# ── all runs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_apart(arm: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run in a process of its own."""
    command = [sys.executable, __file__, "--figure", arguments.figure, "--one", arm, str(seed)]
    command += [] if arguments.steps is None else ["--steps", str(arguments.steps)]
    command += [part for text in arguments.set for part in ("--set", text)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    result = json.loads(done.stdout)
    if arguments.out:  # hours of runs are not lost to one that fails
        with arguments.out.with_suffix(".jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"arm": arm, **result}) + "\n")
    print(f"{arm} seed {seed}: fresh {result['fresh']:.3f}, {result['seconds']:.0f} s", file=sys.stderr, flush=True)
    return result


def table(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Mean and interval of every metric by arm, then the paired differences with every seed's."""
    lines = [f"{'':<14}" + "".join(f"{arm:>18}" for arm in results)]
    for column in COLUMNS:
        cells = (mean_and_interval([run[column] for run in runs]) for runs in results.values())
        lines.append(f"{column:<14}" + "".join(f"{cell:>18}" for cell in cells))
    lines.append("")
    for column in ("fresh", "lift", "lessons", "fresh, alone"):
        for one, other in PAIRS:
            pairs = [(a[column], b[column]) for a, b in zip(results.get(one, ()), results.get(other, ()), strict=False)]
            differences = [a - b for a, b in pairs if a is not None and b is not None]
            if differences:
                each = " ".join(f"{d:+.3f}" for d in differences)
                lines.append(f"{column}: {one} − {other}: {mean_and_interval(differences)}   by seed {each}")
    return "\n".join(lines)


def plot(results: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for arm, runs in results.items():
        left.plot(range(1, 6), [statistics.fmean(run["visits"][v] for run in runs) for v in range(5)], marker="o", label=arm)
        by_step = [[x for x in step if x is not None] for step in zip(*(run["lessons by step"] for run in runs), strict=False)]
        known = [(number, statistics.fmean(shares)) for number, shares in enumerate(by_step, start=1) if shares]
        if known:
            right.plot(*zip(*known, strict=True), label=arm)
    left.set(xlabel="visit of a new room", ylabel="success", title="bank built online, mean over seeds")
    right.set(xlabel="actor step", ylabel="share of answers", title="right lessons, mean over seeds")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", choices=["3a"], required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--steps", type=int, help="actor steps (default: the preset's)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all arms")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, help="write the raw numbers here, as JSON, and a plot beside it")
    parser.add_argument("--one", nargs=2, metavar=("ARM", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        arm, seed = arguments.one
        print(json.dumps(one_run(arm, int(seed), arguments.steps, arguments.set)))
        return
    runs = [(arm, seed) for seed in arguments.seeds for arm in arguments.arms]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        done = list(pool.map(lambda run: run_apart(run[0], run[1], arguments), runs))
    results = {arm: [result for (of, _), result in zip(runs, done, strict=True) if of == arm] for arm in arguments.arms}
    print(table(results))
    if arguments.out:
        write_results(arguments.out, {"set": arguments.set, "jobs": arguments.jobs, "arms": results})
        plot(results, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()

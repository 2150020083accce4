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
machine. The ratio to GRPO (`none`) has the same task.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import coevolution
from coevolution import Run, Sweep
from common import set_options, train_run, without_evaluations, write_results
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
    """Return the mean score over the seeds, by method and change. "" = the preset."""
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
    """Return the scores of the stored runs. Raise `StatisticsError` if a setting has none."""
    return scores({run: stored for run in runs() if (stored := sweep().stored(run))})


def tune(arguments: Sequence[str]) -> None:
    """Make the runs of the tuning that are not stored, and print the scores."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time")
    sweep().make(runs(), parser.parse_args(arguments).jobs)
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


def seconds_table(seconds: Mapping[str, Mapping[str, float]]) -> str:
    """Return seconds by arm and task as a Markdown table, with the ratio to GRPO."""
    tasks = list(next(iter(seconds.values())))
    rows: list[Sequence[str]] = [("", *tasks), ("---",) * (len(tasks) + 1)]
    for arm, by_task in seconds.items():
        cells = [
            f"{value:.2f} ({value / seconds[tuned('none')][task]:.2f}×)"
            for task, value in by_task.items()
        ]
        rows.append((arm, *cells))
    return "\n".join(markdown_row(*row) for row in rows)


def time_steps(arguments: Sequence[str]) -> None:
    """Measure the duration of a step of each method and task, and print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    options = parser.parse_args(arguments)
    if options.steps < WARM_UP + 1:
        parser.error(f"--steps = {options.steps}: must be above {WARM_UP}, which are not timed")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figure = FIGURES["methods"]
    seconds: dict[str, dict[str, float]] = {arm: {} for arm in figure.arms}
    for task in figure.settings:
        for arm in figure.arms:
            seconds[arm][task] = seconds_per_step(task, arm, options.steps)
    print(seconds_table(seconds))
    if options.out:
        write_results(options.out, {"steps": options.steps, "seconds": seconds})


if __name__ == "__main__":
    if "--tune" in sys.argv:
        tune([word for word in sys.argv[1:] if word != "--tune"])
    elif "--seconds" in sys.argv:
        time_steps([word for word in sys.argv[1:] if word != "--seconds"])
    else:
        sys.argv[1:1] = ["--figure", "methods"]
        coevolution.main()

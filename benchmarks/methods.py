"""Methods of the field on the same tasks, by two commands.

    python benchmarks/methods.py --tune --jobs 2
    python benchmarks/methods.py --jobs 2

The first one tries the same changes of the preset (`figures.CHANGES`) for each method that trains
an actor, in the room with the seeds 0 and 1. The best setting of a method has the highest mean of
the metrics that the comparison judges: success in seen places without experience and, if the method
has a bank, in unseen places with an online bank. `figures.TUNED` has the settings.

The second one is `coevolution.py --figure methods` (see there): GRPO, GiGPO, Role-Agent, EMPO²,
Reflexion, Complementary RL with and without training of the extractor, and with self-distillation.

Stored runs are not repeated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean

import coevolution
from coevolution import Run, Sweep
from figures import CHANGES, METRICS, TRAINED_METHODS, Lines, StoredRun, changed
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


if __name__ == "__main__":
    if "--tune" in sys.argv:
        tune([word for word in sys.argv[1:] if word != "--tune"])
    else:
        sys.argv[1:1] = ["--figure", "methods"]
        coevolution.main()

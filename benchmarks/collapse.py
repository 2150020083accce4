"""Search for the collapse of self-distillation (paper, section 4.3) in the stored runs.

    python benchmarks/collapse.py
    python benchmarks/collapse.py --figure methods --setting search_qa

The command reads the runs of a figure that coevolution.py stored, by default those of Figure 9b in
the room. The output is Markdown. One table has the mean over seeds of each metric, ± half the 95 %
interval by Student's t, in each fifth of the run. The other one has the fall of each metric: its
highest fifth minus its last fifth, by seed. A collapse is a large fall of success. Without one, the
last fifth is the highest or near it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from coevolution import RESULTS, Run, Sweep
from common import mean_and_interval
from figures import FIGURES, Lines

ARMS = ("self-distillation", "co-evolved")
PARTS = 5
"""Number of equal parts of a run."""

METRICS: Mapping[str, Callable[[Mapping[str, Any]], float | None]] = {
    "success, free": lambda line: line["rollout/success/free"],
    "success, guided": lambda line: line["rollout/success/guided"],
    "entropy (nats)": lambda line: line.get("actor/entropy"),
    "turns": lambda line: line["rollout/turns"],
    "tokens per turn": lambda line: line["rollout/sampled_tokens"] / line["rollout/env_turns"],
    "distilled episodes": lambda line: line.get("rollout/self_distilled", 0),
}
"""Metrics of a training step by name.

Entropy is that of the actor at a trained token, None in a step without an update. A tiny model
answers with one word. The number of tokens per turn therefore shows whether its answers degenerate.
"""


def parts(lines: Lines, metric: Callable[[Mapping[str, Any]], float | None]) -> list[float]:
    """Return the mean of a metric over the steps of each part of a run.

    Raise `ValueError` if the run has fewer steps than parts.
    """
    steps = [metric(line) for line in lines if line["kind"] == "train"]
    if len(steps) < PARTS:
        raise ValueError(f"the run has {len(steps)} steps, fewer than {PARTS}")
    ends = [len(steps) * part // PARTS for part in range(PARTS + 1)]
    return [
        fmean(value for value in steps[start:end] if value is not None)
        for start, end in pairwise(ends)
    ]


def fall(values: Sequence[float]) -> float:
    """Return the highest value minus the last one."""
    return max(values) - values[-1]


def tables(runs: Mapping[str, Sequence[Lines]]) -> str:
    """Return both tables. `runs` maps an arm to the metrics of its runs, by seed."""
    fifths = " | ".join(f"fifth {part}" for part in range(1, PARTS + 1))
    means = [f"| metric | arm | {fifths} |", "| --- " * (PARTS + 2) + "|"]
    falls = ["| metric | arm | highest fifth − last fifth, by seed |", "| --- | --- | --- |"]
    for name, metric in METRICS.items():
        for arm, seeds in runs.items():
            values = [parts(lines, metric) for lines in seeds]
            cells = [mean_and_interval(seed_values) for seed_values in zip(*values, strict=True)]
            means.append(f"| {name} | {arm} | {' | '.join(cells)} |")
            if name.startswith("success"):
                by_seed = ", ".join(f"{fall(seed_values):.3f}" for seed_values in values)
                falls.append(f"| {name} | {arm} | {by_seed} |")
    return "\n".join([*means, "", *falls])


def stored_tables(name: str, setting: str) -> str:
    """Return both tables of the stored runs of a figure in a setting.

    Exit with a message if a run is missing.
    """
    sweep, figure = Sweep(RESULTS, RESULTS, quick=False), FIGURES[name]
    arms = [arm for start in ARMS for arm in figure.arms if arm.startswith(start)]
    runs: dict[str, list[Lines]] = {}
    for arm in arms:
        for seed in figure.seeds:
            stored = sweep.stored(Run(setting, arm, seed, figure.folder))
            if stored is None:
                raise SystemExit(
                    f"Run this first: python benchmarks/coevolution.py --figure {name}"
                )
            runs.setdefault(arm, []).append(stored["metrics"])
    return tables(runs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figure", choices=["9b", "methods"], default="9b")
    parser.add_argument("--setting", default="room")
    arguments = parser.parse_args()
    settings = FIGURES[arguments.figure].settings
    if arguments.setting not in settings:
        parser.error(f"--setting must be one of {', '.join(settings)}")
    print(stored_tables(arguments.figure, arguments.setting))


if __name__ == "__main__":
    main()

"""Runs of figures that were made again in a fresh clone, beside the stored ones, as Markdown.

    git clone URL again && cd again && make setup && source .venv/bin/activate
    python benchmarks/coevolution.py --figure 7 --jobs 2 --results build/again
    python benchmarks/reproductions.py --figure 7 --again build/again

Without --again, the runs in benchmarks/results/reproductions are compared, which were made in this
way. Runs are asynchronous, so runs with the same seed differ. For each task and metric, the table
has the means over seeds of the arms, and of the paired differences between the first arm and the
others, with their 95 % intervals by Student's t. Two questions are answered for each of them:

* within: whether the new mean lies in the stored interval. Even if nothing has changed, this fails
  often with few seeds, because the new mean is uncertain too and the interval is not its own.
* differs: whether the 95 % interval of the difference between both means, by Welch's t, is without
  0. If nothing has changed, about one of 20 rows differs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from coevolution import RESULTS, Sweep
from common import mean_and_interval
from figures import FIGURES, SETTINGS, Results
from report import differences
from verdicts import markdown_row

from crl.intervals import Mean, plus_minus, t_975

AGAIN = Path(__file__).parent / "results" / "reproductions"


class Row(NamedTuple):
    """Metric of an arm, or of a difference between two arms, in both sets of runs."""

    metric: str
    task: str
    arm: str
    stored: Sequence[float]
    """Values by seed."""
    again: Sequence[float]

    @property
    def within(self) -> bool:
        """True if the mean of the new runs lies in the interval of the stored ones."""
        stored = Mean.of(self.stored)
        return abs(Mean.of(self.again).value - stored.value) <= stored.half_width

    @property
    def change(self) -> tuple[float, float]:
        """New mean minus stored mean, and half its 95 % interval by Welch's t."""
        return welch(self.again, self.stored)

    @property
    def differs(self) -> bool:
        """True if the interval of the change is without 0."""
        value, half = self.change
        return abs(value) > half


def welch(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the difference of two means and half its 95 % interval by Welch's t.

    The degrees of freedom are those of Welch and Satterthwaite. Each sample has at least two
    values.
    """
    means = [Mean.of(values) for values in (first, second)]
    variances = [(mean.half_width / t_975(mean.n - 1)) ** 2 for mean in means]
    difference, total = means[0].value - means[1].value, sum(variances)
    if not total:
        return difference, 0.0
    degrees = total**2 / sum(
        variance**2 / (mean.n - 1) for variance, mean in zip(variances, means, strict=True)
    )
    return difference, t_975(degrees) * math.sqrt(total)


def rows(stored: Results, again: Results) -> Iterator[Row]:
    """Yield the rows of a figure. Metrics that an arm does not have are left out."""
    first, *others = stored.figure.arms
    for metric in stored.figure.metrics:
        for setting in stored.figure.settings:
            for task in SETTINGS[setting]:
                for arm in (first, *others):
                    sets = [runs.values(metric, setting, arm, task) for runs in (stored, again)]
                    yield from _row(metric, task, arm, *sets)
                for arm in others:
                    sets = [
                        differences(*(runs.values(metric, setting, a, task) for a in (first, arm)))
                        for runs in (stored, again)
                    ]
                    yield from _row(metric, task, f"{first} − {arm}", *sets)


def _row(
    metric: str, task: str, arm: str, stored: Sequence[float | None], again: Sequence[float | None]
) -> Iterator[Row]:
    known = [[value for value in values if value is not None] for values in (stored, again)]
    if all(len(values) > 1 for values in known):
        yield Row(metric, task, arm, *known)


def table(found: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, and a sentence with the numbers of both answers."""
    lines = [
        markdown_row("metric", "task", "arm", "stored", "again", "again − stored", "within"),
        markdown_row(*["---"] * 7),
    ]
    for row in found:
        change = plus_minus(*row.change) + (" **differs**" if row.differs else "")
        sets = (mean_and_interval(row.stored), mean_and_interval(row.again))
        within = "yes" if row.within else "**no**"
        lines.append(markdown_row(row.metric, row.task, row.arm, *sets, change, within))
    within, differing = sum(row.within for row in found), sum(row.differs for row in found)
    return "\n".join(
        [
            *lines,
            "",
            f"{within} of {len(found)} new means are within the stored intervals; "
            f"{differing} of {len(found)} differ from the stored ones.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figure", nargs="+", choices=[*FIGURES], required=True)
    parser.add_argument("--again", type=Path, default=AGAIN, help="folder of the new runs")
    arguments = parser.parse_args()
    for name in arguments.figure:
        figure = FIGURES[name]
        stored, again = (
            Sweep(folder, folder, quick=False).results(figure, figure.seeds)
            for folder in (RESULTS, arguments.again)
        )
        print(table([*rows(stored, again)]))


if __name__ == "__main__":
    main()

"""Runs of figures that were made again in a fresh clone, beside the stored ones, as Markdown.

    git clone URL again && cd again && make setup && source .venv/bin/activate
    python benchmarks/coevolution.py --figure 7 --jobs 2 --results build/again
    python benchmarks/reproductions.py --figure 7 --again build/again

Without --again, the runs in benchmarks/results/reproductions/FIGURE are compared, which were made
in this way. Runs are asynchronous, so runs with the same seed differ. Runs that were not made again
keep their stored ones.

For each task and metric, the first table has the means over seeds of the arms, and of the paired
differences between the first arm and the others, with their 95 % intervals by Student's t. Two
questions are answered for each of them:

* within: whether the new mean lies in the stored interval. Even if nothing has changed, this can
  fail, because the new mean is uncertain too and the interval is not its own.
* differs: whether the 95 % interval of the mean change over the seeds that were made again, by
  Student's t, is without 0. Changes are paired by seed, because runs with the same seed have the
  same places. If nothing has changed, about one of 20 rows differs.

The second table has the claims of the figure with their verdicts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from coevolution import RESULTS, Run, Sweep, runs_of
from common import mean_and_interval
from figures import FIGURES, Figure, Results, tasks_of
from report import advantage, cell, differences, inequality, label, title
from verdicts import markdown_row, verdict

from crl.intervals import Mean, plus_minus

AGAIN = Path(__file__).parent / "results" / "reproductions"


class Row(NamedTuple):
    """Metric of an arm, or of a difference between two arms, in both sets of runs."""

    metric: str
    task: str
    arm: str
    stored: Sequence[float]
    """Values by seed."""
    again: Sequence[float]
    """Values of the same seeds."""
    made: Sequence[bool]
    """Whether runs of the seed were made again; the other values are the stored ones."""

    @property
    def within(self) -> bool:
        """True if the mean of the new runs lies in the interval of the stored ones."""
        stored = Mean.of(self.stored)
        return abs(Mean.of(self.again).value - stored.value) <= stored.half_width

    @property
    def change(self) -> Mean:
        """Mean of new minus stored value over the seeds that were made again."""
        values = zip(self.stored, self.again, self.made, strict=True)
        return Mean.of([again - stored for stored, again, made in values if made])

    @property
    def differs(self) -> bool:
        """True if the interval of the change is without 0; False with one seed."""
        return abs(self.change.value) > self.change.half_width


def rows(stored: Results, again: Results) -> Iterator[Row]:
    """Yield the rows of a figure.

    Arms that were not made again are left out, and metrics that an arm does not have.
    """
    first, *others = stored.figure.arms
    for metric in stored.figure.metrics:
        for setting in stored.figure.settings:
            for task in tasks_of(metric, setting):
                for arm in (first, *others):
                    new = made(stored, again, setting, arm)
                    sets = [runs.values(metric, setting, arm, task) for runs in (stored, again)]
                    yield from _row(metric, label(metric, setting, task), arm, new, *sets)
                for arm in others:
                    new = made(stored, again, setting, first, arm)
                    pairs = [
                        [runs.values(metric, setting, name, task) for name in (first, arm)]
                        for runs in (stored, again)
                    ]
                    sets = [differences(*pair) for pair in pairs]
                    of = label(metric, setting, task)
                    yield from _row(metric, of, f"{first} − {arm}", new, *sets)


def made(stored: Results, again: Results, setting: str, *arms: str) -> list[bool]:
    """Return for each seed whether the run of one of the arms was made again in a setting."""
    pairs = (zip(stored.runs[setting, a], again.runs[setting, a], strict=True) for a in arms)
    return [any(old is not new for old, new in of_seed) for of_seed in zip(*pairs, strict=True)]


def _row(
    metric: str, task: str, arm: str, new: Sequence[bool],
    stored: Sequence[float | None], again: Sequence[float | None],
) -> Iterator[Row]:  # fmt: skip
    """Yield the row of the seeds whose values are known, if any of its runs was made again."""
    known = [i for i, pair in enumerate(zip(stored, again, strict=True)) if None not in pair]
    if len(known) > 1 and any(new):
        sets = [[values[i] or 0.0 for i in known] for values in (stored, again)]
        yield Row(metric, task, arm, *sets, made=[new[i] for i in known])


def table(found: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, and a sentence with the numbers of both answers."""
    lines = [
        markdown_row("metric", "task", "arm", "stored", "again", "again − stored", "within"),
        markdown_row(*["---"] * 7),
    ]
    for row in found:
        digits = 0 if abs(fmean(row.stored)) >= 100 else 3
        change = plus_minus(row.change.value, row.change.half_width, digits)
        sets = (cell(row.stored), cell(row.again))
        change += " **differs**" * row.differs
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


def claims(stored: Results, again: Results) -> str:
    """Return the claims of a figure as a Markdown table. Verdicts that differ are bold."""
    sign = "<" if stored.figure.lower_is_better else ">"
    lines = [markdown_row("claim", "stored", "again"), markdown_row(*["---"] * 3)]
    for claim in stored.figure.claims:
        settings = (*(claim.settings or stored.figure.settings), *claim.minus)
        if not any(any(made(stored, again, name, claim.better, claim.worse)) for name in settings):
            continue
        values = [advantage(results, claim) for results in (stored, again)]
        verdicts = [verdict(each) for each in values]
        if verdicts[0] != verdicts[1]:
            verdicts[1] = f"**{verdicts[1]}**"
        cells = [
            f"{mean_and_interval(each)}, {judged}"
            for each, judged in zip(values, verdicts, strict=True)
        ]
        lines.append(markdown_row(inequality(claim, sign), *cells))
    return "\n".join(lines)


def missing_runs(figure: Figure) -> list[Run]:
    """Return the runs of a figure that are not stored."""
    sweep = Sweep(RESULTS, RESULTS, quick=False)
    return [run for run in runs_of(figure, figure.seeds) if not sweep.is_stored(run)]


def read(figure: Figure, folder: Path) -> tuple[Results, Results, list[Run]]:
    """Return the stored runs of a figure, the same with the runs in `folder` instead, and these.

    Runs that are not in `folder` keep their stored ones.
    """
    stored = Sweep(RESULTS, RESULTS, quick=False).results(figure, figure.seeds)
    sweep, runs = Sweep(folder, folder, quick=False), dict(stored.runs)
    new: list[Run] = []
    for (setting, arm), old in stored.runs.items():
        wanted = [Run(setting, arm, seed, figure.folder) for seed in figure.seeds]
        found = {run: sweep.stored(run) for run in wanted}
        if any(found.values()):
            runs[setting, arm] = [a or b for a, b in zip(found.values(), old, strict=True)]
            new += [run for run, result in found.items() if result]
    return stored, replace(stored, runs=runs), new


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figure", nargs="+", choices=[*FIGURES], required=True)
    parser.add_argument("--again", type=Path, help="folder of the new runs")
    arguments = parser.parse_args()
    for name in arguments.figure:
        folder = arguments.again or AGAIN / name
        missing = missing_runs(FIGURES[name])
        if missing:
            parser.error(f"{title(name)} has no stored run {missing[0].path}. Choose other figures")
        stored, again, new = read(FIGURES[name], folder)
        if not new:
            parser.error(f"{folder} has no run of {title(name)}. Give another --again")
        print(f"{title(name)}. New runs: {', '.join(map(str, (run.path for run in new)))}\n")
        print(f"{table([*rows(stored, again)])}\n\n{claims(stored, again)}\n")


if __name__ == "__main__":
    main()

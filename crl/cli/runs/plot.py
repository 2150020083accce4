"""Command `crl plot`: charts of runs in the terminal, or as a picture.

Modules that need more than typer are imported inside the command.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crl.cli import completion
from crl.cli.command import command
from crl.errors import ConfigError

if TYPE_CHECKING:
    from crl.report.charts import Chart

CURVE, MIN_CURVE = 40, 10
"""Columns of a curve in the terminal, and the minimum in a narrow one."""

PLOTS = ("success", "time", "actor", "extractor", "bank", "credit")
"""Names in `crl.report.figures.FIGURES`."""


@command
def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Directories of runs.", autocompletion=completion.runs
        ),
    ],
    what: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            autocompletion=completion.choices(PLOTS),
            help=f"{', '.join(PLOTS[:-1])} or {PLOTS[-1]}.",
        ),
    ] = "success",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Picture to write: PNG, SVG or PDF (default: text)."),
    ] = None,
) -> None:
    """Plot runs: their success, time, training or bank.

    Runs whose settings agree but for the seed are averaged.
    """
    from crl.cli.output import (
        print_lines,
        terminal_width,
        warn_of_damage,
        warn_of_repeated_seeds,
        wrapped,
    )
    from crl.report.figures import FIGURES, arms_of_runs
    from crl.report.run_record import read_runs

    if what not in PLOTS:
        remedy = f"Choose {', '.join(PLOTS[:-1])} or {PLOTS[-1]}"
        raise ConfigError("--what", what, "is not a plot", remedy)
    records = read_runs(runs)
    for record in records:
        warn_of_damage(record.dir.metrics, record.damaged_lines)
    warn_of_repeated_seeds([record.result for record in records])
    arms = arms_of_runs(records)
    charts, names = FIGURES[what](arms), [str(arm) for arm in arms] if len(arms) > 1 else []
    if not charts:
        reason = f"has no values for a plot of {what} yet"
        raise ConfigError("run", str(runs[0]), reason, "Choose another plot with --what")
    if out:
        from crl.report.plot import draw

        draw(charts, out, names)
        print_lines([str(out)])
    else:
        width = terminal_width()
        print_lines(line for name in names for line in wrapped(name, width))
        print_lines([*([""] if names else []), *chart_lines(charts, width)])


def chart_lines(charts: Sequence[Chart], columns: int | None = None) -> Iterator[str]:
    """Yield the lines of charts as text: a curve of block characters for each line.

    `columns`: width of the terminal; None if it is unknown. Curves are shorter in a narrow one.
    """
    from crl.cli.draw import blocks
    from crl.cli.output import wrapped
    from crl.report.charts import BarChart, thinned
    from crl.report.svg import bars, point_text, value_text

    for chart in charts:
        title = f"{chart.title} ({chart.unit})" if chart.unit else chart.title
        yield from wrapped(title, columns)
        if isinstance(chart, BarChart):
            shown = bars(chart)
            width = max((len(bar.name) for bar in shown), default=0)
            others = width + max((len(bar.value) for bar in shown), default=0) + len("      ")
            size = _curve(columns, others)
            for bar in shown:
                drawn = "█" * round(bar.share * size / 100)
                yield f"  {bar.name:<{width}}  {drawn:<{size}}  {bar.value}"
        else:
            low, high = chart.bounds
            width = max(len(line.name) for line in chart.lines)
            ends = [(value_text(line.points[0].y), point_text(line.last)) for line in chart.lines]
            start = max(len(first) for first, _ in ends)
            others = width + start + max(len(last) for _, last in ends) + len("       ")
            size = _curve(columns, others)
            for line, (first, last) in zip(chart.lines, ends, strict=True):
                curve = blocks([p.y for p in thinned(line.points, size)], low, high)
                yield f"  {line.name:<{width}}  {first:>{start}} {curve:<{size}}  {last}"
        yield ""


def _curve(columns: int | None, others: int) -> int:
    """Return the columns of a curve beside `others` columns."""
    return CURVE if columns is None else max(MIN_CURVE, min(CURVE, columns - others))

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

CURVE = 40
"""Columns of a curve in the terminal."""


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
        typer.Option(metavar="NAME", help="success, time, actor, extractor, bank or credit."),
    ] = "success",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Picture to write: PNG, SVG or PDF (default: text)."),
    ] = None,
) -> None:
    """Plot runs: their success, time, training or bank.

    Runs whose settings agree but for the seed are averaged.
    """
    from crl.cli.output import print_lines, warn_of_damage
    from crl.report.figures import FIGURES, arms_of_runs
    from crl.report.run_record import read_runs

    if what not in FIGURES:
        remedy = f"Choose {', '.join(list(FIGURES)[:-1])} or {list(FIGURES)[-1]}"
        raise ConfigError("--what", what, "is not a plot", remedy)
    records = read_runs(runs)
    for record in records:
        warn_of_damage(record.dir.metrics, record.damaged_lines)
    arms = arms_of_runs(records)
    charts, names = FIGURES[what](arms), [str(arm) for arm in arms] if len(arms) > 1 else []
    if not charts:
        reason = f"has no values for a plot of {what} yet"
        raise ConfigError("run", str(runs[0]), reason, "Choose another plot with --what")
    if out:
        from crl.report.plot import draw

        draw(charts, out, names)
        typer.echo(str(out))
    else:
        print_lines([*names, *([""] if names else []), *chart_lines(charts)])


def chart_lines(charts: Sequence[Chart]) -> Iterator[str]:
    """Yield the lines of charts as text: a curve of block characters for each line."""
    from crl.cli.draw import blocks
    from crl.report.charts import BarChart, thinned
    from crl.report.svg import bars, point_text, value_text

    for chart in charts:
        yield f"{chart.title} ({chart.unit})" if chart.unit else chart.title
        if isinstance(chart, BarChart):
            shown = bars(chart)
            width = max((len(bar.name) for bar in shown), default=0)
            for bar in shown:
                drawn = "█" * round(bar.share * CURVE / 100)
                yield f"  {bar.name:<{width}}  {drawn:<{CURVE}}  {bar.value}"
        else:
            low, high = chart.bounds
            width = max(len(line.name) for line in chart.lines)
            for line in chart.lines:
                curve = blocks([p.y for p in thinned(line.points, CURVE)], low, high)
                first, last = value_text(line.points[0].y), point_text(line.last)
                yield f"  {line.name:<{width}}  {first:>8} {curve:<{CURVE}}  {last}"
        yield ""

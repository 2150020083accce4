"""Charts as pictures, drawn with matplotlib (extra `plot`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from crl.errors import ConfigError
from crl.extras import require_package
from crl.report.charts import BarChart, Chart, LineChart
from crl.wording import printable_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 3
"""Maximum number of charts side by side."""

SUFFIXES = (".png", ".svg", ".pdf")
"""Ends of the names of pictures."""

COLOURS = ("#0b62b0", "#b34700", "#1a7f37", "#8250df", "#9a6700", "#bf3989")
"""Colours of lines, those of the report."""

STYLES = ("-", "--", ":", "-.")


def draw(charts: Sequence[Chart], file: Path, lines: Sequence[str] = ()) -> None:
    """Draw the charts into one picture, whose format is that of the name of `file`.

    `lines` are written above the charts. Raise `ConfigError` without matplotlib, for another
    format, or if the file cannot be written.
    """
    if file.suffix.lower() not in SUFFIXES:
        reason = "is not the name of a picture"
        raise ConfigError(
            "--out", str(file), reason, f"Use one that ends with {' or '.join(SUFFIXES)}"
        )
    require_package("matplotlib", "--out", str(file), extra="plot")
    from matplotlib.figure import Figure

    columns = min(COLUMNS, len(charts))
    rows = math.ceil(len(charts) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for panel, chart in zip(panels.flat, charts, strict=False):
        _draw(panel, chart)
    for panel in list(panels.flat)[len(charts) :]:
        panel.set_axis_off()
    figure.suptitle(_plain("\n".join(lines)), fontsize=10)
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise ConfigError("--out", str(file), reason, "Choose another file") from error


def _draw(panel: Axes, chart: Chart) -> None:
    panel.set_title(_plain(chart.title), fontsize=10)
    if isinstance(chart, BarChart):
        names = [_plain(name) for name in chart.bars]
        panel.barh(names[::-1], list(chart.bars.values())[::-1], color=COLOURS[0])
        panel.set_xlabel(_plain(chart.unit))
        return
    _draw_lines(panel, chart)


def _draw_lines(panel: Axes, chart: LineChart) -> None:
    from matplotlib.ticker import MaxNLocator

    for line in chart.lines:
        colour = COLOURS[line.number % len(COLOURS)]
        xs = [point.x for point in line.points]
        marker = "o" if len(xs) == 1 else None
        panel.plot(
            xs, [point.y for point in line.points], color=colour, marker=marker,
            linestyle=STYLES[line.number % len(STYLES)], label=_plain(line.name),
        )  # fmt: skip
        low, high = ([getattr(p, end) for p in line.points] for end in ("low", "high"))
        if len(xs) > 1:
            panel.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
        else:
            panel.vlines(xs, low, high, color=colour)
    panel.set_ylim(chart.low, chart.high)
    panel.set_xlabel("step")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_ylabel(_plain(chart.unit))
    if any(line.name for line in chart.lines):
        panel.legend(fontsize=8)


def _plain(text: str) -> str:
    """Return a text that matplotlib shows as it is."""
    return printable_lines(text).replace("$", r"\$")

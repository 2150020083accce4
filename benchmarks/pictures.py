"""Pictures of the figures of `coevolution.py`, drawn from stored runs. Needs matplotlib.

A picture has a row of panels for each task, or several rows if it has many metrics:

* Training metrics are curves over the steps, and over the costs `against` if there are any. Thin
  lines are seeds, thick lines are means over seeds. Values are means of `WINDOW` steps.
* Metrics of the last evaluation, and costs, are points: small ones for seeds, and one with an
  error bar for the mean and its 95 % interval by Student's t. Costs of a mixture are left out.

Equal runs give equal files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from figures import METRICS, SETTINGS, Cost, Lines, Results, TrainingMetric, tasks_of

from crl.intervals import Mean

WINDOW = 5
"""Number of steps of one point of a curve."""

COLOURS = (
    "#D55E00", "#0072B2", "#555555", "#CC79A7", "#009E73", "#E69F00", "#56B4E9", "#000000",
    "#F0E442",
)  # fmt: skip
"""Palette of Okabe and Ito, which is safe for colour-blind readers, and grey."""

FREQUENT_ARMS = ("co-evolved", "none", "static", "experience only")
"""Arms of several figures. They have the first colours, and the other arms have the rest."""

MAX_COLUMNS = 4
"""Maximum number of panels side by side."""

MAX_NAMES = 6
"""Maximum number of arms with names below a panel. The legend has all names."""

STEP = "actor step"
EARLY = "early training"
"""Metric without a picture: it is the begin of the curve of `training`."""

Curves = Mapping[str, Sequence[Lines]]
"""Lines of metrics.jsonl of every run, by arm, in the order of seeds."""


def draw(results: Results, path: Path) -> None:
    """Draw a figure into an SVG file."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
    from matplotlib.lines import Line2D  # pyright: ignore[reportMissingImports]

    figure = results.figure
    rows = [(setting, task) for setting in figure.settings for task in SETTINGS[setting]]
    columns = [
        (name, against)
        for name in figure.drawn or figure.metrics
        if name != EARLY and all(tasks_of(name, of) == SETTINGS[of] for of in figure.settings)
        for against in ((STEP, *figure.against) if is_curve(name) else (STEP,))
    ]
    height = -(-len(columns) // MAX_COLUMNS)
    """Rows of panels of one task."""
    width = -(-len(columns) // height)
    size = (3.4 * width, 2.6 * len(rows) * height + 0.6)
    colours = arm_colours(figure.arms)
    with matplotlib.rc_context({"svg.hashsalt": "crl", "font.size": 9}):
        picture, axes = pyplot.subplots(
            len(rows) * height, width, figsize=size, squeeze=False, layout="constrained"
        )
        for panels, (setting, task) in zip(axes.reshape(len(rows), -1), rows, strict=True):
            for panel, (name, against) in zip(panels, columns, strict=False):
                draw_panel(panel, name, against, curves_of(results, setting), task, colours)
            for panel in panels[len(columns) :]:
                panel.set_visible(False)
            panels[0].set_ylabel(task if setting == task else f"{setting}: {task}")
        handles = [Line2D([], [], color=colours[arm], label=arm) for arm in figure.arms]
        picture.legend(handles=handles, loc="outside lower center", ncols=4)
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(picture)


def arm_colours(arms: Sequence[str]) -> Mapping[str, str]:
    """Return the colours of the arms of a figure, at most as many as there are colours."""
    fixed: dict[str, str] = dict(zip(FREQUENT_ARMS, COLOURS, strict=False))
    unused = [colour for arm, colour in fixed.items() if arm not in arms]
    others = iter([*COLOURS[len(FREQUENT_ARMS) :], *unused])
    return {arm: fixed.get(arm) or next(others) for arm in arms}


def curves_of(results: Results, setting: str) -> Curves:
    """Return the metrics of the runs of a setting, by arm."""
    return {
        arm: [run["metrics"] for run in results.runs[setting, arm]] for arm in results.figure.arms
    }


def is_curve(name: str) -> bool:
    """Return whether a metric has a value for each training step."""
    return isinstance(METRICS[name], TrainingMetric)


def draw_panel(
    panel: Any, name: str, against: str, curves: Curves, task: str, colours: Mapping[str, str]
) -> None:
    """Draw one metric of one task. `panel`: axes of matplotlib."""
    for place, (arm, seeds) in enumerate(curves.items()):
        colour = colours[arm]
        if is_curve(name):
            draw_curves(panel, [points(lines, name, against, task) for lines in seeds], colour)
        else:
            draw_values(panel, [METRICS[name](lines, task) for lines in seeds], place, colour)
    if is_curve(name):
        panel.set_xlabel(against)
    else:
        names = curves if len(curves) <= MAX_NAMES else [""] * len(curves)
        panel.set_xticks(range(len(curves)), names, rotation=20, ha="right")
    if name != "actions" and not isinstance(METRICS[name], Cost):
        low, high = panel.get_ylim()
        panel.set_ylim(min(low, 0), max(high, 1))
    panel.set_title(name)
    panel.grid(alpha=0.3)


def points(lines: Lines, name: str, against: str, task: str) -> list[tuple[float, float]]:
    """Return the points of a curve: the last x and the mean value of `WINDOW` successive steps."""
    metric, cost = METRICS[name], METRICS.get(against)
    assert isinstance(metric, TrainingMetric)
    values = metric.curve(lines, task)
    xs = cost.curve(lines) if isinstance(cost, Cost) else range(1, len(values) + 1)
    known = [(x, value) for x, value in zip(xs, values, strict=True) if value is not None]
    parts = [known[begin : begin + WINDOW] for begin in range(0, len(known), WINDOW)]
    return [(part[-1][0], fmean(value for _, value in part)) for part in parts]


def draw_curves(panel: Any, seeds: Sequence[Sequence[tuple[float, float]]], colour: str) -> None:
    for seed in seeds:
        panel.plot([x for x, _ in seed], [y for _, y in seed], color=colour, lw=0.5, alpha=0.5)
    places = list(zip(*seeds, strict=False))
    means = [[fmean(point[axis] for point in place) for place in places] for axis in (0, 1)]
    panel.plot(*means, color=colour, lw=2)


def draw_values(panel: Any, seeds: Sequence[float | None], place: int, colour: str) -> None:
    known = [value for value in seeds if value is not None]
    if not known:
        return
    panel.plot([place - 0.15] * len(known), known, ".", color=colour, alpha=0.5)
    mean = Mean.of(known)
    half = mean.half_width if len(known) > 1 else None
    panel.errorbar([place], [mean.value], yerr=half, fmt="o", color=colour, capsize=3)

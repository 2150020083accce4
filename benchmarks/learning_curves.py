"""Picture of success during training, from the raw numbers of main_command.py.

    python benchmarks/learning_curves.py

The command reads benchmarks/results/main_command.json and writes docs/images/learning_curves.svg.
Needs matplotlib (`pip install '.[benchmarks]'`).

A panel has the training episodes of one setting: the room alone, or all tasks of the mixture
together. The raw numbers have no curves by task. A line is the mean over seeds of success over the
last WINDOW steps. A band is the 95 % interval of this mean by Student's t over seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from crl.intervals import Mean

RESULTS = Path(__file__).parent / "results" / "main_command.json"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "learning_curves.svg"

WINDOW = 10
"""Number of steps over which success is averaged."""


@dataclass(frozen=True)
class Line:
    """Line of a panel."""

    label: str
    """Text in the legend."""
    arm: str
    """Arm of main_command.py."""
    curve: str
    """Curve of the arm's runs."""
    colour: str
    """Colour from the palette of Okabe and Ito, which is safe for colour-blind readers."""
    dashes: str
    """Line style of matplotlib."""


LINES = (
    Line("both models, with experience", "co-evolved", "success/guided", "#D55E00", "-"),
    Line("both models, without experience", "co-evolved", "success/free", "#0072B2", "-"),
    Line("actor alone (GRPO)", "none", "success/free", "#555555", "--"),
)
PANELS = {"room": "room alone", "mixture": "room, webshop and alfworld together"}
"""Titles of the panels by setting of main_command.py."""


def moving_mean(values: Sequence[float | None]) -> list[float]:
    """Return, for each step, the mean of the last WINDOW values, or of all values so far.

    Steps without a value do not count. Raise `ValueError` if a window has no value.
    """
    means = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - WINDOW) : end] if value is not None]
        if not known:
            raise ValueError(f"no value in the {WINDOW} steps before step {end}")
        means.append(fmean(known))
    return means


def means_over_seeds(runs: Sequence[Mapping[str, Any]], curve: str) -> list[Mean]:
    """Return, for each step, the mean over runs of the smoothed curve."""
    smoothed = [moving_mean(run["curves"][curve]) for run in runs]
    return [Mean.of(values) for values in zip(*smoothed, strict=True)]


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw all panels into an SVG file. Equal runs give equal files."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    with matplotlib.rc_context({"svg.hashsalt": "crl", "font.size": 11}):
        figure, panels = pyplot.subplots(1, len(PANELS), figsize=(10, 4.2), sharey=True)
        for panel, (setting, title) in zip(panels, PANELS.items(), strict=True):
            draw_panel(panel, [run for run in runs if run["setting"] == setting])
            panel.set_title(title)
        panels[0].set_ylabel(f"success, mean of {WINDOW} steps")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=len(LINES))
        figure.tight_layout(rect=(0, 0.08, 1, 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def draw_panel(panel: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    """Draw the lines and bands of one setting. `panel`: axes of matplotlib."""
    for line in LINES:
        means = means_over_seeds([run for run in runs if run["arm"] == line.arm], line.curve)
        steps = range(1, len(means) + 1)
        low, high = ([m.value + sign * m.half_width for m in means] for sign in (-1, 1))
        panel.plot(
            steps, [m.value for m in means], line.dashes, color=line.colour, label=line.label
        )
        panel.fill_between(steps, low, high, color=line.colour, alpha=0.2, linewidth=0)
    panel.set_xlabel("actor step")
    panel.set_ylim(0, 1)
    panel.margins(x=0)
    panel.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=PICTURE, help="SVG file of the picture")
    arguments = parser.parse_args()
    draw(json.loads(RESULTS.read_text("utf-8"))["runs"], arguments.out)


if __name__ == "__main__":
    main()

"""Charts as data. `crl.report.svg` draws them for HTML, `crl.report.plot` as files and text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from crl.evaluation.comparison import ROUNDING
from crl.intervals import Mean


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    low: float = math.nan
    """Lower end of the 95 % interval of `y`; NaN if it is unknown."""
    high: float = math.nan
    """Upper end; NaN if it is unknown."""


@dataclass(frozen=True)
class Line:
    name: str
    """Name in the legend; empty for the only line of a chart, which needs none."""
    points: Sequence[Point]
    number: int = 0
    """Number of the line's colour. Lines of one meaning have the same number in all charts."""

    @property
    def last(self) -> Point:
        return self.points[-1]


@dataclass(frozen=True)
class LineChart:
    """Curves over steps."""

    title: str
    unit: str
    """Unit of the values, or an empty text."""
    lines: Sequence[Line]
    """Lines with at least one point."""
    low: float | None = None
    """Lower end of the axis; None: from the values."""
    high: float | None = None
    """Upper end of the axis; None: from the values."""
    note: str = ""
    """Explanation for readers."""
    possible: tuple[float, float] = (-math.inf, math.inf)
    """Smallest and largest possible value. An axis for equal values does not go beyond them."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Range of the axis: `low` and `high`, or else that of the values and their intervals."""
        values = [
            y
            for line in self.lines
            for point in line.points
            for y in (point.y, point.low, point.high)
            if math.isfinite(y)
        ]
        low = min(values, default=0.0) if self.low is None else self.low
        high = max(values, default=1.0) if self.high is None else self.high
        if low < high:
            return low, high
        return max(low - 0.5, self.possible[0]), min(low + 0.5, self.possible[1])


@dataclass(frozen=True)
class BarChart:
    """Values of categories, in their order."""

    title: str
    unit: str
    bars: Mapping[str, float]
    note: str = ""


Chart = LineChart | BarChart


def averaged(points: Sequence[Point], window: int) -> list[Point]:
    """Return the mean of the last `window` values at each point, without intervals."""
    return [
        Point(point.x, fmean(p.y for p in points[max(0, i - window + 1) : i + 1]))
        for i, point in enumerate(points)
    ]


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` points: means over equal numbers of points, at the last one's x."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return list(points)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [
        Point(group[-1].x, *(fmean(getattr(p, end) for p in group) for end in ("y", "low", "high")))
        for group in groups
    ]


def over_seeds(
    runs: Sequence[Sequence[Point]], low: float = -math.inf, high: float = math.inf
) -> list[Point]:
    """Return the mean over runs at every x, with Student's interval over the runs that have it.

    A run without points is empty. The interval is cut to [`low`, `high`]. It is unknown for equal
    values, as in `crl compare`, and where only one of several runs has the x. A single run keeps
    its own intervals.
    """
    if len(runs) == 1:
        return list(runs[0])
    at: dict[float, list[float]] = {}
    for run in runs:
        for point in run:
            at.setdefault(point.x, []).append(point.y)
    points = []
    for x, values in sorted(at.items()):
        mean = Mean.of(values)
        half = mean.half_width if mean.half_width > ROUNDING else math.nan
        ends = max(mean.value - half, low), min(mean.value + half, high)
        points.append(Point(x, mean.value, *(ends if math.isfinite(half) else ())))
    return points

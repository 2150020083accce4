"""Geometry of charts. The templates draw it as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from crl.report.charts import BarChart, Line, LineChart, Point

WIDTH, HEIGHT = 360, 232
"""Size of a line chart, in units of its view box. Text of 12 units is readable on a phone."""

LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 40
"""Margins of the plot. The left one is wider for long labels."""

CHARACTER = 6.5
"""Approximate width of a character of a label."""

TICKS = 5
"""Approximate number of ticks of an axis."""

MOST_BARS = 12
"""Maximum number of points whose intervals are drawn as bars. More intervals are a band."""


@dataclass(frozen=True)
class Tick:
    at: float
    """Position in the view box."""
    text: str


@dataclass(frozen=True)
class LineGeometry:
    """Positions of a line chart."""

    chart: LineChart

    @cached_property
    def _x(self) -> tuple[float, float]:
        xs = [point.x for line in self.chart.lines for point in line.points]
        low, high = min(xs, default=0.0), max(xs, default=1.0)
        return (low, high) if low < high else (max(0.0, low - 1), high + 1)

    @cached_property
    def left(self) -> float:
        """Left margin of the plot, wide enough for the labels of the y axis."""
        longest = max(len(text) for _, text in ticks(*self.chart.bounds))
        return max(LEFT, math.ceil(8 + CHARACTER * longest))

    def x(self, value: float) -> float:
        low, high = self._x
        return round(self.left + (value - low) / (high - low) * (WIDTH - self.left - RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self.chart.bounds
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    @property
    def x_ticks(self) -> list[Tick]:
        return [Tick(self.x(value), text) for value, text in ticks(*self._x, whole=True)]

    @property
    def y_ticks(self) -> list[Tick]:
        return [Tick(self.y(value), text) for value, text in ticks(*self.chart.bounds)]

    def path(self, line: Line) -> str:
        """Return the points of a line, for the attribute `points` of a polyline."""
        return " ".join(f"{self.x(p.x)},{self.y(p.y)}" for p in line.points)

    def band(self, line: Line) -> str:
        """Return the outline of the intervals of a line with many points; empty without any."""
        known = [p for p in line.points if _has_interval(p)]
        if len(known) <= MOST_BARS:
            return ""
        upper = [f"{self.x(p.x)},{self.y(p.high)}" for p in known]
        lower = [f"{self.x(p.x)},{self.y(p.low)}" for p in reversed(known)]
        return " ".join([*upper, *lower])

    def intervals(self, line: Line) -> list[tuple[float, float, float]]:
        """Return (x, y of the lower end, y of the upper end) of the intervals of a short line."""
        known = [p for p in line.points if _has_interval(p)]
        if len(known) > MOST_BARS:
            return []
        return [(self.x(p.x), self.y(p.low), self.y(p.high)) for p in known]

    def marks(self, line: Line) -> list[tuple[float, float, str]]:
        """Return (x, y, text) of the points of a short line."""
        if len(line.points) > MOST_BARS:
            return []
        name = f"{line.name}, " if line.name else ""
        return [(self.x(p.x), self.y(p.y), f"{name}{point_text(p)}") for p in line.points]


@dataclass(frozen=True)
class Bar:
    name: str
    value: str
    share: float
    """Share of the longest bar, in percent."""


def bars(chart: BarChart) -> list[Bar]:
    """Return the bars of a chart with their lengths."""
    longest = max((abs(value) for value in chart.bars.values()), default=0.0) or 1.0
    return [
        Bar(name, value_text(value), round(100 * abs(value) / longest, 1))
        for name, value in chart.bars.items()
    ]


def sparkline(
    values: Sequence[float], width: int = 120, height: int = 24, *, low: float = 0.0,
    high: float = 1.0, xs: Sequence[float] | None = None,
) -> str:  # fmt: skip
    """Return the points of a small curve of values in [`low`, `high`]; empty with less than two.

    `xs`: increasing positions of the values; None: equal distances.
    """
    if len(values) < 2:
        return ""
    xs = range(len(values)) if xs is None else xs
    return " ".join(
        f"{(x - xs[0]) / (xs[-1] - xs[0]) * width:.1f},"
        f"{height - 2 - (value - low) / (high - low) * (height - 4):.1f}"
        for x, value in zip(xs, values, strict=True)
    )


def ticks(low: float, high: float, *, whole: bool = False) -> list[tuple[float, str]]:
    """Return round values between two ends, with their texts, at distances of 1, 2 or 5 · 10^k.

    The texts differ. `whole`: the values are whole numbers, such as steps.
    """
    raw = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next((m for m in (1, 2, 5) if m * power >= raw * 0.999), 10)
    if whole:
        step = max(step, 1.0)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    values = [i * step for i in range(first, last + 1)]
    if 1e-4 <= step < 1e6:
        return [(value, f"{value:,.{digits}f}") for value in values]
    texts = [""]
    for digits in range(MOST_DIGITS):
        texts = [f"{value:.{digits}e}" if value else "0" for value in values]
        if len({*texts}) == len(texts):
            break
    return list(zip(values, texts, strict=True))


MOST_DIGITS = 17
"""Maximum number of decimal digits of a tick. Two numbers with the same digits are equal."""


def value_text(value: float) -> str:
    """Return a number with three significant digits, or all digits of a larger one."""
    if not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def point_text(point: Point) -> str:
    """Return a point in words: step 100: 0.812 [0.760, 0.855]."""
    interval = (
        f" [{value_text(point.low)}, {value_text(point.high)}]" if _has_interval(point) else ""
    )
    return f"step {point.x:g}: {value_text(point.y)}{interval}"


def described(chart: LineChart) -> str:
    """Return the text of a chart for readers who do not see it: the ends of its lines."""
    ends = []
    for line in chart.lines:
        first = f"from {value_text(line.points[0].y)} " if len(line.points) > 1 else ""
        values = f"{first}to {point_text(line.last)}"
        ends.append(f"{line.name}: {values}" if line.name else values[0].upper() + values[1:])
    return f"{chart.title}. {'; '.join(ends)}."


def _has_interval(point: Point) -> bool:
    return math.isfinite(point.low) and math.isfinite(point.high)

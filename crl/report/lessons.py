"""Experiences of a bank for readers: the best and the worst, with their history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from crl.manager.inspection.reading import (
    BankReader,
    EntryView,
    LiftView,
    UseView,
    VersionView,
    open_reader,
    pooled_lift,
)
from crl.report.charts import BarChart, Point
from crl.types import lift_order

MOST_ROWS = 100
"""Maximum number of the best experiences, and of the worst, in the table."""

MOST_STORIES = 10
"""Maximum number of the best experiences with a story; half as many of the worst."""

MOST_VERSIONS = 10
"""Maximum number of versions in a story."""

MOST_USES = 12
"""Maximum number of episodes that a story lists."""


LIFTS: Mapping[str, str] = {
    "above": "above 0", "below": "below 0", "around": "includes 0", "unknown": "not measured",
}  # fmt: skip
"""Words for the kinds of lifts in the statistics of a bank."""


@dataclass(frozen=True)
class Story:
    """Experience with its history."""

    entry: EntryView
    versions: Sequence[VersionView]
    """Versions and their parents, the newest first."""
    uses: Sequence[UseView]
    """Last episodes that the experience guided, in their order."""
    total_uses: int
    rates: Sequence[float]
    """Share of won episodes after each use."""
    lifts: Sequence[Point]
    """Lift over all groups so far, after each step in which one was measured; x is the step.

    Steps of earlier runs count as step 0.
    """
    evicted: str
    """Time and reason of the eviction; empty for an active experience."""


@dataclass(frozen=True)
class LessonCounts:
    """Numbers of the experiences of a bank."""

    stats: Mapping[str, Any]
    """Metrics of the bank (`BankReader.stats`)."""

    @property
    def active(self) -> int:
        """Number of active experiences."""
        return self.stats["used"]["active"]

    @property
    def measured(self) -> int:
        """Number of active experiences with a lift."""
        return self.active - self.stats["lift"]["unknown"]

    @property
    def charts(self) -> list[BarChart]:
        """Distributions of the success of active experiences, and of their lifts."""
        bins = self.stats["won"]
        width = 100 // len(bins)
        ends = [f"{i * width} to {(i + 1) * width} %" for i in range(len(bins))]
        charts = [
            BarChart(
                "Success of the episodes that an experience guided", "number of experiences",
                dict(zip(ends, bins, strict=True)),
            ),
            BarChart(
                "Lift of the experiences", "number of experiences",
                {LIFTS[name]: number for name, number in self.stats["lift"].items()},
                "Above and below 0: the 95 % interval excludes 0.",
            ),
        ]  # fmt: skip
        return [chart for chart in charts if any(chart.bars.values())]


@dataclass(frozen=True)
class Lessons(LessonCounts):
    """Content of the report's section on the bank."""

    rows: Sequence[EntryView]
    """Active experiences with a lift: the best, then the worst."""
    best: Sequence[Story]
    worst: Sequence[Story]

    @property
    def best_note(self) -> str:
        """Sentence on the number of best experiences that are shown to help."""
        return _shown_note(self.best, 1, "help")

    @property
    def worst_note(self) -> str:
        """Sentence on the number of worst experiences that are shown to harm."""
        return _shown_note(self.worst, -1, "harm")


def _shown_note(stories: Sequence[Story], sign: int, effect: str) -> str:
    """Return a sentence on the number of lifts with this sign; empty without stories."""
    if not stories:
        return ""
    lifts = [story.entry.counters.lift for story in stories]
    shown = sum(lift is not None and lift.sign == sign for lift in lifts)
    if not shown:
        return f"No experience is shown to {effect}: all intervals include 0."
    verb = "is" if shown == 1 else "are"
    return f"{shown} of {len(stories)} listed {verb} shown to {effect}: the interval excludes 0."


def read_counts(path: Path) -> LessonCounts | None:
    """Return the numbers of the experiences of the bank at `path`; None if there is no bank."""
    if not path.is_file():
        return None
    with open_reader(path) as bank:
        return LessonCounts(bank.stats())


def read_lessons(path: Path) -> Lessons | None:
    """Return the experiences of the bank at `path`; None if there is no bank."""
    if not path.is_file():
        return None
    with open_reader(path) as bank:
        measured = sorted(
            (entry for entry in bank.entries() if entry.counters.lift),
            key=lambda entry: lift_order(entry.counters.lift),
        )
        # The worst are those whose lift is surely low: the order of the negated lifts.
        worst = sorted(
            measured, key=lambda e: lift_order(-e.counters.lift if e.counters.lift else None)
        )
        best_rows = measured[:MOST_ROWS]
        chosen = {entry.uid for entry in best_rows}
        rows = [*best_rows, *(e for e in worst[:MOST_ROWS][::-1] if e.uid not in chosen)]
        harmful = [e for e in worst if e.counters.lift and e.counters.lift.mean < 0]
        helpful = [e for e in measured if e.counters.lift and e.counters.lift.mean > 0]
        return Lessons(
            bank.stats(),
            rows,
            [_story(bank, entry) for entry in helpful[:MOST_STORIES]],
            [_story(bank, entry) for entry in harmful[: MOST_STORIES // 2]],
        )


def _story(bank: BankReader, entry: EntryView) -> Story:
    uses = bank.uses(entry.uid)
    won = accumulate(use.reward > 0 for use in uses)
    eviction = bank.eviction(entry.uid)
    return Story(
        entry,
        bank.lineage(entry.unit)[::-1][:MOST_VERSIONS],
        uses[-MOST_USES:],
        len(uses),
        [wins / (i + 1) for i, wins in enumerate(won)],
        lift_curve(bank.lifts(entry.uid)),
        f"after step {eviction.step} ({eviction.why})" if eviction else "",
    )


def lift_curve(views: Sequence[LiftView]) -> list[Point]:
    """Return the lift over all groups so far after each step, with its interval.

    Groups of another run count, and have no point.
    """
    points, total = [], None
    for step, group in groupby(views, key=lambda view: view.step):
        total = pooled_lift([total, *(view.lift for view in group)])
        if step is not None and total is not None:
            points.append(Point(step, total.mean, total.low, total.high))
    return points

"""Page "bank": growth, operations, queue and searches, and experiences with their lift."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.text import Text

from crl.cli.dashboard.overview import metric_cells, queue_cells
from crl.cli.dashboard.parts import (
    Body,
    experience_lines,
    experience_title,
    rule,
    without_lift,
)
from crl.cli.draw import DIM, FREE, GOOD, cell, flow, format_number, one_line, sparkline
from crl.monitor.snapshot import Snapshot
from crl.wording import OPERATION_WORDS


def bank(s: Snapshot, width: int, height: int) -> Body:
    """Return the page."""
    if not s.series("bank", "bank/size").values:
        return Body([Text("The run has no metrics of a bank so far.", DIM)])
    lines = [*_metrics(s, width), rule(experience_title(width), width), *experience_lines(s, width)]
    others = without_lift(s)
    return Body([*lines, *([others] if others else [])])


def _metrics(s: Snapshot, width: int) -> Iterator[Text]:
    """Yield the lines about the metrics of the bank."""
    size = s.series("bank", "bank/size")
    size_cells = metric_cells(
        s, "bank", ("experiences", "bank/size", ",.0f"), ("with lift", "bank/with_lift", ",.0f")
    )
    yield from flow("size", [*size_cells, Text(sparkline(size, max(0, width - 50)), FREE)], width)
    tasks = _last_values(s, "bank/size/")
    if len(tasks) > 1:
        yield from flow("by task", tasks, width)
    yield from flow("ops", _last_values(s, "ops/", OPERATION_WORDS), width)
    yield from flow("refused", _last_values(s, "dropped/"), width)
    yield from flow("queue", queue_cells(s), width)
    yield from flow(
        "retrieval",
        metric_cells(
            s, "bank",
            ("hits", "retrieval/hit_rate", ".0%"), ("same goal", "retrieval/same_goal", ".0%"),
            ("p50 ms", "perf/search_p50_ms", ".1f"), ("p95 ms", "perf/search_p95_ms", ".1f"),
            ("cached", "perf/embed_cache_hits", ".0%"),
        ),
        width,
    )  # fmt: skip
    yield from flow(
        "lessons",
        metric_cells(
            s, "bank",
            ("correct", "lessons/correct", ".0%"),
            ("correct when informative", "lessons/correct_when_informative", ".0%"),
            ("answers", "lessons/answers", ",.0f"),
        ),
        width,
    )  # fmt: skip


def _last_values(s: Snapshot, prefix: str, words: Mapping[str, str] | None = None) -> list[Text]:
    """Return cells with the metrics under `prefix` that are not 0.

    `words`: labels by the end of the name, instead of this end.
    """
    words = words or {}
    ends = {
        name.removeprefix(prefix): series
        for name, series in s.metrics.get("bank", {}).items()
        if name.startswith(prefix) and series.last
    }
    return [
        cell(words.get(end, one_line(end, 60)), format_number(series.last, ",.0f"), GOOD)
        for end, series in ends.items()
    ]

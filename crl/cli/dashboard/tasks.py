"""Page "tasks": training episodes, evaluations and advice probe of each task."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from crl.cli.dashboard.overview import metric_cells
from crl.cli.dashboard.parts import (
    Body,
    advice,
    condition_lines,
    evaluation_lines,
    rate_line,
    rule,
)
from crl.cli.draw import DIM, flow, one_line
from crl.config.schema import OVERALL
from crl.monitor.snapshot import Snapshot

DETAILS = (
    ("reward", "reward", "+.3f"),
    ("score", "score", ".1f"),
    ("turns", "turns", ",.1f"),
    ("used", "used", ".0%"),
    ("truncated", "truncated", ".0%"),
    ("invalid actions", "invalid_actions", ".0%"),
    ("errors", "errors", ",.0f"),
)
"""Further metrics of the training episodes: label, name of the metric, and format."""


def tasks(s: Snapshot, width: int, height: int) -> Body:
    """Return the page: a block of lines for each task, and one for all tasks together."""
    lines: list[Text] = []
    several = len(s.run.tasks) > 1
    for name in s.run.tasks:
        lines.append(rule(one_line(name, width), width))
        lines += _task(s, width, name, f"rollout/{name}" if several else "rollout")
    if several:
        lines.append(rule("all tasks", width))
        lines += _task(s, width, OVERALL, "rollout")
    return Body(lines)


def _task(s: Snapshot, width: int, name: str, prefix: str) -> Iterator[Text]:
    """Yield the lines of a task. `prefix`: start of the names of its metrics in training."""
    rates = list(condition_lines(s, width, prefix))
    success = s.series("train", f"{prefix}/success")
    if len(rates) > 1:
        yield rate_line("episodes", success, width, "")
    yield from rates
    details = ((label, f"{prefix}/{key}", spec) for label, key, spec in DETAILS)
    yield from flow("", metric_cells(s, "train", *details), width)
    sets = {
        key: key.rpartition("/")[2] for key in s.evaluations.sets if key.rpartition("/")[0] == name
    }
    yield from evaluation_lines(s, width, sets)
    scores = (
        (f"{split} score", f"eval/{name}/{split}/score/free", ".1f") for split in sets.values()
    )
    yield from flow("", metric_cells(s, "eval", *scores), width)
    if probe := s.evaluations.probes.get(name):
        yield from flow("advice", [advice(probe)], width)
    size = s.series("bank", f"bank/size/{name}")
    if size.values:
        yield from flow(
            "bank", metric_cells(s, "bank", ("experiences", f"bank/size/{name}", ",.0f")), width
        )
    if not rates and not sets:
        yield Text("No episode of this task is finished yet.", DIM)

"""Log lines for a terminal or a pipe.

Each line of metrics.jsonl becomes a readable line, or a small table if it contains values of
several tasks.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import TextIO

from crl.intervals import number_text
from crl.protocols import Metrics, Monitor
from crl.wording import printable_lines

Columns = tuple[tuple[str, str, str], ...]
"""Cells of a line: (label, metric, format). A metric that is missing is left out."""

TRAIN_COLUMNS: Columns = (
    ("success", "rollout/success", ".3f"),
    ("guided", "rollout/success/guided", ".3f"),
    ("free", "rollout/success/free", ".3f"),
    ("loss", "actor/loss", "+.4f"),
    ("lr", "actor/learning_rate", ".1e"),
    ("kl", "actor/approx_kl", ".4f"),
    ("ref kl", "actor/reference_kl", ".3f"),
    ("clip", "actor/clip_fraction", ".3f"),
    ("stale", "staleness/mean", ".2f"),
    ("accepted", "critic/accept", ".2f"),
    ("refined", "critic/refine", ".2f"),
    ("rejected", "critic/reject", ".2f"),
    ("malformed", "critic/malformed", ".2f"),
)

HIDDEN_IF_ZERO = frozenset({"critic/malformed"})
"""Metrics that are only shown if they are not 0."""

CONDITION_METRICS = frozenset({"rollout/success/guided", "rollout/success/free"})
"""Metrics that are only shown if both are present. A single one equals the overall success rate."""

EXTRACTOR_COLUMNS: Columns = (
    ("reward", "extractor/reward", "+.3f"),
    ("loss", "extractor/loss", "+.4f"),
    ("lr", "extractor/learning_rate", ".1e"),
    ("kl", "extractor/approx_kl", ".4f"),
    ("ref kl", "extractor/reference_kl", ".3f"),
    ("clip", "extractor/clip_fraction", ".3f"),
    ("updates", "extractor/updates", ".0f"),
)

BANK_COLUMNS: Columns = (
    ("size", "bank/size", ".0f"),
    ("add", "ops/add", ".0f"),
    ("update", "ops/update", ".0f"),
    ("return", "ops/return", ".0f"),
    ("drop", "ops/drop", ".0f"),
    ("pending", "queue/pending", ".0f"),
    ("dead", "queue/dead", ".0f"),
    ("ready", "buffer/ready", ".0f"),
    ("hits", "retrieval/hit_rate", ".2f"),
    ("p95 ms", "perf/search_p95_ms", ".1f"),
)

SFT_COLUMNS: Columns = (
    ("epoch", "sft/epoch", ".0f"),
    ("held-out loss", "sft/held_out_nll", ".4f"),
    ("loss", "sft/nll", ".4f"),
    ("lr", "sft/learning_rate", ".1e"),
    ("grad", "sft/grad_norm", ".2f"),
    ("skipped", "sft/skipped_updates", ".0f"),
)

COLUMNS: Mapping[str, Columns] = {
    "sft": SFT_COLUMNS,
    "train": TRAIN_COLUMNS,
    "extractor": EXTRACTOR_COLUMNS,
    "bank": BANK_COLUMNS,
}
"""Cells of a line, by its kind."""

DURATION_METRICS = {
    "train": tuple(
        f"time/{part}" for part in ("wait", "prepare", "submit", "train", "sync", "bank")
    ),
    "eval": ("time/eval",),
    "extractor": ("time/train", "time/sync"),
    "probe": ("time/probe",),
}
"""Metrics that add up to the duration of a line, by its kind. The parts do not overlap."""

EVAL_SUCCESS = re.compile(r"eval/([^/]+)/(seen|unseen)/success/([^/]+)")
"""Name of a success rate in an evaluation: (task, split, condition)."""

TRAIN_SUCCESS = re.compile(r"rollout/([^/]+)/success")
"""Name of the success rate of one task in training: (task,).

Only present if there are several tasks.
"""

PROBE = re.compile(r"probe/([^/]+)/(none|right|wrong|right_minus_none)")
"""Name of a success rate in an advice probe: (task, advice).

right_minus_none is the gain by right advice.
"""

Table = Mapping[str, Mapping[str, str]]
"""Cells by task and column."""


def render_line(step: int, kind: str, metrics: Metrics, *, steps: int | None = None) -> str:
    """Return a readable line for a line of metrics.

    `steps`: length of the run, shown beside the step.
    """
    total = f"/{steps}" if steps is not None else ""
    head = f"{kind:<5} {step:>{len(str(steps or 0))}}{total}"
    durations = [
        float(metrics[name] or 0) for name in DURATION_METRICS.get(kind, ()) if name in metrics
    ]
    seconds = [f"{sum(durations):.1f} s"] if durations else []
    if kind in TABLES:
        table = TABLES[kind](metrics)
        if len(table) > 1:
            return _aligned(head, table, seconds)
        cells = [
            f"{task}/{column} {cell}" for task, row in table.items() for column, cell in row.items()
        ]
    elif kind in COLUMNS:
        hidden = {name for name in HIDDEN_IF_ZERO if not metrics.get(name)} | (
            set() if metrics.keys() >= CONDITION_METRICS else CONDITION_METRICS
        )
        cells = [
            f"{label} {_cell(metrics, name, spec)}"
            for label, name, spec in COLUMNS[kind]
            if name in metrics.keys() - hidden
        ]
        cells += [f"errors {metrics['rollout/errors']}"] if metrics.get("rollout/errors") else []
    else:
        cells = [
            f"{name.removeprefix(f'{kind}/')} {_format_value(value, '.4g')}"
            for name, value in metrics.items()
        ]
    return "  ".join([head, *cells, *seconds])


def _cell(metrics: Metrics, name: str, spec: str) -> str:
    """Return a metric as text.

    The success rate is followed by the rates of the single tasks, if there are several.
    """
    cell = _format_value(metrics[name], spec)
    if name != "rollout/success":
        return cell
    tasks = [
        f"{match[1]} {_format_value(metrics[other], spec)}"
        for other in metrics
        if (match := TRAIN_SUCCESS.fullmatch(other))
    ]
    return f"{cell} ({', '.join(tasks)})" if tasks else cell


def _eval_table(metrics: Metrics) -> Table:
    """Return the success rates of an evaluation, with their intervals if there are any."""
    table: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name in metrics:
        if match := EVAL_SUCCESS.fullmatch(name):
            task, split, condition = match.groups()
            cell = _format_value(metrics[name], ".3f")
            if f"{name}/low" in metrics:
                cell += (
                    f" [{_format_value(metrics[f'{name}/low'], '.3f')}, "
                    f"{_format_value(metrics[f'{name}/high'], '.3f')}]"
                )
            table[task][split if condition == "free" else f"{split} {condition}"] = cell
    return table


def _probe_table(metrics: Metrics) -> Table:
    """Return the success rates of an advice probe.

    The gain by right advice has ± half a 95 % interval.
    """
    table: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name, value in metrics.items():
        if match := PROBE.fullmatch(name):
            task, advice = match.groups()
            if advice == "right_minus_none":
                half = _format_value(metrics.get(f"{name}/half_width"), ".3f")
                table[task]["right − none"] = f"{_format_value(value, '+.3f')} ± {half}"
            else:
                table[task][advice] = _format_value(value, ".3f")
    return table


TABLES: Mapping[str, Callable[[Metrics], Table]] = {"eval": _eval_table, "probe": _probe_table}


def _aligned(head: str, table: Table, tail: Sequence[str]) -> str:
    """Return aligned lines: the column names, then one row per task.

    A missing value is shown as "–".
    """
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    rows = [
        [head, *columns],
        *(
            [f"  {task}", *(row.get(column, "–") for column in columns)]
            for task, row in table.items()
        ),
    ]
    rows[0] += tail
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _format_value(value: float | int | str | None, spec: str) -> str:
    """Return a value as text, or "–" for None and NaN."""
    if isinstance(value, str):
        return value
    return number_text(math.nan if value is None else value, spec)


class PlainMonitor(Monitor):
    """`Monitor` that prints log lines and notes, with escapes for unprintable characters.

    `steps`: length of the run. `stream`: output, by default stdout.
    """

    def __init__(self, *, steps: int | None = None, stream: TextIO | None = None) -> None:
        self._steps, self._stream = steps, stream or sys.stdout
        self._last_bank = ""

    def log(self, step: int, kind: str, metrics: Metrics) -> None:
        line = render_line(step, kind, metrics, steps=self._steps)
        if kind == "bank":
            # The bank is measured again after the last step. Often nothing has changed since.
            if line == self._last_bank:
                return
            self._last_bank = line
        self.note(line)

    def note(self, text: str) -> None:
        print(printable_lines(text), file=self._stream, flush=True)

    def close(self) -> None:
        discard_unwritable(self._stream)


def discard_unwritable(stream: TextIO | None) -> None:
    """Redirect a stream to the null device if it cannot be written to.

    Otherwise Python would write the rest of the buffer again at exit and report a second error.
    """
    if stream is None:  # closed before the start of the process
        return
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

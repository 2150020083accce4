"""Log lines for a terminal, or for a pipe: one readable line for each line of metrics.jsonl."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from crl.types import Experience, Trajectory

Figures = Mapping[str, float | int | str | None]

Columns = tuple[tuple[str, str, str], ...]
"""(label, figure, format) of a line's cells; a figure that is absent is left out."""

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

UNLESS_ZERO = frozenset({"critic/malformed"})
"""Shown only when it is not 0."""

CONDITIONS = frozenset({"rollout/success/guided", "rollout/success/free"})
"""Shown only when both are there: one alone is the success rate itself."""

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

COLUMNS: Mapping[str, Columns] = {"train": TRAIN_COLUMNS, "extractor": EXTRACTOR_COLUMNS, "bank": BANK_COLUMNS}

SECONDS = {
    "train": ("time/wait", "time/submit", "time/train", "time/sync", "time/bank"),
    "eval": ("time/eval",),
    "extractor": ("time/train", "time/sync"),
}
"""The parts of a line's duration: they follow one another."""

EVAL_SUCCESS = re.compile(r"eval/([^/]+)/(known|new)/success/([^/]+)")
"""(task, split, condition) of a success rate."""


def render_line(step: int, kind: str, figures: Figures, *, steps: int | None = None) -> str:
    """A metrics line for people. steps: the run's length, shown beside the step."""
    of = f"/{steps}" if steps is not None else ""
    head = f"{kind:<5} {step:>{len(str(steps or 0))}}{of}"
    if kind in COLUMNS:
        left_out = {name for name in UNLESS_ZERO if not figures.get(name)} | (set() if figures.keys() >= CONDITIONS else CONDITIONS)
        cells = [f"{label} {_number(figures[name], form)}" for label, name, form in COLUMNS[kind] if name in figures.keys() - left_out]
        cells += [f"errors {figures['rollout/errors']}"] if figures.get("rollout/errors") else []
    elif kind == "eval":
        cells = [_success(match, figures) for name in figures if (match := EVAL_SUCCESS.fullmatch(name))]
    else:
        cells = [f"{name.removeprefix(f'{kind}/')} {_number(value, '.4g')}" for name, value in figures.items()]
    parts = [float(figures[name] or 0) for name in SECONDS.get(kind, ()) if name in figures]
    return "  ".join([head, *cells, *([f"{sum(parts):.1f} s"] if parts else [])])


def _success(match: re.Match[str], figures: Figures) -> str:
    """One eval set's success rate, with its interval when the figures hold one."""
    task, split, condition = match.groups()
    name = match.group()
    cell = f"{task}/{split}{'' if condition == 'free' else ' ' + condition} {_number(figures[name], '.3f')}"
    if f"{name}/low" not in figures:
        return cell
    return f"{cell} [{_number(figures[f'{name}/low'], '.3f')}, {_number(figures[f'{name}/high'], '.3f')}]"


def _number(value: float | int | str | None, form: str) -> str:
    return "–" if value is None else value if isinstance(value, str) else format(value, form)


class PlainMonitor:
    """Prints log lines and notes; trajectories go to the file alone."""

    def __init__(self, *, steps: int | None = None, stream: TextIO | None = None) -> None:
        self._steps, self._stream = steps, stream or sys.stdout

    def log(self, step: int, kind: str, figures: Figures) -> None:
        self.note(render_line(step, kind, figures, steps=self._steps))

    def trajectories(self, trajectories: Sequence[Trajectory]) -> None:
        pass

    def experiences(self, experiences: Sequence[Experience]) -> None:
        pass

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass

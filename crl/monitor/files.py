"""Monitor for metrics.jsonl, log.txt and progress.json.

Metrics and notes are written as complete lines and flushed, so that the files of a crashed run can
be read with jq.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from crl.monitor.run_dir import RunDir
from crl.monitor.stages import StageFile
from crl.protocols import Metrics, Monitor
from crl.wording import counted

MetricValue = float | int | str | None

RESERVED_FIELDS = frozenset({"step", "kind", "time"})
"""Fields of a line of metrics.jsonl that are not metrics."""


class FileMonitor(Monitor):
    """`Monitor` of every run.

    `started`: time (`time.monotonic`) at which the run began; None = now. `deterministic`: write
    null as time. In a deterministic run, only metrics under time/ and perf/ may differ between two
    runs.
    """

    def __init__(
        self, run: RunDir, *, started: float | None = None, deterministic: bool = False
    ) -> None:
        self._deterministic = deterministic
        self._started = time.monotonic() if started is None else started
        self._metrics = run.metrics.open("a", encoding="utf-8")
        self._log = run.open_log()
        self._stages = StageFile(run.progress)

    def log(self, step: int, kind: str, metrics: Metrics) -> None:
        """Write a line of metrics.

        Raise `ValueError` if a metric has the name of a reserved field.
        """
        if clash := RESERVED_FIELDS & metrics.keys():
            raise ValueError(f"metrics may not have the names of reserved fields: {sorted(clash)}")
        seconds = None if self._deterministic else round(time.monotonic() - self._started, 3)
        _write(
            self._metrics,
            {"step": step, "kind": kind, "time": seconds}
            | {name: to_json_value(value) for name, value in metrics.items()},
        )

    def note(self, text: str) -> None:
        self._log.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}\n")
        self._log.flush()

    def progress(self, stage: str, done: int, total: int) -> None:
        self._stages.update(stage, done, total)

    def close(self) -> None:
        self._stages.remove()
        for stream in (self._metrics, self._log):
            stream.close()


def _write(stream: TextIO, record: Mapping[str, Any]) -> None:
    """Write a record as one line of JSON, and flush."""
    stream.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
    stream.flush()


def to_json_value(value: Any) -> MetricValue:
    """Return a metric as a JSON value.

    Numbers of numpy and torch become Python numbers. NaN and infinity become None.
    """
    if value is None or isinstance(value, str | int):
        return value
    converted = float(value)
    return converted if math.isfinite(converted) else None


@dataclass(frozen=True)
class MetricLines:
    """Content of a file of metrics."""

    lines: Sequence[Mapping[str, Any]]
    """Complete lines, in their order."""
    damaged: int
    """Number of lines that cannot be read. A cut last line is not counted."""


def read_metrics(path: Path, last_bytes: int | None = None) -> MetricLines:
    """Return the lines of a file of metrics. A missing file has none.

    The last line of a run that is under way or was killed may be cut. Any other line that cannot be
    read is damaged.

    `last_bytes`: size of the end of the file that is read; None = the whole file. A line that
    begins before it is left out.
    """
    if not path.is_file():
        return MetricLines([], 0)
    with path.open("rb") as file:
        if last_bytes is not None and (start := path.stat().st_size - last_bytes) > 0:
            file.seek(start - 1)
            file.readline()
        *texts, last = file.read().split(b"\n")
    read = [_line(text) for text in texts if text.strip()]
    lines = [line for line in (*read, _line(last)) if line is not None]
    return MetricLines(lines, read.count(None))


def _line(text: bytes) -> dict[str, Any] | None:
    """Return a line of metrics; None if it cannot be read."""
    try:
        line = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    is_metrics = isinstance(line, dict) and isinstance(line.get("step"), int) and "kind" in line
    return line if is_metrics else None


def damage_text(lines: int) -> str:
    """Return a note on the damaged lines of a file. Example: 2 damaged lines are left out."""
    return f"{counted(lines, 'damaged line')} {'is' if lines == 1 else 'are'} left out"


def series(kind: str, metrics: Metrics) -> dict[str, MetricValue]:
    """Return the metrics of a line for a sink that has one series per name.

    Lines of several kinds have times and sizes of the same names. Except in lines of the kind
    `train`, these names begin with the kind. Example: `extractor/time/train`.
    """
    return {
        f"{kind}/{name}" if kind != "train" and name.startswith(("time/", "perf/")) else name: value
        for name, value in ((name, to_json_value(value)) for name, value in metrics.items())
    }

"""Monitor for metrics.jsonl, log.txt and progress.json.

Metrics and notes are written as complete lines and flushed, so that the files of a crashed run can
be read with jq.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from crl.monitor.run_dir import RunDir
from crl.monitor.stages import StageFile
from crl.protocols import Metrics, Monitor

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


def read_metrics(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Return the complete lines of a file of metrics. The last line of a killed run may be cut.

    `last_bytes`: size of the end of the file that is read; None = the whole file.
    """
    lines: list[dict[str, Any]] = []
    if not path.is_file():
        return lines
    with path.open("rb") as file:
        if last_bytes is not None:
            file.seek(max(0, path.stat().st_size - last_bytes))
        content = file.read().decode("utf-8", errors="replace")
    for text in content.splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int) and "kind" in line:
            lines.append(line)
    return lines


def series(kind: str, metrics: Metrics) -> dict[str, MetricValue]:
    """Return the metrics of a line for a sink that has one series per name.

    Lines of several kinds have times and sizes of the same names. Except in lines of the kind
    `train`, these names begin with the kind. Example: `extractor/time/train`.
    """
    return {
        f"{kind}/{name}" if kind != "train" and name.startswith(("time/", "perf/")) else name: value
        for name, value in ((name, to_json_value(value)) for name, value in metrics.items())
    }

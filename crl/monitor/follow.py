"""State of a run, read from its directory: metrics, notes, stages under way, and the end.

Nothing is written to the directory, and no lock is held for longer than a moment. The files may
grow or be replaced while they are read.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from crl.config.load import load_saved
from crl.errors import ConfigError
from crl.monitor.files import RESERVED_FIELDS
from crl.monitor.run_dir import RunDir
from crl.monitor.snapshot import RunInfo, Snapshot, SnapshotMonitor
from crl.monitor.stages import read_stages
from crl.protocols import LoggedLine, Monitor

CHUNK_BYTES = 1 << 20
"""Bytes of a file that are read at once."""

MAX_LINE_BYTES = 16 << 20
"""Maximum length of a line. Longer lines are dropped."""

LOG_BYTES = 1 << 20
"""Bytes at the end of log.txt that are read at first."""

END_BYTES = 1 << 16
"""Bytes at the end of log.txt that tell how a run ended."""

KILLED = "The run ended before its last evaluation. It may have been killed."
"""State of a run that neither finished, nor failed, nor was interrupted."""


class GrowingFile:
    """Reader of the complete lines of a text file that grows.

    `start`: number of bytes at the end of the file that are read at first. None = all.
    """

    def __init__(self, path: Path, start: int | None = None) -> None:
        self._path, self._start = path, start
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._partial = b""

    def replaced(self) -> bool:
        """Return whether the file was replaced or became shorter since it was last read."""
        if self._identity is None:
            return False
        try:
            stat = self._path.stat()
        except OSError:
            return True
        return (stat.st_dev, stat.st_ino) != self._identity or stat.st_size < self._offset

    def lines(self) -> Iterator[str]:
        """Yield the lines that were completed since the last call. A missing file has none."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if self._identity is None and self._start is not None:
                self._offset = max(0, stat.st_size - self._start)
            self._identity = stat.st_dev, stat.st_ino
            file.seek(self._offset)
            while chunk := file.read(CHUNK_BYTES):
                self._offset += len(chunk)
                *complete, self._partial = (self._partial + chunk).split(b"\n")
                self._partial = self._partial[:MAX_LINE_BYTES]
                for line in complete:
                    if len(line) < MAX_LINE_BYTES:
                        yield line.decode("utf-8", "replace")


class RunFollower:
    """Follower of a run that is under way or has ended.

    `update` reads what is new. `snapshot` returns the state of the run, without its experiences and
    episodes.

    Raise `ConfigError` if the directory is not that of a run.
    """

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        self._run, self._now = RunDir(path), now
        self._restart()

    def _restart(self) -> None:
        """Forget everything that was read, for example after the run was resumed."""
        self._info = RunInfo.of(load_saved(self._run.path).config, self._run.path)
        self._config_version = self._run.config.stat().st_mtime_ns
        self._metrics = GrowingFile(self._run.metrics)
        self._log = GrowingFile(self._run.log, LOG_BYTES)
        self._time: float | None = 0.0
        self._monitor = SnapshotMonitor(self._info, clock=lambda: self._time or 0.0)
        self._ending = ""
        self._evaluated = -1

    def update(self, on_line: Monitor | None = None) -> None:
        """Read new metrics and notes.

        `on_line` also gets the new metrics and notes.
        """
        if self._is_replaced():
            with suppress(ConfigError, OSError):  # it is just being written
                self._restart()
        monitors = [self._monitor, *([on_line] if on_line else [])]
        for line in self._log.lines():
            note = _without_time(line)
            self._observe_note(line, note)
            for monitor in monitors:
                monitor.note(note)
        for line in self._metrics.lines():
            if logged := _logged(line):
                self._time = logged.seconds
                if logged.kind == "eval":
                    self._evaluated = logged.step
                for monitor in monitors:
                    monitor.log(logged.step, logged.kind, logged.metrics)

    def _is_replaced(self) -> bool:
        """Return whether files that were read have other contents now."""
        with suppress(OSError):
            if self._run.config.stat().st_mtime_ns != self._config_version:
                return True
        return self._metrics.replaced() or self._log.replaced()

    def snapshot(self) -> Snapshot:
        """Return the state of the run."""
        s = self._monitor.snapshot()
        running = self.running
        elapsed, remaining = self._time, self._monitor.remaining()
        if elapsed is not None and running:
            with suppress(OSError):  # time since the last line
                age = max(0.0, self._now() - self._run.metrics.stat().st_mtime)
                elapsed += age
                remaining = None if remaining is None else max(0.0, remaining - age)
        stages = read_stages(self._run.progress) if running else ()
        s = s.with_times(elapsed, None if self._time is None else remaining, stages)
        progress = replace(s.progress, status="" if running else self.status)
        return replace(s, progress=progress)

    @property
    def running(self) -> bool:
        """True while a process trains the run."""
        return self._run.is_locked()

    @property
    def status(self) -> str:
        """State of a run that no process trains."""
        if self._ending:
            return self._ending
        if self._evaluated >= self._info.steps:
            return "finished"
        if not self._run.log.exists():
            return "not started"
        # Commands such as crl rollout make no evaluation.
        return "ended" if self._evaluated < 0 else KILLED

    # ── notes ─────────────────────────────────────────────────────────────────────────────────────

    def _observe_note(self, line: str, note: str) -> None:
        """Record the way in which the process of the run ended, as far as the log tells."""
        self._ending = _ending_after(self._ending, line, note)


def ending_in_log(log: Path) -> str:
    """Return the way in which the process of a run ended: "interrupted" or "failed: see the log".

    Return an empty text if the log does not tell, for example after the process was killed.
    """
    ending = ""
    with suppress(OSError):
        for line in GrowingFile(log, END_BYTES).lines():
            ending = _ending_after(ending, line, _without_time(line))
    return ending


def _ending_after(ending: str, line: str, note: str) -> str:
    """Return the way in which a run ended, as far as the log up to a line tells.

    `ending`: the way before the line. `note`: the line without its time.
    """
    if note is not line and note.startswith("run "):  # the run was started or resumed
        return ""
    if line.startswith("Traceback (most recent call last)"):
        return "failed: see the log"
    return "interrupted" if note.startswith("interrupted") else ending


def _without_time(line: str) -> str:
    """Return a line of log.txt without the date and the time before a note."""
    stamp = line[:20]
    is_stamp = stamp[4:5] == "-" and stamp[10:11] == " " and stamp[13:14] == ":"
    return line[20:] if is_stamp and stamp[:4].isdecimal() else line


def logged_lines(metrics: Path, length: int) -> list[LoggedLine]:
    """Return the undamaged lines among the first `length` bytes of the file of metrics."""
    with suppress(FileNotFoundError), metrics.open("rb") as file:
        lines = file.read(length).decode("utf-8", "replace").splitlines()
        return [logged for line in lines if (logged := _logged(line))]
    return []


def _logged(line: str) -> LoggedLine | None:
    """Return a parsed line of metrics.jsonl. Return None for a damaged line."""
    try:
        record = json.loads(line)
        step, kind, seconds = record["step"], record["kind"], record["time"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(step, int) or not isinstance(kind, str):
        return None
    known = seconds if isinstance(seconds, int | float) else None
    metrics = {name: value for name, value in record.items() if name not in RESERVED_FIELDS}
    return LoggedLine(step, kind, known, metrics)

"""Stages of a run: work that takes time, such as an evaluation, and an estimate of what is left.

A stage that one reader shows and another process follows is written to RUN/progress.json.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crl.protocols import Monitor

WRITE_INTERVAL_S = 1.0
"""Minimum number of seconds between two versions of progress.json with the same stages."""

MIN_SHARE = 0.1
"""Share of the parts of a stage that must be finished before their pace gives an estimate."""

MAX_STAGES = 20
"""Maximum number of stages that are shown or read."""


@dataclass(frozen=True)
class Stage:
    """Stage that is under way."""

    name: str
    done: int
    """Finished parts."""
    total: int
    """All parts. 1: the stage is not divided."""
    elapsed: float
    """Seconds since the start of the stage."""
    remaining: float | None = None
    """Estimated seconds until the end. None before there is an estimate."""


@contextmanager
def stage(monitor: Monitor, name: str) -> Iterator[None]:
    """Report a stage that is not divided. It lasts as long as the context."""
    monitor.progress(name, 0, 1)
    try:
        yield
    finally:
        monitor.progress(name, 1, 1)


@dataclass(frozen=True)
class _Running:
    """Progress of a stage that is under way."""

    start: float
    done: int
    total: int
    first: tuple[float, int] | None = None
    """Time of the first report with finished parts, and their number. None before it."""


class Stages:
    """Stages that are under way, and durations of earlier ones.

    `clock`: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running: dict[str, _Running] = {}
        self._durations: dict[str, float] = {}

    def update(self, name: str, done: int, total: int) -> bool:
        """Record the progress of a stage. Return True if it has begun or ended."""
        now = self._clock()
        begins = name not in self._running
        before = self._running.get(name, _Running(now, 0, 0))
        if done < total:
            first = before.first or ((now, done) if done else None)
            self._running[name] = _Running(before.start, done, total, first)
            return begins
        if begins:  # a stage that has already ended
            return False
        self._durations[name] = now - before.start
        del self._running[name]
        return True

    def now(self) -> tuple[Stage, ...]:
        """Return the stages under way, in the order in which they began."""
        now, running = self._clock(), list(self._running.items())
        return tuple(
            Stage(name, s.done, s.total, now - s.start, self._remaining(name, s, now))
            for name, s in running[-MAX_STAGES:]
        )

    def _remaining(self, name: str, stage: _Running, now: float) -> float | None:
        """Return the estimated seconds until the end.

        The estimate assumes the mean pace since the first finished part, because the time before it
        may include preparations. Before `MIN_SHARE` of the parts is finished, it assumes the
        duration of the last stage of this name.
        """
        if stage.first and stage.done >= MIN_SHARE * stage.total:
            start, done = stage.first if stage.done > stage.first[1] else (stage.start, 0)
            return (now - start) * (stage.total - stage.done) / (stage.done - done)
        before = self._durations.get(name)
        return None if before is None else max(0.0, before - (now - stage.start))


class StageFile:
    """Writer of RUN/progress.json, which exists while the process of the run is alive.

    A file that cannot be written is left out: the run does not need it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._stages, self._written = path, Stages(time.monotonic), -math.inf
        self.remove()

    def update(self, name: str, done: int, total: int) -> None:
        """Record the progress of a stage, and write the file if it is due."""
        changed, now = self._stages.update(name, done, total), time.monotonic()
        if changed or now - self._written >= WRITE_INTERVAL_S:
            self._written = now
            with suppress(OSError):
                self._write()

    def remove(self) -> None:
        """Delete the file, for example that of a process that was killed."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        stages = [
            {
                "stage": stage.name,
                "done": stage.done,
                "total": stage.total,
                "elapsed": stage.elapsed,
                "remaining": stage.remaining,
            }
            for stage in self._stages.now()
        ]
        partial = self._path.with_name(f".{self._path.name}.part")
        partial.write_text(json.dumps({"stages": stages}), "utf-8")
        partial.replace(self._path)


def read_stages(path: Path) -> tuple[Stage, ...]:
    """Return the stages in a progress.json as of now. Return none if it cannot be read."""
    try:
        with path.open("rb") as file:
            age = max(0.0, time.time() - os.fstat(file.fileno()).st_mtime)
            records = json.loads(file.read(100_000))["stages"]
            return tuple(_stage(record, age) for record in records[:MAX_STAGES])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ()


def _stage(record: Mapping[str, Any], age: float) -> Stage:
    """Return a stage `age` seconds after it was written. Raise `ValueError` for wrong types."""
    name, done, total = record["stage"], record["done"], record["total"]
    elapsed, remaining = record["elapsed"], record["remaining"]
    numbers = (done, total, elapsed, 0 if remaining is None else remaining)
    if not isinstance(name, str) or not all(
        isinstance(number, int | float) and math.isfinite(number) for number in numbers
    ):
        raise ValueError("a stage has a field of a wrong type")
    left = None if remaining is None else max(0.0, remaining - age)
    return Stage(name, int(done), int(total), elapsed + age, left)

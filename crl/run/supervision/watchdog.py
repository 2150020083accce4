"""Watchdog of a run: it reports where each part waits if nothing finishes for a long time."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from time import monotonic
from types import CoroutineType
from typing import Any

import crl
from crl import failures
from crl.errors import StallError

MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 10.0
"""Limits of the time between two checks of the tasks, in seconds."""

MIN_MISSES = 3
"""Minimum number of intervals without a check until the loop counts as blocked."""

_ROOT = Path(crl.__file__).resolve().parents[1]
_TASK_GROUPS = Path(failures.__file__).resolve()

Place = str
"""File, line and function in which a task waits."""


class Watchdog:
    """Watchdog of the tasks of an event loop, and of the loop itself.

    Time in which the loop was blocked does not count as time without progress. A thread reports a
    loop that is blocked.

    * `seconds`: time without progress after which a report is written; 0 = never.
    * `ends_run`: True if a stalled run ends.
    * `note`: writes a line for readers, to screen and log.
    * `log`: writes a text to the log alone.

    The attribute `details` returns lines on parts that are not tasks, such as queues.
    """

    def __init__(
        self,
        seconds: float,
        *,
        ends_run: bool,
        note: Callable[[str], object],
        log: Callable[[str], object],
    ) -> None:
        self._seconds, self._ends_run, self._note, self._log = seconds, ends_run, note, log
        self.details: Callable[[], list[str]] = list
        self._last_progress = monotonic()
        self._reported = False
        self._waiting: dict[asyncio.Task[Any], tuple[Place, float]] = {}
        self._looks = 0
        """Number of checks of the tasks so far. It does not change while the loop is blocked."""

    def progress(self) -> None:
        """Record that an episode, a training step of a model or a distillation has finished."""
        self._last_progress = monotonic()
        self._reported = False

    async def run(self) -> None:
        """Watch until cancelled. Raise `StallError` if the run has stalled and is to end."""
        if not self._seconds:
            return
        self.progress()  # the time in which models were loaded does not count
        interval = min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, self._seconds / 20))
        ended = threading.Event()
        arguments = (threading.get_ident(), interval, ended)
        threading.Thread(
            target=self._watch_loop, args=arguments, name="crl-watchdog", daemon=True
        ).start()
        try:
            while True:
                due = monotonic() + interval
                await asyncio.sleep(interval)
                self._leave_out(monotonic() - due)
                self._looks += 1
                self.check()
        finally:
            ended.set()

    def _leave_out(self, blocked_s: float) -> None:
        """Count the time in which the loop was blocked neither as progress nor as a stall."""
        self._last_progress = min(monotonic(), self._last_progress + max(0.0, blocked_s))

    def check(self) -> None:
        """Check the tasks, and report if nothing has finished for too long.

        Raise `StallError` if the run is to end then.
        """
        self._look()
        silent = monotonic() - self._last_progress
        if silent < self._seconds or self._reported:
            return
        self._reported = True
        text = f"nothing has finished for {silent:.0f} s (run.stall_seconds)"
        self._log("\n".join([_dated(text), *self.report()]))
        self._note(f"warning: {text}; log.txt shows where each part waits")
        if self._ends_run:
            raise StallError(f"the run has stalled: {text}")

    def report(self) -> list[str]:
        """Return one line for each place in which tasks wait, and the details."""
        now = monotonic()
        counts: Counter[tuple[str, Place]] = Counter()
        since: dict[tuple[str, Place], float] = {}
        for task, (place, first_seen) in self._waiting.items():
            key = (_kind(task), place)
            counts[key] += 1
            since[key] = min(since.get(key, now), first_seen)
        lines = [
            f"  {count} × {kind}: {place}, for {now - since[kind, place]:.0f} s"
            for (kind, place), count in counts.most_common()
        ]
        return lines + [f"  {line}" for line in self.details()]

    def _watch_loop(self, loop_thread: int, interval: float, ended: threading.Event) -> None:
        """Report once if the loop has not run for too long, then again after it has run.

        Missed intervals are counted instead of time, because a pause of the whole process is not a
        blocked loop.
        """
        limit = max(MIN_MISSES, math.ceil(self._seconds / interval))
        seen = misses = 0
        while not ended.wait(interval):
            misses = misses + 1 if self._looks == seen else 0
            seen = self._looks
            if misses == limit:
                self._report_blocked_loop(loop_thread, limit * interval)

    def _report_blocked_loop(self, loop_thread: int, seconds: float) -> None:
        text = f"the event loop has been blocked for {seconds:.0f} s (run.stall_seconds)"
        stack = traceback.format_stack(sys._current_frames().get(loop_thread))
        with suppress(Exception):  # the run may be closing its files
            self._log(f"{_dated(text)}. Its thread is at:\n{''.join(stack)}")
            self._note(f"warning: {text}; log.txt has the stack of its thread")

    def _look(self) -> None:
        """Update the places in which tasks wait, and since when."""
        now, current = monotonic(), asyncio.current_task()
        places = {task: _place(task) for task in asyncio.all_tasks() if task is not current}
        self._waiting = {
            task: known
            if (known := self._waiting.get(task)) and known[0] == place
            else (place, now)
            for task, place in places.items()
        }


def _dated(text: str) -> str:
    return f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}"


def _kind(task: asyncio.Task[Any]) -> str:
    """Return the name of a task without numbers, so that similar tasks are counted together.

    For a task without a name, return the name of its coroutine.
    """
    words = task.get_name().split()
    named = [word for word in words if not any(letter.isdigit() for letter in word)]
    return " ".join(named) or getattr(task.get_coro(), "__qualname__", "task")


def _place(task: asyncio.Task[Any]) -> Place:
    """Return the innermost place of this package in which a suspended task waits."""
    place, waiting = "", task.get_coro()
    while isinstance(waiting, CoroutineType) and (frame := waiting.cr_frame):
        shown, inside = _shown(frame.f_code.co_filename)
        if inside or not place:
            place = f"{shown}:{frame.f_lineno} in {frame.f_code.co_name}"
        waiting = waiting.cr_await
    return place or "no Python frame"


@cache  # a check of many tasks asks for few files, many times
def _shown(file: str) -> tuple[str, bool]:
    """Return the shown path of a source file, and True if a task counts as waiting in it."""
    path = Path(file)
    inside = path.is_relative_to(_ROOT) and path != _TASK_GROUPS
    return str(path.relative_to(_ROOT) if inside else path.name), inside

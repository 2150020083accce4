"""Values that are read from files, kept until the files change."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

COST_SHARE = 20
"""Divisor of a core's time: reading a live value takes at most 1 / COST_SHARE of it."""

LEAST_S = 1.0
"""Minimum number of seconds for which a live value is kept."""

Version = tuple[Any, ...]
"""State of files: a change of a file changes it."""


@dataclass
class _Slot:
    lock: threading.Lock = field(default_factory=threading.Lock)
    version: Version | None = None
    """Version of the value; None before the first one."""
    value: Any = None
    due: float = 0.0
    """Time (`time.monotonic`) until which a live value is kept although its files have changed."""


class Cache:
    """Cache of values by key. Any thread may use it.

    Requests for the same value wait for one read. An error is not kept. `most`: maximum number of
    values. `clock`: returns the time in seconds. `work`: returns the CPU time of the thread.
    """

    def __init__(
        self,
        most: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        work: Callable[[], float] = time.thread_time,
    ) -> None:
        self._most, self._clock, self._work = most, clock, work
        self._slots: OrderedDict[Hashable, _Slot] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, files: Iterable[Path], read: Callable[[], T]) -> T:
        """Return the value of `key`. Call `read` again if one of the `files` has changed."""
        slot, version = self._slot(key), version_of(files)
        with slot.lock:
            if slot.version != version:
                self._read(slot, version, read)
            return slot.value

    def live(self, key: Hashable, version: Version, read: Callable[[], T]) -> tuple[T, str]:
        """Return the value of `key` and the name of its version.

        `version`: the present version of the files. After a read, the value is kept for a while
        although the files change, so that reading takes a bounded share of the time.
        """
        slot = self._slot(key)
        with slot.lock:
            if slot.version is None or (slot.version != version and self._clock() >= slot.due):
                self._read(slot, version, read)
            return slot.value, _name(slot.version or version)

    def _read(self, slot: _Slot, version: Version, read: Callable[[], Any]) -> None:
        started = self._work()
        slot.value = read()
        slot.version = version
        slot.due = self._clock() + max(LEAST_S, COST_SHARE * (self._work() - started))

    def expected(self, key: Hashable, version: Version) -> str:
        """Return the name of the version that `live` would return now."""
        slot = self._slot(key)
        known = slot.version
        return _name(version if known is None or self._clock() >= slot.due else known)

    def _slot(self, key: Hashable) -> _Slot:
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            self._slots.move_to_end(key)
            if len(self._slots) > self._most:
                self._slots.popitem(last=False)
            return slot


def version_of(files: Iterable[Path]) -> Version:
    """Return the version of files: their modification times, sizes and inodes."""
    return tuple(_state(path) for path in files)


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:  # it does not exist
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _name(version: Version) -> str:
    return hashlib.sha256(repr(version).encode()).hexdigest()[:16]

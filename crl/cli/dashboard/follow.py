"""Contents of the dashboard of a run, read from its directory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from crl.errors import ConfigError, StoreError
from crl.manager.inspection.reading import open_reader
from crl.monitor.follow import RunFollower
from crl.monitor.snapshot import Episodes, Snapshot
from crl.protocols import Monitor
from crl.records.shards import read_records, shards, trajectory_of
from crl.types import Experience

BANK_EXPERIENCES = 200
"""Maximum number of experiences in a snapshot: those of the last searches."""

COST_SHARE = 20
"""Reading the bank takes at most 1 / COST_SHARE of the time, and so does reading episodes."""

WARN_AT = 3
"""Number of failures in a row to read a file at which a warning is shown.

Fewer may mean that the file is just being written.
"""


class DashboardFollower(RunFollower):
    """Follower of a run whose snapshots also have experiences of the bank and the last episodes."""

    def _restart(self) -> None:
        super()._restart()
        self._bank_due = self._episodes_due = 0.0
        self._bank_version: tuple[int, ...] = ()
        self._shard: Path | None = None
        self._episodes = Episodes()
        self._failures: Counter[Callable[[], object]] = Counter()

    def update(self, on_line: Monitor | None = None) -> None:
        """Read new metrics and notes, and at times the bank and the episodes.

        `on_line` also gets the new metrics and notes.
        """
        super().update(on_line)
        self._bank_due = self._at_times(self._bank_due, self._read_bank)
        self._episodes_due = self._at_times(self._episodes_due, self._read_episodes)

    def snapshot(self) -> Snapshot:
        """Return the contents of the dashboard."""
        return replace(super().snapshot(), episodes=self._episodes)

    def _at_times(self, due: float, read: Callable[[], object]) -> float:
        """Call `read` if it is due. Return the time at which it is due again."""
        started = time.monotonic()
        if started < due:
            return due
        try:
            read()
            self._failures[read] = 0
        except (ConfigError, StoreError, OSError) as error:
            self._failures[read] += 1
            if self._failures[read] == WARN_AT:
                self._monitor.note(f"warning: {' '.join(str(error).split())}")
        ended = time.monotonic()
        return ended + max(1.0, COST_SHARE * (ended - started))

    def _read_bank(self) -> None:
        files = (self._run.bank, self._run.bank.with_name(f"{self._run.bank.name}-wal"))
        version = tuple(path.stat().st_mtime_ns for path in files if path.exists())
        if version and version != self._bank_version:
            self._monitor.experiences(latest_experiences(self._run.bank))
            self._bank_version = version

    def _read_episodes(self) -> None:
        newest = next(reversed(shards(self._run.episodes).values()), None)
        if newest and newest != self._shard:
            self._episodes = Episodes.of_last_group(
                [trajectory_of(record) for record in read_records(newest)]
            )
            self._shard = newest


def latest_experiences(bank: Path) -> list[Experience]:
    """Return the active experiences of the last searches, the last one first."""
    with open_reader(bank) as reader:
        entries = reader.entries()
    entries.reverse()
    entries.sort(key=lambda entry: -(entry.counters.last_returned_step or 0))
    return [entry.experience for entry in entries[:BANK_EXPERIENCES]]

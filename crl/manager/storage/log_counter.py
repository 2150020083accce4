"""Metrics of a bank, counted incrementally.

They are read at every step, and the log that they are counted from may be long.
"""

from __future__ import annotations

from collections import Counter
from sqlite3 import Connection

from crl.manager.storage.tables import fact, last_seq

NEW_OPERATIONS = "SELECT kind, COUNT(*) FROM log NOT INDEXED WHERE seq > ? GROUP BY kind"
"""Query for the number of new operations by kind.

Without NOT INDEXED, SQLite would read the whole index of kinds.
"""


class LogCounter:
    """Incremental counter of the log. It reads each log row once."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Restart the counts from the time when the bank was created or last reset."""
        self._counts: Counter[str] = Counter()
        self._seq: int | None = None  # last log row that is counted

    def read(self, db: Connection) -> dict[str, int]:
        """Return metrics by name (see `Store.counts`)."""
        self._count_new(db)
        metrics: Counter[str] = Counter(
            {f"queue/{state}": 0 for state in ("pending", "leased", "done", "dead")}
        )
        metrics.update(
            {
                f"ops/{kind}": 0
                for kind in ("add", "update", "return", "up", "down", "drop", "merge", "discard")
            }
        )
        metrics.update(self._counts)
        sql = (
            "SELECT state, COUNT(*) FROM requests "
            "WHERE state IN ('pending', 'leased', 'dead') GROUP BY state"
        )
        unfinished = {f"queue/{state}": number for state, number in db.execute(sql)}
        metrics.update(unfinished)
        metrics["queue/done"] = (
            metrics["ops/submit"] - metrics["ops/forget"] - sum(unfinished.values())
        )
        (metrics["buffer/ready"],) = db.execute(
            "SELECT COUNT(*) FROM units WHERE ready IS NOT NULL"
        ).fetchone()
        (metrics["generations"],) = db.execute("SELECT COUNT(*) FROM generations").fetchone()
        return {**metrics, "log/seq": last_seq(db)}

    def _count_new(self, db: Connection) -> None:
        """Count the log rows that were added since the last call."""
        since = int(fact(db, "begun") or 0) if self._seq is None else self._seq
        for kind, number in db.execute(NEW_OPERATIONS, (since,)):
            self._counts[f"ops/{kind}"] += number
        sql = (
            "SELECT data ->> 'reason', SUM(data ->> 'count') FROM log "
            "WHERE kind = 'drop' AND seq > ? GROUP BY 1"
        )
        for reason, number in db.execute(sql, (since,)):
            self._counts[f"dropped/{reason}"] += number
        self._seq = last_seq(db)

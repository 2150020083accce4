"""Snapshots of a bank. Triggers store the old rows, so that no operation needs code to undo it.

For each table t, the table t_before holds images of the rows of t. The first change of a row after
a snapshot stores an image: the row at that snapshot, or the fact that the row did not exist. The
state of a row at snapshot s is therefore its earliest image of s or later. Without an image of s or
later, the row has not changed since s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from sqlite3 import Connection

TABLES = ("requests", "generations", "entries", "units", "facts")
"""Tables that a snapshot holds, in addition to the log."""


def create_image_tables(db: Connection) -> None:
    """Create the image tables and the triggers that fill them, if they do not exist."""
    for table in TABLES:
        columns, key = _columns(db, table)
        image_key = f"PRIMARY KEY ({', '.join(key)}, snapshot)"
        db.execute(
            f"CREATE TABLE IF NOT EXISTS {table}_before "
            f"(snapshot, existed, {', '.join(columns)}, {image_key})"
        )
        for event, row in (("INSERT", "new"), ("UPDATE", "old"), ("DELETE", "old")):
            existed = event != "INSERT"
            image = [
                f"{row}.{column}" if existed or column in key else "NULL" for column in columns
            ]
            db.execute(f"""
                CREATE TRIGGER IF NOT EXISTS {table}_{event.lower()} AFTER {event} ON {table} BEGIN
                    INSERT INTO {table}_before SELECT last, {int(existed)}, {", ".join(image)} \
FROM (SELECT MAX(seq) AS last FROM snapshots)
                    WHERE last IS NOT NULL AND NOT EXISTS (
                        SELECT 1 FROM {table}_before \
WHERE snapshot = last AND {_same_key(key, f"{table}_before", row)});
                END
            """)


def restore_snapshot(db: Connection, seq: int) -> None:
    """Restore the log and the tables to the snapshot `seq`. Later snapshots are deleted.

    Later sequence numbers are used again, so that a repeated run writes the same rows.
    Requests that were leased at the snapshot become pending. Call this function within a
    transaction.
    """
    kept = db.execute("SELECT seq FROM snapshots WHERE seq <= ?", (seq,)).fetchall()
    db.execute("DELETE FROM snapshots")  # without a snapshot the triggers store no images
    for table in TABLES:
        columns, key = _columns(db, table)
        names, keys = ", ".join(columns), ", ".join(key)
        db.execute(
            f"DELETE FROM {table} WHERE ({keys}) IN "
            f"(SELECT {keys} FROM {table}_before WHERE snapshot >= ?)",
            (seq,),
        )
        first = (
            f"SELECT MIN(snapshot) FROM {table}_before AS other "
            f"WHERE snapshot >= ? AND {_same_key(key, 'other', 'image')}"
        )
        db.execute(
            f"INSERT INTO {table} ({names}) SELECT {names} FROM {table}_before AS image "
            f"WHERE existed AND snapshot = ({first})",
            (seq,),
        )
        db.execute(f"DELETE FROM {table}_before WHERE snapshot >= ?", (seq,))
    db.execute("DELETE FROM log WHERE seq > ?", (seq,))
    db.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = 'log'", (seq,))
    db.execute("UPDATE requests SET state = 'pending' WHERE state = 'leased'")
    db.executemany("INSERT INTO snapshots VALUES (?)", kept)


def delete_snapshots_except(db: Connection, kept: Collection[int]) -> None:
    """Delete all snapshots except those in `kept`. Call this function within a transaction."""
    seqs = [seq for (seq,) in db.execute("SELECT seq FROM snapshots ORDER BY seq")]
    for i in reversed(range(len(seqs))):
        if seqs[i] not in kept:
            _delete_snapshot(db, seqs[i], seqs[i - 1] if i else None)


def _delete_snapshot(db: Connection, seq: int, before: int | None) -> None:
    """Delete the snapshot `seq`. The snapshot `before` takes over the images that it lacks.

    `before` is the previous snapshot; None if there is none.
    """
    for table in TABLES:
        if before is not None:
            db.execute(
                f"UPDATE OR IGNORE {table}_before SET snapshot = ? WHERE snapshot = ?",
                (before, seq),
            )
        db.execute(f"DELETE FROM {table}_before WHERE snapshot = ?", (seq,))
    db.execute("DELETE FROM snapshots WHERE seq = ?", (seq,))


def delete_all_snapshots(db: Connection) -> None:
    """Delete all snapshots and all row images."""
    for table in ("snapshots", *(f"{table}_before" for table in TABLES)):
        db.execute(f"DELETE FROM {table}")


def _columns(db: Connection, table: str) -> tuple[list[str], list[str]]:
    """Return the names of a table's columns, and of its primary key columns."""
    rows = db.execute("SELECT name, pk FROM pragma_table_info(?)", (table,)).fetchall()
    return [name for name, _ in rows], [name for name, pk in rows if pk]


def _same_key(key: Iterable[str], left: str, right: str) -> str:
    """Return the SQL condition that rows of `left` and `right` have the same key."""
    return " AND ".join(f"{left}.{column} = {right}.{column}" for column in key)

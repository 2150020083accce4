"""Going back to a snapshot: triggers keep what a row was, so that nothing has to know what an operation does to undo it.

For a table t, t_before holds images of its rows: at the first change of a row after a snapshot, what the row was at that snapshot, or
that it was not there. So at snapshot s a row was what its earliest image of s or later says; without one, what it is now.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from sqlite3 import Connection

TABLES = ("requests", "generations", "entries", "units", "facts")
"""What a snapshot holds, beside the log."""


def keep_images(db: Connection) -> None:
    """Makes the tables of images, and the triggers that fill them, where they are not there yet."""
    for table in TABLES:
        columns, key = _columns(db, table)
        image_key = f"PRIMARY KEY ({', '.join(key)}, snapshot)"
        db.execute(
            f"CREATE TABLE IF NOT EXISTS {table}_before (snapshot, existed, {', '.join(columns)}, {image_key})"
        )
        for event, row in (("INSERT", "new"), ("UPDATE", "old"), ("DELETE", "old")):
            existed = event != "INSERT"
            image = [
                f"{row}.{column}" if existed or column in key else "NULL" for column in columns
            ]
            db.execute(f"""
                CREATE TRIGGER IF NOT EXISTS {table}_{event.lower()} AFTER {event} ON {table} BEGIN
                    INSERT INTO {table}_before SELECT last, {int(existed)}, {", ".join(image)} FROM (SELECT MAX(seq) AS last FROM snapshots)
                    WHERE last IS NOT NULL AND NOT EXISTS (
                        SELECT 1 FROM {table}_before WHERE snapshot = last AND {_both(key, f"{table}_before", row)});
                END
            """)


def go_back(db: Connection, seq: int) -> None:
    """Log and tables are what they were at the snapshot `seq`, but that nobody holds a lease; later snapshots are forgotten.

    Within a transaction.
    """
    kept = db.execute("SELECT seq FROM snapshots WHERE seq <= ?", (seq,)).fetchall()
    db.execute("DELETE FROM snapshots")  # without one the triggers keep nothing
    for table in TABLES:
        columns, key = _columns(db, table)
        names, keys = ", ".join(columns), ", ".join(key)
        db.execute(
            f"DELETE FROM {table} WHERE ({keys}) IN (SELECT {keys} FROM {table}_before WHERE snapshot >= ?)",
            (seq,),
        )
        first = f"SELECT MIN(snapshot) FROM {table}_before AS other WHERE snapshot >= ? AND {_both(key, 'other', 'image')}"
        db.execute(
            f"INSERT INTO {table} ({names}) SELECT {names} FROM {table}_before AS image WHERE existed AND snapshot = ({first})",
            (seq,),
        )
        db.execute(f"DELETE FROM {table}_before WHERE snapshot >= ?", (seq,))
    db.execute("DELETE FROM log WHERE seq > ?", (seq,))
    db.execute("UPDATE requests SET state = 'pending' WHERE state = 'leased'")
    db.executemany("INSERT INTO snapshots VALUES (?)", kept)


def forget_all_but(db: Connection, kept: Collection[int]) -> None:
    """Nobody goes back to the other snapshots any more. Within a transaction."""
    seqs = [seq for (seq,) in db.execute("SELECT seq FROM snapshots ORDER BY seq")]
    for i in reversed(range(len(seqs))):
        if seqs[i] not in kept:
            _forget(db, seqs[i], seqs[i - 1] if i else None)


def _forget(db: Connection, seq: int, before: int | None) -> None:
    """The snapshot before it, None where there is none, takes over the images of rows that it has no image of."""
    for table in TABLES:
        if before is not None:
            db.execute(
                f"UPDATE OR IGNORE {table}_before SET snapshot = ? WHERE snapshot = ?",
                (before, seq),
            )
        db.execute(f"DELETE FROM {table}_before WHERE snapshot = ?", (seq,))
    db.execute("DELETE FROM snapshots WHERE seq = ?", (seq,))


def forget_all(db: Connection) -> None:
    """There is nothing to go back to any more."""
    for table in ("snapshots", *(f"{table}_before" for table in TABLES)):
        db.execute(f"DELETE FROM {table}")


def _columns(db: Connection, table: str) -> tuple[list[str], list[str]]:
    """Of a table, and those of its primary key."""
    rows = db.execute("SELECT name, pk FROM pragma_table_info(?)", (table,)).fetchall()
    return [name for name, _ in rows], [name for name, pk in rows if pk]


def _both(key: Iterable[str], one: str, other: str) -> str:
    return " AND ".join(f"{one}.{column} = {other}.{column}" for column in key)

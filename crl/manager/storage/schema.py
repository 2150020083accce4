"""Schema of a bank's file: creation, upgrade, and refusal of files that this crl cannot read."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from crl.algo.experience import success_score
from crl.errors import StoreError
from crl.manager.storage.snapshots import create_image_tables

SCHEMA_VERSION = 7
APPLICATION_ID = 0x63726C42  # "crlB", distinguishes a bank from other SQLite files
RESTORE_REMEDY = (
    "restore a copy (first delete the -wal and -shm files next to it; "
    "they are not part of the copy)"
)
DAMAGED_REMEDY = f"The file is damaged: {RESTORE_REMEDY} or choose another path."


def prepare(db: Connection, path: Path) -> None:
    """Configure the connection, and create or upgrade the tables in one transaction.

    Raise `StoreError` if the file belongs to another program or to a newer crl; the file is not
    changed then. Raise `StoreError` if the schema version is invalid or the file system does not
    support a write-ahead log. Raise `sqlite3.Error` if a write fails.
    """
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA busy_timeout = 5000")
    db.create_function("success_score", 2, success_score, deterministic=True)
    version = _pragma(db, "user_version")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path}: the bank's schema version {version} is "
            f"newer than this crl's {SCHEMA_VERSION}. Upgrade crl."
        )
    tables = db.execute("SELECT name FROM sqlite_master").fetchall()
    if tables and _pragma(db, "application_id") != APPLICATION_ID:
        raise StoreError(f"{path}: this SQLite file is not a bank of crl. Choose another path.")
    if tables and version < 1:
        raise StoreError(
            f"{path}: the bank's schema version {version} is not valid. {DAMAGED_REMEDY}"
        )
    if _pragma(db, "journal_mode = WAL") != "wal":
        raise StoreError(
            f"{path}: the file system does not support SQLite's write-ahead log. "
            "Keep the bank on a local disk."
        )
    db.execute("PRAGMA synchronous = FULL")
    # This transaction writes even if no table must be created. A bank that cannot be written is
    # refused now, not after the first episode.
    db.execute("BEGIN IMMEDIATE")
    for script in (
        [f"upgrade_{old}_to_{old + 1}.sql" for old in range(version, SCHEMA_VERSION)]
        if tables
        else ["schema.sql"]
    ):
        _run_script(db, script)
        create_image_tables(db)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.execute("COMMIT")


def _pragma(db: Connection, pragma: str) -> Any:
    return db.execute(f"PRAGMA {pragma}").fetchone()[0]


def _run_script(db: Connection, script: str) -> None:
    for statement in _statements(Path(__file__).with_name(script).read_text("utf-8")):
        db.execute(statement)


def _statements(script: str) -> Iterable[str]:
    """Yield the statements of a script one by one.

    `executescript` is not used, because it would commit the transaction that is open.
    """
    statement = ""
    for line in script.splitlines():
        statement += line.split("--")[0] + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""

"""SQLite file behind asyncio: safe opening, shared commits, and one error type.

The file uses WAL with synchronous=FULL. The writes of a transaction are on disk when the
transaction returns, and readers never wait for a writer. One thread runs all statements, so the
statements of a transaction follow each other without a detour through the event loop.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sqlite3
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from typing import Any, TypeVar

from crl.errors import ConfigError, StoreError
from crl.manager.keys import embedder_of
from crl.manager.storage.schema import (
    APPLICATION_ID,
    DAMAGED_REMEDY,
    RESTORE_REMEDY,
    SCHEMA_VERSION,
    prepare,
)
from crl.manager.storage.writer import WriterLock, hard_link_problem, sibling_path

T = TypeVar("T")
Work = Callable[[Connection], T]
"""Unit of work: a function that runs statements. It is called on the database's thread."""

MAX_WORKS_PER_COMMIT = 64
"""Maximum number of units of work that share one commit."""


class Database:
    """Bank file with this object as its only writer. Create it with `open`.

    Every failure of SQLite becomes a `StoreError` that names the file.
    """

    def __init__(
        self, path: Path, connection: Connection, exit_stack: ExitStack, thread: ThreadPoolExecutor
    ) -> None:
        self.path, self.connection = path, connection
        self._exit_stack, self._thread = exit_stack, thread
        self._waiting: deque[tuple[Work[Any], asyncio.Future[Any]]] = deque()
        self._committing: asyncio.Future[list[Any]] | None = None
        self._closed = False
        self._closing_task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, path: Path) -> Database:
        """Open the bank at `path`.

        The file is created if it does not exist (its directory must exist), and upgraded if an
        older crl wrote it. Raise `StoreError` if another writer has the bank open. Raise
        `StoreError` also if the file is newer than this crl, is not a bank, is damaged or cannot be
        written.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="bank")
        opening = asyncio.get_running_loop().run_in_executor(thread, _open, path)
        try:
            return cls(path, *await finish_then_cancel(opening), thread)
        except BaseException:
            if not opening.exception():  # the file was opened, but the caller was cancelled
                opening.result()[1].close()
            thread.shutdown(wait=False)
            raise

    async def transaction(self, work: Work[T]) -> T:
        """Run `work` in a transaction and return its result.

        When this method returns, all changes of `work` are durable. If `work` or its commit fails,
        none of them is made. Units of work begin in the order of their calls. Units that wait at
        the same time share one commit, because a durable commit takes longer than their statements.
        Each unit can fail alone. A caller that is cancelled does not interrupt its work.
        """
        self._require_open()
        loop = asyncio.get_running_loop()
        result = loop.create_future()
        self._waiting.append((work, result))
        if len(self._waiting) == 1:
            loop.call_soon(self._commit_waiting)
        return await asyncio.shield(result)

    async def transaction_after_copy(self, work: Work[T], target: Work[Path | None]) -> T:
        """Copy the committed state to a file, then run `work` in a transaction.

        No other transaction runs between the two. `target` returns the file for the copy (None: no
        copy). The copy is written completely or not at all, and it replaces an existing file.
        """

        self._require_open()

        def copy_and_commit() -> T:
            with as_store_errors(self.path):
                if copy := target(self.connection):
                    _backup(self.connection, draft := copy.with_name(f"{copy.name}.part"))
                    draft.replace(copy)
            (outcome,) = self._commit([work])
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return await asyncio.shield(self._on_thread(copy_and_commit))

    async def read(self, work: Work[T]) -> T:
        """Return the result of `work`, which reads the bank outside any transaction.

        No write runs at the same time, so `work` sees one state of the bank.
        """

        self._require_open()

        def read() -> T:
            with as_store_errors(self.path):
                return work(self.connection)

        return await self._on_thread(read)

    async def rows(self, sql: str, parameters: Iterable[Any] = ()) -> list[sqlite3.Row]:
        """Return all rows of one query, which runs outside any transaction."""
        return await self.read(lambda db: db.execute(sql, tuple(parameters)).fetchall())

    async def backup(self, target: Path) -> None:
        """Copy the committed state to the new file `target`, completely or not at all.

        Raise `StoreError` if the copy fails or `target` exists.
        """
        self._require_open()
        _require_absent(target)

        def copy() -> None:
            with as_store_errors(target):
                _backup(self.connection, target)

        await _copy_or_remove(target, self._on_thread(copy))

    async def compact(self) -> None:
        """Compact the bank into one file without unused pages, so that the file can be moved.

        No data is left in the write-ahead log beside the file. Raise `StoreError` if this fails,
        for example because another connection is reading the bank.
        """
        self._require_open()

        def compact() -> None:
            with as_store_errors(self.path):
                self.connection.execute("VACUUM")
                if self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()["busy"]:
                    raise StoreError(
                        f"{self.path}: another connection is reading the bank, so it cannot be "
                        "compacted into one file. Close that connection and try again."
                    )

        await finish_then_cancel(self._on_thread(compact))

    async def aclose(self) -> None:
        """Close the file after the transactions that have begun or wait.

        Further calls have no effect.
        """
        if not self._closing_task:
            self._closing_task = asyncio.create_task(self._close())
        await finish_then_cancel(self._closing_task)

    async def _close(self) -> None:
        while self._waiting or self._committing:
            self._commit_waiting()
            if self._committing:
                await asyncio.wait({self._committing})
        self._closed = True

        def close() -> None:
            # While another process reads the bank, the end of this connection would leave the last
            # changes in the log beside the file. This waits for the reader, up to busy_timeout.
            with suppress(sqlite3.Error):  # then the log keeps the changes
                self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            with as_store_errors(self.path):
                self._exit_stack.close()

        await self._on_thread(close)
        self._thread.shutdown(wait=False)

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self.path}: the bank is closed. {SAFE}")

    def _on_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _commit_waiting(self) -> None:
        if self._waiting and not self._committing:
            count = min(MAX_WORKS_PER_COMMIT, len(self._waiting))
            batch = [self._waiting.popleft() for _ in range(count)]
            results = [result for _, result in batch]
            self._committing = self._on_thread(partial(self._commit, [work for work, _ in batch]))
            self._committing.add_done_callback(partial(self._finish_commit, results))

    def _finish_commit(
        self, results: Sequence[asyncio.Future[Any]], committing: asyncio.Future[list[Any]]
    ) -> None:
        self._committing = None
        # After an error the whole batch is rolled back, and each of its callers gets the error.
        error = committing.exception()
        for result, outcome in zip(
            results, [error] * len(results) if error else committing.result(), strict=True
        ):
            if isinstance(outcome, BaseException):
                result.set_exception(outcome)
                result.exception()  # marks the error as retrieved if the caller was cancelled
            else:
                result.set_result(outcome)
        self._commit_waiting()

    def _commit(self, works: Sequence[Work[Any]]) -> list[Any]:
        """Run the units of work in one transaction. Return the result or exception of each unit."""
        with as_store_errors(self.path):
            try:
                self.connection.execute("BEGIN IMMEDIATE")
                outcomes = [self._run_work(work) for work in works]
                self.connection.execute("COMMIT")
            except BaseException:
                self.connection.rollback()  # does nothing if no transaction is open
                raise
        return outcomes

    def _run_work(self, work: Work[Any]) -> Any:
        """Run one unit of work. Return its result or its exception; if it failed, undo its changes.

        Re-raise the exception if SQLite has rolled back the whole transaction.
        """
        self.connection.execute("SAVEPOINT work")
        try:
            with as_store_errors(self.path):
                outcome = work(self.connection)
        except Exception as error:
            # SQLite has rolled back the whole transaction, for example because the disk is full.
            if not self.connection.in_transaction:
                raise
            self.connection.execute("ROLLBACK TO work")
            outcome = error
        self.connection.execute("RELEASE work")
        return outcome


def check_bank(path: Path, key: str, remedy: str, *, require_entries: bool = False) -> None:
    """Raise `ConfigError` if the file at `path` is not a bank that this crl can read.

    The file is only read. `key` is the setting that names the file, and `remedy` is the advice in
    the error message. If `require_entries` is set, the bank must also have an active entry.
    """
    if reason := _file_problem(path) or hard_link_problem(path):
        raise ConfigError(key, str(path), reason, remedy)
    try:
        with closing(connect_to_read(path)) as db:
            reason = _schema_problem(db) or (_entries_problem(db) if require_entries else "")
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if (
            _sqlite_code(error).startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY"))
            and (wal := sibling_path(path, "wal")).exists()
        ):
            reason = (
                f"the bank was not closed, so its last changes are only in {wal.name}; they can be "
                "read only if both files and their directory are writable"
            )
            raise ConfigError(
                key, str(path), reason, "Copy both files to a writable directory and use the copy"
            ) from error
        if _sqlite_code(error).startswith("SQLITE_CORRUPT"):
            restore = f"{RESTORE_REMEDY[0].upper()}{RESTORE_REMEDY[1:]}"
            remedy = f"{restore}, or {remedy[0].lower()}{remedy[1:]}"
            raise ConfigError(key, str(path), f"the file is damaged ({error})", remedy) from error
        raise ConfigError(key, str(path), f"it is not a bank of crl ({error})", remedy) from error
    if reason:
        raise ConfigError(key, str(path), reason, remedy)


def snapshots(path: Path) -> set[int]:
    """Return the sequence numbers of the snapshots of the bank at `path`, which is only read.

    Raise `StoreError` if the file cannot be read.
    """
    with as_store_errors(path), closing(connect_to_read(path)) as db:
        return {seq for (seq,) in db.execute("SELECT seq FROM snapshots")}


def active_tasks(path: Path) -> frozenset[str]:
    """Return the tasks that the active entries of the bank at `path` are from.

    The file is only read. Call `check_bank` first. Raise `sqlite3.Error` if the file is damaged.
    """
    with closing(connect_to_read(path)) as db:
        rows = db.execute("SELECT DISTINCT task FROM entries WHERE status = 'active'").fetchall()
    return frozenset(task for (task,) in rows)


def require_vectors_of(path: Path, embedder: str, key: str) -> None:
    """Raise `ConfigError` under `key` if another embedder made the vectors of the bank at `path`.

    `embedder` is the name of the embedder (`Embedder.name`). The file is only read. Call
    `check_bank` first.
    """
    with as_store_errors(path), closing(connect_to_read(path)) as db:
        row = db.execute("SELECT value FROM facts WHERE name = 'embedder'").fetchone()
    if row and (made_by := embedder_of(row[0])) != embedder:
        reason = f"its vectors were made by the embedder {made_by}, not by {embedder}"
        kind = made_by.partition("-")[0]
        model = kind if kind in ("hash", "wordllama") else f"MODEL with the embedder {made_by}"
        raise ConfigError(key, str(path), reason, f"Add --set embedder.model={model}")


def _file_problem(path: Path) -> str:
    """Return why the file cannot be read, or "" if it can.

    The file is not opened for this check: closing it again would end SQLite's locks on it.
    """
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return "there is no such file"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if not regular:
        return "it is not a regular file"
    return "" if os.access(path, os.R_OK) else f"it cannot be read ({os.strerror(errno.EACCES)})"


def _schema_problem(db: Connection) -> str:
    """Return why this crl cannot read the bank, or "" if it can."""
    ((application,),), ((version,),) = (
        db.execute("PRAGMA application_id"),
        db.execute("PRAGMA user_version"),
    )
    if application != APPLICATION_ID:
        return "it is not a bank of crl"
    if version > SCHEMA_VERSION:
        return f"its schema version {version} is newer than this crl's {SCHEMA_VERSION}"
    return (
        "" if version > 0 else f"its schema version {version} is not valid, so the file is damaged"
    )


def _entries_problem(bank: Connection) -> str:
    """Return why the bank cannot guide episodes, or "" if it can."""
    try:
        if bank.execute("SELECT 1 FROM entries WHERE status = 'active' LIMIT 1").fetchall():
            return ""
    except sqlite3.Error as error:
        return f"the file is damaged ({error})"
    return "it holds no experiences, so as a frozen bank it could not guide any episode"


async def copy_database(source: Path, target: Path) -> None:
    """Copy the committed state of `source` to the new file `target`. `source` is only read.

    Raise `StoreError` if the copy fails or `target` exists.
    """
    _require_absent(target)
    with ThreadPoolExecutor(1) as thread:
        await _copy_or_remove(
            target, asyncio.get_running_loop().run_in_executor(thread, _copy, source, target)
        )


async def _copy_or_remove(target: Path, copying: asyncio.Future[None]) -> None:
    """Await a copy, and remove the copy if the caller is cancelled.

    After a cancellation no caller knows that the copy is complete.
    """
    try:
        await finish_then_cancel(copying)
    except asyncio.CancelledError:
        delete_bank(target)
        raise


def _copy(source: Path, target: Path) -> None:
    with as_store_errors(source), closing(connect_to_read(source)) as original:
        _backup(original, target)


def _backup(original: Connection, target: Path) -> None:
    """Copy a database to `target`, replacing files that an interrupted copy left there.

    The copy is removed if it fails.
    """
    delete_bank(target)
    try:
        with closing(sqlite3.connect(target)) as copy:
            original.backup(copy)
    except BaseException:
        delete_bank(target)
        raise


def _open(path: Path) -> tuple[Connection, ExitStack]:
    """Return the open connection, and the stack that closes it and releases the writer's lock."""
    with as_store_errors(path), ExitStack() as stack:
        stack.callback(WriterLock(path).release)
        connection = stack.enter_context(
            closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False))
        )
        prepare(connection, path)
        return connection, stack.pop_all()


async def finish_then_cancel(work: asyncio.Future[T]) -> T:
    """Await `work` even if the caller is cancelled, then re-raise the cancellation.

    Before `work` ends, no caller could release the resources that its thread holds.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise


def connect_to_read(path: Path) -> Connection:
    """Return a connection that writes nothing to the bank and leaves no file beside it.

    A writer that opens or closes the bank meanwhile does not disturb the connection.

    SQLite creates files beside the bank. It removes them only if the connection may write.
    Therefore the mode of the connection depends on the file:

    * The bank is writable and has no log: mode rw, so that SQLite can remove its files. Changes are
      still refused (query_only).
    * The bank is writable and has a log: mode ro. A connection that may write would copy the log
      into the bank when it closes.
    * The bank is not writable: mode ro, without new files (readonly_shm or immutable). This
      connection could not remove new files, and the owner could not use them.
    * SQLite cannot create the files, for example in a read-only directory or on a full disk, and
      there is no log: mode ro with immutable. Then no process can write to the bank either.
    """
    has_wal = wal_bytes(path) > 0
    if os.access(path, os.W_OK):
        db = _connect(path, "ro" if has_wal else "rw")
    else:
        db = _connect(path, "ro&readonly_shm=1" if has_wal else "ro&immutable=1")
    try:
        db.execute("PRAGMA application_id")
    except BaseException as error:
        db.close()
        if isinstance(error, sqlite3.OperationalError) and not has_wal:
            return _connect(path, "ro&immutable=1")
        raise
    return db


def wal_bytes(path: Path) -> int:
    """Return the size of the write-ahead log beside the bank, in bytes; 0 if there is none.

    A log with data means that the bank is open, or that its writer did not close it.
    """
    try:
        return sibling_path(path, "wal").stat().st_size
    except FileNotFoundError:
        return 0


def _connect(path: Path, mode: str) -> Connection:
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode={mode}", uri=True, isolation_level=None)
    db.execute("PRAGMA query_only = ON")
    return db


def _require_absent(path: Path) -> None:
    if path.exists():
        raise StoreError(
            f"{path}: the file already exists and is not overwritten. Choose another path."
        )


def delete_bank(path: Path) -> None:
    """Delete a bank's files. A missing file is not an error."""
    for file in bank_files(path):
        file.unlink(missing_ok=True)


def bank_files(path: Path) -> tuple[Path, ...]:
    """Return the paths of the bank's file and of the files that SQLite may leave beside it.

    SQLite leaves these files if a process ends without closing the bank.
    """
    return path, *(path.with_name(f"{path.name}-{suffix}") for suffix in ("wal", "shm"))


class as_store_errors:
    """Context manager that converts low-level errors to a `StoreError` that names the file.

    These errors come from SQLite, from the operating system, or from data that is not valid text or
    JSON.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, sqlite3.Error | OSError | UnicodeDecodeError | json.JSONDecodeError):
            raise StoreError(f"{self._path}: {error}. {_remedy(error)}") from error


@contextmanager
def check_rows(path: Path) -> Iterator[None]:
    """Convert errors caused by malformed rows to a `StoreError` that names the file.

    crl never writes malformed rows.
    """
    try:
        yield
    except UnicodeEncodeError:  # caused by the caller's argument, not by a row
        raise
    except (ValueError, TypeError, LookupError) as error:
        raise StoreError(
            f"{path}: the bank has unreadable rows ({type(error).__name__}: {error}). "
            f"{DAMAGED_REMEDY}"
        ) from error


def _remedy(error: Exception) -> str:
    """Return advice for the error message."""
    name = _sqlite_code(error)
    for prefix, remedy in REMEDIES.items():
        if name.startswith(prefix):
            return remedy
    return SAFE


def _sqlite_code(error: Exception) -> str:
    """Return SQLite's name of the error.

    Return "" for an error of the operating system. Return "SQLITE_CORRUPT", the name for a damaged
    file, for data that is not valid text or JSON. Python's module names no error for a text that
    is not UTF-8.
    """
    if str(error).startswith("Could not decode to UTF-8"):
        return "SQLITE_CORRUPT"
    return (
        (getattr(error, "sqlite_errorname", "") or "")
        if isinstance(error, sqlite3.Error | OSError)
        else "SQLITE_CORRUPT"
    )


SAFE = "All acknowledged changes are saved."
"""Sentence for messages about failed writes."""

REMEDIES = {
    "SQLITE_NOTADB": (
        f"The file is not a bank, or it is damaged: {RESTORE_REMEDY} or choose another path."
    ),
    "SQLITE_CORRUPT": DAMAGED_REMEDY,
    "SQLITE_ERROR": DAMAGED_REMEDY,  # the statements are fixed, so the tables are wrong
    "SQLITE_READONLY": "Make the file and its directory writable.",
    "SQLITE_CANTOPEN": "Its directory must exist and be writable.",
    "SQLITE_FULL": f"Free some disk space. {SAFE}",
    "SQLITE_IOERR": f"Check whether the disk is full, over its quota or disconnected. {SAFE}",
    "SQLITE_BUSY": "Another process is writing to the bank. End that process first.",
}
"""Advice for the user, by the beginning of SQLite's name of the error."""

"""One SQLite file behind asyncio: opening it safely, whole transactions in shared commits, one error for whatever goes wrong.

WAL with synchronous=FULL: what a transaction wrote is on disk when it returns, and readers never wait for a writer. One thread does
all of it: the statements of a transaction follow one another without a way through the event loop.
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
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from typing import Any, TypeVar

from crl.errors import ConfigError, StoreError
from crl.manager.schema import APPLICATION_ID, DAMAGED, RESTORE, SCHEMA_VERSION, prepare
from crl.manager.writer import WriterClaim, beside, several_names

T = TypeVar("T")
Work = Callable[[Connection], T]
"""Statements that belong together; called on the database's thread."""

GROUP = 64
"""Works that share one commit at most."""


class Database:
    """A bank's file, which nobody else writes to. Made by `open`; every failure of SQLite is a `StoreError` that names the file."""

    def __init__(
        self, path: Path, connection: Connection, closing: ExitStack, thread: ThreadPoolExecutor
    ) -> None:
        self.path, self.connection = path, connection
        self._closing, self._thread = closing, thread
        self._waiting: deque[tuple[Work[Any], asyncio.Future[Any]]] = deque()
        self._committing: asyncio.Future[list[Any]] | None = None
        self._closed = False
        self._ending: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, path: Path) -> Database:
        """Opens the bank at `path`, which is made when it is not there (its directory must be) and upgraded when it is of an older crl.

        Raises `StoreError` when somebody else writes to it, and when the file is of a newer version, is not a bank, is damaged or
        cannot be written.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="bank")
        opening = asyncio.get_running_loop().run_in_executor(thread, _open, path)
        try:
            return cls(path, *await to_its_end(opening), thread)
        except BaseException:
            if not opening.exception():  # it is the caller that was cancelled
                opening.result()[1].close()
            thread.shutdown(wait=False)
            raise

    async def transaction(self, work: Work[T]) -> T:
        """All of `work` is durable when this returns, or nothing of it happened. Works begin in the order of their calls.

        Works that wait at the same time share one commit, since making it durable takes longer than they do; each can fail alone.
        A caller that is cancelled does not interrupt its work.
        """
        self._require_open()
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self._waiting.append((work, done))
        if len(self._waiting) == 1:
            loop.call_soon(self._commit_waiting)
        return await asyncio.shield(done)

    async def transaction_after_copy(self, work: Work[T], target: Work[Path | None]) -> T:
        """A transaction before which all that is committed is copied to the file that `target` returns (None: no copy), whole or not at
        all, over what may be there. Nothing comes between the two."""

        self._require_open()

        def both() -> T:
            with store_errors(self.path):
                if copy := target(self.connection):
                    _back_up(self.connection, draft := copy.with_name(f"{copy.name}.part"))
                    draft.replace(copy)
            (outcome,) = self._commit([work])
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return await asyncio.shield(self._on_thread(both))

    async def read(self, work: Work[T]) -> T:
        """What `work` reads: one state of the bank, outside of any transaction."""

        self._require_open()

        def reading() -> T:
            with store_errors(self.path):
                return work(self.connection)

        return await self._on_thread(reading)

    async def rows(self, sql: str, parameters: Iterable[Any] = ()) -> list[sqlite3.Row]:
        """All rows of one query outside of any transaction."""
        return await self.read(lambda db: db.execute(sql, tuple(parameters)).fetchall())

    async def backup(self, target: Path) -> None:
        """Copies what is committed to a new file, in one piece. Raises `StoreError`, also when `target` exists."""
        self._require_open()
        _refuse_existing(target)

        def copying() -> None:
            with store_errors(target):
                _back_up(self.connection, target)

        await _whole_or_none(target, self._on_thread(copying))

    async def compact(self) -> None:
        """Makes the bank one file without unused pages, for one that goes elsewhere: nothing of it is left in the log beside it.

        Raises `StoreError`, also while somebody reads it.
        """
        self._require_open()

        def compacting() -> None:
            with store_errors(self.path):
                self.connection.execute("VACUUM")
                if self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()["busy"]:
                    raise StoreError(
                        f"{self.path}: somebody reads it, so it cannot be made one file. End that reader first."
                    )

        await to_its_end(self._on_thread(compacting))

    async def aclose(self) -> None:
        """Closes the file after the transactions that have begun or wait; closing it again does nothing."""
        if not self._ending:
            self._ending = asyncio.create_task(self._end())
        await to_its_end(self._ending)

    async def _end(self) -> None:
        while self._waiting or self._committing:
            self._commit_waiting()
            if self._committing:
                await asyncio.wait({self._committing})
        self._closed = True

        def close() -> None:
            with store_errors(self.path):
                self._closing.close()

        await self._on_thread(close)
        self._thread.shutdown(wait=False)

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError(
                f"{self.path}: the bank is closed. What was acknowledged before is safe."
            )

    def _on_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _commit_waiting(self) -> None:
        if self._waiting and not self._committing:
            group = [self._waiting.popleft() for _ in range(min(GROUP, len(self._waiting)))]
            self._committing = self._on_thread(partial(self._commit, [work for work, _ in group]))
            self._committing.add_done_callback(partial(self._settle, [done for _, done in group]))

    def _settle(
        self, group: Sequence[asyncio.Future[Any]], committing: asyncio.Future[list[Any]]
    ) -> None:
        self._committing = None
        error = (
            committing.exception()
        )  # then nothing of the group happened: each of its callers is told why
        for done, outcome in zip(
            group, [error] * len(group) if error else committing.result(), strict=True
        ):
            if isinstance(outcome, BaseException):
                done.set_exception(outcome)
                done.exception()  # it counts as seen when its caller was cancelled meanwhile
            else:
                done.set_result(outcome)
        self._commit_waiting()

    def _commit(self, works: Sequence[Work[Any]]) -> list[Any]:
        """One transaction; what each work returned or raised."""
        with store_errors(self.path):
            try:
                self.connection.execute("BEGIN IMMEDIATE")
                outcomes = [self._attempt(work) for work in works]
                self.connection.execute("COMMIT")
            except BaseException:
                self.connection.rollback()  # nothing where none is open
                raise
        return outcomes

    def _attempt(self, work: Work[Any]) -> Any:
        self.connection.execute("SAVEPOINT work")
        try:
            with store_errors(self.path):
                outcome = work(self.connection)
        except Exception as error:
            if (
                not self.connection.in_transaction
            ):  # SQLite gave up the whole transaction, as on a full disk
                raise
            self.connection.execute("ROLLBACK TO work")
            outcome = error
        self.connection.execute("RELEASE work")
        return outcome


def check_bank(path: Path, key: str, remedy: str, *, guiding: bool = False) -> None:
    """Raises `ConfigError` when the file at `path` is no bank that this crl reads, and where it shall be `guiding`, when it has no active
    entry. The file is only read. key: the setting that names it; remedy: what to give in its place."""
    if reason := _out_of_reach(path) or several_names(path):
        raise ConfigError(key, str(path), reason, remedy)
    try:
        with closing(connect_to_read(path)) as db:
            reason = _unreadable(db) or (_unguiding(db) if guiding else "")
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if (
            _code(error).startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY"))
            and (log := beside(path, "wal")).exists()
        ):
            reason = f"it was not closed, and what is in {log.name} beside it can only be read where both and their directory are writable"
            raise ConfigError(
                key, str(path), reason, "Copy both files to such a directory and use that copy"
            ) from error
        if _code(error).startswith("SQLITE_CORRUPT"):
            remedy = f"{RESTORE[0].upper()}{RESTORE[1:]}, or {remedy[0].lower()}{remedy[1:]}"
            raise ConfigError(key, str(path), f"it is damaged ({error})", remedy) from error
        raise ConfigError(key, str(path), f"it is not a bank of crl ({error})", remedy) from error
    if reason:
        raise ConfigError(key, str(path), reason, remedy)


def _out_of_reach(path: Path) -> str:
    """Why there is nothing to be read; empty where there is. (Opening it to find out would end SQLite's locks on it.)"""
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return "there is no such file"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if not regular:
        return "it is no file"
    return "" if os.access(path, os.R_OK) else f"it cannot be read ({os.strerror(errno.EACCES)})"


def _unreadable(db: Connection) -> str:
    """Why this crl does not read it; empty where it does."""
    ((application,),), ((version,),) = (
        db.execute("PRAGMA application_id"),
        db.execute("PRAGMA user_version"),
    )
    if application != APPLICATION_ID:
        return "it is not a bank of crl"
    if version > SCHEMA_VERSION:
        return f"its schema version {version} is newer than this crl's {SCHEMA_VERSION}"
    return (
        ""
        if version > 0
        else f"its schema version {version} is one that no crl writes: the file is damaged"
    )


def _unguiding(bank: Connection) -> str:
    try:
        if bank.execute("SELECT 1 FROM entries WHERE status = 'active' LIMIT 1").fetchall():
            return ""
    except sqlite3.Error as error:
        return f"it is damaged ({error})"
    return "it holds no experience, and a frozen one that is empty guides nobody"


async def copy_database(source: Path, target: Path) -> None:
    """Copies what is committed in `source`, which is only read, to a new file. Raises `StoreError`, also when `target` exists."""
    _refuse_existing(target)
    with ThreadPoolExecutor(1) as thread:
        await _whole_or_none(
            target, asyncio.get_running_loop().run_in_executor(thread, _copy, source, target)
        )


async def _whole_or_none(target: Path, copying: asyncio.Future[None]) -> None:
    """A copy whose caller is cancelled is removed: nobody knows that it is whole."""
    try:
        await to_its_end(copying)
    except asyncio.CancelledError:
        remove(target)
        raise


def _copy(source: Path, target: Path) -> None:
    with store_errors(source), closing(connect_to_read(source)) as original:
        _back_up(original, target)


def _back_up(original: Connection, target: Path) -> None:
    """Over what may be there: what was left of a copy that was killed."""
    remove(target)
    try:
        with closing(sqlite3.connect(target)) as copy:
            original.backup(copy)
    except BaseException:
        remove(target)
        raise


def _open(path: Path) -> tuple[Connection, ExitStack]:
    """The connection, and what closes it."""
    with store_errors(path), ExitStack() as stack:
        stack.callback(WriterClaim(path).release)
        connection = stack.enter_context(
            closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False))
        )
        prepare(connection, path)
        return connection, stack.pop_all()


async def to_its_end(work: asyncio.Future[T]) -> T:
    """What `work` returns. A caller that is cancelled waits for it, and is cancelled then: what its thread holds is in nobody's hands
    before."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise


def connect_to_read(path: Path) -> Connection:
    """A connection that writes nothing to the bank and leaves nothing beside it; a writer that comes or goes meanwhile does not disturb it.

    SQLite makes files beside the bank, and removes them for a connection that may write. So this one may, unless there is a log, which it
    would write into the bank as it closes. Where no file can be made, as in a read-only directory or on a full disk, nobody can write, and
    it reads without. So it does where the bank is not ours to write: what it made it could not remove, and the owner not use.
    """
    logged = log_bytes(path) > 0
    if os.access(path, os.W_OK):
        db = _connect(path, "ro" if logged else "rw")
    else:
        db = _connect(path, "ro&readonly_shm=1" if logged else "ro&immutable=1")
    try:
        db.execute("PRAGMA application_id")
    except BaseException as error:
        db.close()
        if isinstance(error, sqlite3.OperationalError) and not logged:
            return _connect(path, "ro&immutable=1")
        raise
    return db


def log_bytes(path: Path) -> int:
    """What is in the log beside the bank, which is open, or its writer did not close it."""
    try:
        return beside(path, "wal").stat().st_size
    except FileNotFoundError:
        return 0


def _connect(path: Path, mode: str) -> Connection:
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode={mode}", uri=True, isolation_level=None)
    db.execute("PRAGMA query_only = ON")
    return db


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise StoreError(
            f"{path}: it exists, and a bank is not copied over it. Choose another path."
        )


def remove(path: Path) -> None:
    """Not an error when there is nothing."""
    for file in files_of(path):
        file.unlink(missing_ok=True)


def files_of(path: Path) -> tuple[Path, ...]:
    """A bank's own, and those that SQLite leaves beside it when a process ends without closing it."""
    return path, *(path.with_name(f"{path.name}-{suffix}") for suffix in ("wal", "shm"))


class store_errors:
    """SQLite's errors, the system's, and what cannot be text or JSON, as `StoreError`s that name the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, sqlite3.Error | OSError | UnicodeDecodeError | json.JSONDecodeError):
            raise StoreError(f"{self._path}: {error}. {_remedy(error)}") from error


@contextmanager
def readable_rows(path: Path) -> Iterator[None]:
    """Of rows that crl did not write like this, `StoreError`s that name the file."""
    try:
        yield
    except UnicodeEncodeError:  # of what was asked for, not of a row
        raise
    except (ValueError, TypeError, LookupError) as error:
        raise StoreError(
            f"{path}: it cannot be read ({type(error).__name__}: {error}). {DAMAGED}"
        ) from error


def _remedy(error: Exception) -> str:
    name = _code(error)
    for prefix, remedy in REMEDIES.items():
        if name.startswith(prefix):
            return remedy
    return "What was acknowledged before is safe."


def _code(error: Exception) -> str:
    """SQLite's name of the error, none where it is the system's; that of a damaged file for what cannot be text or JSON."""
    return (
        (getattr(error, "sqlite_errorname", "") or "")
        if isinstance(error, sqlite3.Error | OSError)
        else "SQLITE_CORRUPT"
    )


REMEDIES = {
    "SQLITE_NOTADB": f"It is not a bank, or it is damaged: {RESTORE} or choose another path.",
    "SQLITE_CORRUPT": DAMAGED,
    "SQLITE_ERROR": DAMAGED,  # the statements are always the same: it is the tables that are others
    "SQLITE_READONLY": "Make the file and its directory writable.",
    "SQLITE_CANTOPEN": "Its directory must exist and be writable.",
    "SQLITE_FULL": "Free some disk space; what was acknowledged before is safe.",
    "SQLITE_IOERR": "See whether its disk is full, over a quota or gone; what was acknowledged before is safe.",
    "SQLITE_BUSY": "Another process is writing to it: end that one first.",
}

"""One SQLite file behind asyncio: opening it safely, whole transactions in shared commits, one error for whatever goes wrong.

WAL with synchronous=FULL: what a transaction wrote is on disk when it returns, and readers never wait for a writer.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import aiosqlite

from crl.errors import StoreError

T = TypeVar("T")
Work = Callable[[aiosqlite.Connection], Awaitable[T]]

SCHEMA = Path(__file__).with_name("schema.sql")
SCHEMA_VERSION = 1
GROUP = 64
"""Works that share one commit at most."""

APPLICATION_ID = 0x63726C42  # "crlB": tells a bank from any other SQLite file


class Database:
    """A bank's file. Made by `open`; every failure of SQLite is a `StoreError` that names the file."""

    def __init__(self, path: Path, connection: aiosqlite.Connection) -> None:
        self.path, self.connection = path, connection
        self._lock = asyncio.Lock()
        self._waiting: deque[tuple[Work[Any], asyncio.Future[Any]]] = deque()
        self._committing: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[Any]] = set()

    @classmethod
    async def open(cls, path: Path) -> Database:
        """Opens the bank at `path`, which is made when it is not there (its directory must be).

        Raises `StoreError` when the file is of a newer version, is not a bank, is damaged or cannot be written.
        """
        opening = asyncio.create_task(_connect(path))
        try:
            with _errors(path):
                return cls(path, await _to_its_end(opening))
        except asyncio.CancelledError:
            if not opening.cancelled() and not opening.exception():
                await opening.result().close()
            raise

    async def transaction(self, work: Work[T]) -> T:
        """All of `work` is durable when this returns, or nothing of it happened. Works begin in the order of their calls.

        Works that wait at the same time share one commit, since making it durable takes longer than they do; each can fail alone.
        A caller that is cancelled does not interrupt its work.
        """
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((work, done))
        if self._committing is None:
            self._committing = asyncio.create_task(self._commit_all())
        return await asyncio.shield(done)

    async def _commit_all(self) -> None:
        while self._waiting:
            group = [self._waiting.popleft() for _ in range(min(GROUP, len(self._waiting)))]
            outcomes: Sequence[Any]
            try:
                outcomes = await self._commit([work for work, _ in group])
            except BaseException as error:  # nothing of the group happened: each of its callers is told why
                outcomes = [error] * len(group)
            for (_, done), outcome in zip(group, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    done.set_exception(outcome)
                    done.exception()  # it counts as seen when its caller was cancelled meanwhile
                else:
                    done.set_result(outcome)
        self._committing = None

    async def _commit(self, works: Sequence[Work[Any]]) -> list[Any]:
        """One transaction; what each work returned or raised."""
        async with self._lock:
            with _errors(self.path):
                try:
                    await self.connection.execute("BEGIN IMMEDIATE")
                    outcomes = [await self._attempt(work) for work in works]
                    await self.connection.execute("COMMIT")
                except BaseException:
                    await self.connection.rollback()  # nothing where none is open; after a BEGIN that a cancellation left under way
                    raise
        return outcomes

    async def _attempt(self, work: Work[Any]) -> Any:
        await self.connection.execute("SAVEPOINT work")
        try:
            with _errors(self.path):
                outcome = await work(self.connection)
        except Exception as error:
            if not self.connection.in_transaction:  # SQLite gave up the whole transaction, as on a full disk
                raise
            await self.connection.execute("ROLLBACK TO work")
            outcome = error
        await self.connection.execute("RELEASE work")
        return outcome

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def rows(self, sql: str, parameters: Iterable[Any] = ()) -> list[sqlite3.Row]:
        """All rows of one query outside of any transaction."""
        async with self._lock:
            with _errors(self.path):
                return list(await self.connection.execute_fetchall(sql, parameters))

    async def backup(self, target: Path) -> None:
        """Copies what is committed to a new file, in one piece. Raises `StoreError`, also when `target` exists."""
        _refuse_existing(target)
        await self._whole(self._backup(target))

    async def _backup(self, target: Path) -> None:
        try:
            with _errors(target):
                async with self._lock, aiosqlite.connect(target) as copy:
                    await self.connection.backup(copy)
        except BaseException:
            _remove(target)
            raise

    async def aclose(self) -> None:
        """Closes the file after the transactions that have begun."""
        while pending := {*self._running, *([self._committing] if self._committing else [])}:
            await asyncio.wait(pending)
        async with self._lock:
            with _errors(self.path):
                await self.connection.close()


def check_bank(path: Path, *, guiding: bool) -> None:
    """Raises `StoreError` with the reason alone when there is no bank at `path` that this crl reads, and where it shall be `guiding`,
    when it has no active entry. The file is only read."""
    try:
        with closing(sqlite3.connect(_read_only(path), uri=True)) as db:
            ((application,),), ((version,),) = db.execute("PRAGMA application_id"), db.execute("PRAGMA user_version")
            if application != APPLICATION_ID:
                raise StoreError("it is not a bank of crl")
            if version > SCHEMA_VERSION:
                raise StoreError(f"its schema version {version} is newer than this crl's {SCHEMA_VERSION}")
            if guiding and not list(db.execute("SELECT 1 FROM entries WHERE status = 'active' LIMIT 1")):
                raise StoreError("it holds no experience, and a frozen one that is empty guides nobody")
    except sqlite3.Error as error:
        raise StoreError(f"it is not a bank of crl ({error})") from error


async def copy_database(source: Path, target: Path) -> None:
    """Copies what is committed in `source`, which is only read, to a new file. Raises `StoreError`, also when `target` exists."""
    _refuse_existing(target)
    try:
        with _errors(source):
            await _to_its_end(asyncio.create_task(_copy(source, target)))
    except BaseException:
        _remove(target)
        raise


async def _copy(source: Path, target: Path) -> None:
    async with aiosqlite.connect(_read_only(source), uri=True) as original, aiosqlite.connect(target) as copy:
        await original.backup(copy)


async def _to_its_end(work: asyncio.Task[T]) -> T:
    """What `work` returns. A caller that is cancelled waits for it: a connection that is being made cannot be given up half-way,
    since its thread would call into an event loop that may be closed by then."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise


def _read_only(path: Path) -> str:
    """Without a write-ahead log nobody has it open: then SQLite needs no files beside it, which it would leave behind."""
    closed = not path.with_name(f"{path.name}-wal").exists()
    return f"{path.resolve().as_uri()}?mode=ro{'&immutable=1' if closed else ''}"


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise StoreError(f"{path}: it exists, and a bank is not copied over it. Choose another path.")


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


async def _connect(path: Path) -> aiosqlite.Connection:
    connection = await aiosqlite.connect(path, isolation_level=None)
    try:
        await _prepare(connection, path)
    except BaseException:
        await connection.close()
        raise
    return connection


async def _prepare(connection: aiosqlite.Connection, path: Path) -> None:
    connection.row_factory = sqlite3.Row
    await connection.execute("PRAGMA busy_timeout = 5000")
    version = await _pragma(connection, "user_version")
    if version > SCHEMA_VERSION:
        raise StoreError(f"{path}: the bank has schema version {version}, newer than this crl's {SCHEMA_VERSION}. Upgrade crl.")
    tables = list(await connection.execute_fetchall("SELECT name FROM sqlite_master"))
    if tables and await _pragma(connection, "application_id") != APPLICATION_ID:
        raise StoreError(f"{path}: a SQLite file, but not a bank of crl. Choose another path.")
    if await _pragma(connection, "journal_mode = WAL") != "wal":
        raise StoreError(f"{path}: its file system does not support SQLite's write-ahead log. Keep the bank on a local disk.")
    await connection.execute("PRAGMA synchronous = FULL")
    # A write even where nothing is to be made: a bank that cannot be written is refused now, not after the first episode.
    await connection.execute("BEGIN IMMEDIATE")
    if not tables:
        for statement in _statements(SCHEMA.read_text("utf-8")):
            await connection.execute(statement)
        await connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    await connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    await connection.execute("COMMIT")


async def _pragma(connection: aiosqlite.Connection, pragma: str) -> Any:
    (row,) = await connection.execute_fetchall(f"PRAGMA {pragma}")
    return row[0]


def _statements(script: str) -> Iterable[str]:
    """The statements of a script one by one (`executescript` would commit what has begun)."""
    statement = ""
    for line in script.splitlines():
        statement += line.split("--")[0] + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


class _errors:
    """SQLite's errors as `StoreError`s that name the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, sqlite3.Error):
            raise StoreError(f"{self._path}: {error}. {_remedy(error)}") from error


def _remedy(error: sqlite3.Error) -> str:
    name = getattr(error, "sqlite_errorname", "") or ""
    for prefix, remedy in REMEDIES.items():
        if name.startswith(prefix):
            return remedy
    return "What was acknowledged before is safe."


REMEDIES = {
    "SQLITE_NOTADB": "It is not a bank, or it is damaged: restore a copy or choose another path.",
    "SQLITE_CORRUPT": "The file is damaged: restore a copy or choose another path.",
    "SQLITE_READONLY": "Make the file and its directory writable.",
    "SQLITE_CANTOPEN": "Its directory must exist and be writable.",
    "SQLITE_FULL": "Free some disk space; what was acknowledged before is safe.",
    "SQLITE_BUSY": "Another process is writing to it: end that one first.",
}

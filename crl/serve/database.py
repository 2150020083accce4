"""Asynchronous queries of a bank, which do not disturb its writer."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import aiosqlite
from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

from crl.manager.inspection.reading import require_bank
from crl.manager.storage.database import as_store_errors, check_rows, connect_to_read

CONNECTIONS = 4
"""Maximum number of open connections."""

ROWS = 64
"""Rows that are fetched at once."""

_limiter: RunVar[CapacityLimiter] = RunVar("limiter of connections to banks")


@asynccontextmanager
async def open_bank(path: Path) -> AsyncIterator[aiosqlite.Connection]:
    """Open a bank to read, and close it when the block ends. All reads see the same state.

    Raise `ConfigError` if there is no bank that this version of crl can read, and `StoreError` if
    the file is damaged.
    """
    try:
        limiter = _limiter.get()
    except LookupError:  # the first bank of this event loop
        _limiter.set(limiter := CapacityLimiter(CONNECTIONS))
    async with limiter:
        await to_thread.run_sync(require_bank, path)
        with as_store_errors(path):
            async with aiosqlite.Connection(partial(connect_to_read, path), ROWS) as db:
                db.row_factory = sqlite3.Row
                await db.execute("BEGIN")
                with check_rows(path):
                    yield db

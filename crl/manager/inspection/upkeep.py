"""Changes to a bank that no run has open, and new banks from exported entries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from crl.errors import ConfigError
from crl.manager.inspection.reading import EntryView, require_bank
from crl.manager.records import Entry, Stamp, UnitKey
from crl.manager.storage.database import bank_files
from crl.manager.storage.store import Store
from crl.manager.storage.writer import WriterLock

# ── changes ───────────────────────────────────────────────────────────────────────────────────────


def lowest_credit(entries: Sequence[EntryView], keep: int) -> list[EntryView]:
    """Return the entries to evict so that `keep` remain: those with the lowest Σ r.

    Among equals, the entry that was written first is evicted first. `entries` must be in the order
    in which they were written.
    """
    return sorted(entries, key=lambda entry: entry.counters.credit)[: max(0, len(entries) - keep)]


def not_used_since(entries: Sequence[EntryView], step: int) -> list[EntryView]:
    """Return the entries that were neither written nor retrieved at actor step `step` or later.

    Steps are completed actor steps of the bank's run. Writes and retrievals in another run are
    ignored.
    """
    return [
        entry
        for entry in entries
        if all(
            known is None or known < step
            for known in (entry.step, entry.counters.last_returned_step)
        )
    ]


async def evict(path: Path, units: Sequence[UnitKey]) -> int:
    """Evict the given versions of entries. Return the number of entries evicted.

    Raise `ConfigError` if there is no readable bank at `path`. Raise `StoreError` if this fails,
    also while a run has the bank open.
    """
    async with _open_store(path) as store:
        return await store.evict(units)


async def retry_dead(path: Path, ids: Sequence[str] | None = None) -> int:
    """Make dead requests pending again: the requests `ids`, or all. Return their number.

    Raise `ConfigError` if there is no readable bank at `path`. Raise `StoreError` if this fails,
    also while a run has the bank open.
    """
    async with _open_store(path) as store:
        return len(await store.retry_dead(ids))


def require_closed(path: Path) -> None:
    """Raise `StoreError` while a run has the bank open.

    A run keeps the entries in memory, so it would not see a change.
    """
    WriterLock(path).release()


@asynccontextmanager
async def _open_store(path: Path) -> AsyncIterator[Store]:
    require_bank(path)  # without this check, `Store.open` would create a missing bank
    store = await Store.open(path)
    try:
        yield store
    finally:
        await store.aclose()


# ── new banks ─────────────────────────────────────────────────────────────────────────────────────


def create_bank(path: Path, entries: Sequence[Entry]) -> None:
    """Create a new bank at `path` with these entries, completely or not at all.

    Raise `ConfigError` if the file cannot be created there. Raise `StoreError` if the entries
    cannot be written.
    """
    try:
        for file in bank_files(path):
            if file.exists():
                raise ConfigError(
                    "bank",
                    str(file),
                    "the file already exists and is not overwritten",
                    "Choose another path for the new bank",
                )
        with TemporaryDirectory(prefix=".crl-import-", dir=path.parent) as folder:
            draft = Path(folder) / path.name
            asyncio.run(_fill(draft, entries))
            draft.rename(path)
    except OSError as error:
        remedy = "Choose a directory that exists and is writable"
        raise ConfigError(
            "bank", str(path), f"cannot be created ({error.strerror})", remedy
        ) from error


async def _fill(path: Path, entries: Sequence[Entry]) -> None:
    store = await Store.open(path)
    try:
        await store.import_entries(entries, Stamp(0, 0))
        await store.compact()  # the caller renames only this file, not the log beside it
    finally:
        await store.aclose()

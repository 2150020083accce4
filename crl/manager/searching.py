"""From queries to picks: gathered, embedded together, compared on worker threads where the bank is large, picked in order.

Searches are readers of the bank and changes its writers; neither holds the lock while an embedder or the disk is waited for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from threadpoolctl import threadpool_limits

from crl.manager.bank import Bank, Vector
from crl.manager.index import Build, Index, Neighbour
from crl.manager.lock import ReadWriteLock
from crl.manager.records import Entry
from crl.manager.retrieval import RetrievalSettings
from crl.protocols import Embedder, Hit, SearchRequest

THREADS_FROM = 4096
"""Entries from which on the workers are asked. A smaller bank takes 0.14 ms a query at most, as long as handing it to a thread."""

Near = dict[tuple[str, str], list[Neighbour]]
"""(task, query) → its nearest."""


class Asked(NamedTuple):
    """One call that waits for its hits. step: completed actor steps when it came."""

    requests: Sequence[SearchRequest]
    step: int
    counted: bool
    hits: asyncio.Future[list[Hit | None]]


class Searcher:
    """Answers searches in batches: of B, or of what came within t_max, or at once when none is in work (CRL appendix C.2).

    Batches are embedded at the same time; their picks are made one batch after the other, in the order in which searches came.
    """

    def __init__(self, bank: Bank, embedder: Embedder, settings: RetrievalSettings) -> None:
        self._bank, self._embedder, self._settings = bank, embedder, settings
        self._lock = ReadWriteLock()
        self._workers = ThreadPoolExecutor(settings.workers, thread_name_prefix="search")
        self._waiting: list[Asked] = []
        self._gathered = 0  # requests in `_waiting`
        self._timer: asyncio.TimerHandle | None = None
        self._batches: set[asyncio.Task[None]] = set()
        self._last: asyncio.Task[None] | None = None
        self._builds: set[asyncio.Task[None]] = set()
        self._stop = threading.Event()
        # Of this process, for good: the queries are what runs in parallel, and a product on two threads differs in its last bits.
        threadpool_limits(1, user_api="blas")

    async def search(self, requests: Sequence[SearchRequest], step: int, *, counted: bool) -> list[Hit | None]:
        """At most one experience per request. A caller that is cancelled before its pick leaves no trace. Raises what the embedder does."""
        asked = Asked(requests, step, counted, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        self._gathered += len(requests)
        if not self._batches or self._gathered >= self._settings.batch:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._settings.max_wait, self._send)
        return await asked.hits

    async def change(self, put: Iterable[tuple[Entry, Vector]], remove: Iterable[str] = ()) -> None:
        """Puts entries and removes others between two searches. Raises what went wrong in building an index before."""
        async with self._lock.write():
            for entry, vector in put:
                self._bank.put(entry, vector)
            for uid in remove:
                self._bank.remove(uid)
        for build in [build for build in self._builds if build.done()]:
            self._builds.discard(build)
            build.result()
        for index in self._bank.due():
            self._builds.add(asyncio.create_task(self._build(index, index.begin())))

    async def aclose(self) -> None:
        """Answers what was asked, and ends the threads."""
        self._stop.set()
        while self._batches:
            await asyncio.wait(set(self._batches))
        self._workers.shutdown()
        await asyncio.gather(*self._builds)

    # ── batches ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting, self._gathered = self._waiting, [], 0
        self._last = asyncio.create_task(self._answer(batch, self._last))
        self._batches.add(self._last)
        self._last.add_done_callback(self._answered)

    def _answered(self, batch: asyncio.Task[None]) -> None:
        self._batches.discard(batch)
        if self._waiting and not self._batches:
            self._send()

    async def _answer(self, batch: Sequence[Asked], before: asyncio.Task[None] | None) -> None:
        try:
            queries = list(dict.fromkeys(request.query for asked in batch for request in asked.requests))
            vectors = dict(zip(queries, await self._embedder.embed(queries), strict=True)) if queries else {}
            if before and not before.done():
                await asyncio.wait([before])
            async with self._lock.read():
                near = await self._near(batch, vectors)
                for asked in batch:
                    if not asked.hits.done():
                        asked.hits.set_result(self._pick(asked, vectors, near))
        except Exception as error:
            for asked in batch:
                if not asked.hits.done():
                    asked.hits.set_exception(error)

    async def _near(self, batch: Sequence[Asked], vectors: Mapping[str, Vector]) -> Near:
        """The nearest of each query to a large bank, by the workers; what is not in it, the pick looks up itself."""
        loop = asyncio.get_running_loop()
        asking = {
            (request.task.name, request.query): None
            for asked in batch
            for request in asked.requests
            if self._bank.size(request.task.name) > THREADS_FROM and not self._bank.decided(request, counted=asked.counted)
        }
        jobs = [loop.run_in_executor(self._workers, self._bank.nearest, task, vectors[query]) for task, query in asking]
        return dict(zip(asking, await asyncio.gather(*jobs), strict=True))

    def _pick(self, asked: Asked, vectors: Mapping[str, Vector], near: Near) -> list[Hit | None]:
        bank, step, counted = self._bank, asked.step, asked.counted
        found = [near.get((request.task.name, request.query)) if near else None for request in asked.requests]
        return [bank.search(r, vectors[r.query], step, counted=counted, near=one) for r, one in zip(asked.requests, found, strict=True)]

    # ── snapshots ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _build(self, index: Index, build: Build) -> None:
        """The next snapshot of a large index: searches go on meanwhile, and wait for the swap alone."""
        if await asyncio.to_thread(build.run, self._stop):
            async with self._lock.write():
                index.swap(build)

"""From queries to picks: gathered, embedded together, compared on worker threads where the bank is large, picked in order.

Searches are readers of the bank and changes its writers; neither holds the lock while an embedder or the disk is waited for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from threadpoolctl import threadpool_limits

from crl.manager.bank import Bank, Vector
from crl.manager.index import Build, Index, Neighbour
from crl.manager.lock import ReadWriteLock
from crl.manager.records import Entry
from crl.manager.retrieval import RetrievalSettings
from crl.protocols import Embedder, Hit, SearchRequest

THREADS_FROM = 4096
"""Entries from which on the workers are asked. A smaller bank takes 0.14 ms a query at most, as long as handing it to a thread."""

Vectors = dict[str, Vector | BaseException]
"""query → its embedding, or why it has none."""

Near = dict[tuple[str, str], list[Neighbour] | BaseException]
"""(task, query) → its nearest, or why they are not known."""

T = TypeVar("T")


class Asked(NamedTuple):
    """One call that waits for its hits. step: completed actor steps when it came."""

    requests: Sequence[SearchRequest]
    step: int
    counted: bool
    hits: asyncio.Future[list[Hit | None]]


class Searcher:
    """Answers searches in batches: of B, or of what came within t_max, or at once when none is in work (CRL appendix C.2).

    Batches are embedded at the same time; their picks are made one batch after the other, in the order in which searches came. A search
    fails alone, with what went wrong for one of its own queries.

    It limits numpy's BLAS to one thread, in the whole process and for good: queries are what runs in parallel, and the last bits of a
    product on several threads depend on how many there are. There is no limit of a thread or of a block of code in OpenBLAS.
    """

    def __init__(self, bank: Bank, embedder: Embedder, settings: RetrievalSettings) -> None:
        self._bank, self._embedder, self._settings = bank, embedder, settings
        self._lock = ReadWriteLock()
        self._workers = ThreadPoolExecutor(settings.workers, thread_name_prefix="search")
        self._waiting: list[Asked] = []
        self._gathered = 0  # requests in `_waiting`
        self._timer: asyncio.TimerHandle | None = None
        self._batches: set[asyncio.Future[None]] = set()  # in work
        self._last: asyncio.Future[None] | None = None
        self._builds: set[asyncio.Task[None]] = set()
        self._stop = threading.Event()
        threadpool_limits(1, user_api="blas")

    async def search(
        self, requests: Sequence[SearchRequest], step: int, *, counted: bool
    ) -> list[Hit | None]:
        """At most one experience per request. A caller that is cancelled before its pick leaves no trace. Raises what the embedder does."""
        if counted and (remembered := self._bank.remembered(requests)) is not None:
            return remembered
        if not self._batches and not any(map(self._is_large, requests)):
            return await self._alone(requests, step, counted)
        asked = Asked(requests, step, counted, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        self._gathered += len(requests)
        if not self._batches or self._gathered >= self._settings.batch:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._settings.max_wait, self._send)
        return await asked.hits

    async def change(self, put: Iterable[tuple[Entry, Vector]], remove: Iterable[str] = ()) -> None:
        """Puts entries and removes others between two searches."""
        async with self._lock.write():
            for entry, vector in put:
                self._bank.put(entry, vector)
            for uid in remove:
                self._bank.remove(uid)
        for index in self._bank.due():
            self._builds.add(asyncio.create_task(self._build(index, index.begin())))

    def check(self) -> None:
        """Raises what went wrong in building an index, once; that index goes on without its next snapshot."""
        for build in [build for build in self._builds if build.done()]:
            self._builds.discard(build)
            build.result()

    async def aclose(self) -> None:
        """Answers what was asked, and ends the threads. Raises as `check` does."""
        self._stop.set()
        while self._batches:
            await asyncio.wait(set(self._batches))
        self._workers.shutdown()
        await asyncio.gather(*self._builds)

    # ── one search ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _alone(
        self, requests: Sequence[SearchRequest], step: int, counted: bool
    ) -> list[Hit | None]:
        """In the caller's own task, which the loop leaves only where the embedder or a change must be waited for."""
        self._last = batch = asyncio.get_running_loop().create_future()
        self._batches.add(batch)
        try:
            vectors = await self._embed(requests)
            async with self._lock.read():
                return self._pick(requests, step, counted, vectors, {})
        finally:
            batch.set_result(None)
            self._answered(batch)

    # ── batches ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting, self._gathered = self._waiting, [], 0
        self._last = asyncio.create_task(self._answer(batch, self._last))
        self._batches.add(self._last)
        self._last.add_done_callback(self._answered)

    def _answered(self, batch: asyncio.Future[None]) -> None:
        self._batches.discard(batch)
        if self._waiting and not self._batches:
            self._send()

    async def _answer(self, batch: Sequence[Asked], before: asyncio.Future[None] | None) -> None:
        try:
            vectors = await self._embed([request for asked in batch for request in asked.requests])
            if before and not before.done():
                await asyncio.wait([before])
            async with self._lock.read():
                near = await self._near(batch, vectors)
                for asked in batch:
                    if not asked.hits.done():
                        self._settle(asked, vectors, near)
        except Exception as error:  # of no search by itself: all of them would wait for ever
            for asked in batch:
                if not asked.hits.done():
                    asked.hits.set_exception(error)

    async def _embed(self, requests: Sequence[SearchRequest]) -> Vectors:
        queries = list(dict.fromkeys(request.query for request in requests))
        try:
            return (
                dict(zip(queries, await self._embedder.embed(queries), strict=True))
                if queries
                else {}
            )
        except Exception as error:
            if len(queries) == 1:
                return {queries[0]: error}
        # One text may be what all of them failed for.
        alone = await asyncio.gather(
            *(
                self._embed([request])
                for request in {request.query: request for request in requests}.values()
            )
        )
        return {query: vector for vectors in alone for query, vector in vectors.items()}

    async def _near(self, batch: Sequence[Asked], vectors: Vectors) -> Near:
        """The nearest of each query to a large bank, by the workers; what is not in it, the pick looks up itself.

        Returns when all workers are done, also where one fails: what follows changes what they read.
        """
        loop = asyncio.get_running_loop()
        asking = {
            (request.task.name, request.query): vector
            for asked in batch
            for request in asked.requests
            if self._is_large(request) and not self._bank.decided(request, counted=asked.counted)
            if not isinstance(vector := vectors[request.query], BaseException)
        }
        jobs = [
            loop.run_in_executor(self._workers, self._bank.nearest, task, vector)
            for (task, _), vector in asking.items()
        ]
        return dict(zip(asking, await asyncio.gather(*jobs, return_exceptions=True), strict=True))

    def _settle(self, asked: Asked, vectors: Vectors, near: Near) -> None:
        try:
            asked.hits.set_result(
                self._pick(asked.requests, asked.step, asked.counted, vectors, near)
            )
        except Exception as error:
            asked.hits.set_exception(error)

    def _pick(
        self,
        requests: Sequence[SearchRequest],
        step: int,
        counted: bool,
        vectors: Vectors,
        near: Near,
    ) -> list[Hit | None]:
        """Raises what went wrong for any of the requests, before one of them counts."""
        found = [
            (r, _value(vectors[r.query]), _value(near.get((r.task.name, r.query))))
            for r in requests
        ]
        return [
            self._bank.search(r, vector, step, counted=counted, near=nearest)
            for r, vector, nearest in found
        ]

    def _is_large(self, request: SearchRequest) -> bool:
        return self._bank.size(request.task.name) > THREADS_FROM

    # ── snapshots ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _build(self, index: Index, build: Build) -> None:
        """The next snapshot of a large index: searches go on meanwhile, and wait for the swap alone."""
        if await asyncio.to_thread(build.run, self._stop):
            async with self._lock.write():
                index.swap(build)


def _value(found: T | BaseException) -> T:
    if isinstance(found, BaseException):
        raise found
    return found

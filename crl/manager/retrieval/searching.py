"""Scheduling of searches: from queries to retrieved experiences.

Queries are collected, embedded in one call and compared with the bank, on worker threads if the
bank is large. Then the experiences are chosen in the order of the searches.

Searches read the bank, changes write to it. Neither holds the lock while it waits for the embedder
or for the disk.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeVar

from threadpoolctl import threadpool_limits

from crl.config.schema import RetrievalSection
from crl.manager.records import Entry
from crl.manager.retrieval.entries import Bank, Vector
from crl.manager.retrieval.index import Accept, Build, Index, Neighbour
from crl.manager.retrieval.lock import ReadWriteLock
from crl.protocols import Embedder, Hit, SearchRequest
from crl.types import Place, Task

THREADS_FROM = 4096
"""Number of entries above which worker threads compare the queries.

A smaller bank takes at most 0.14 ms per query, as long as passing the query to a thread.
"""

Vectors = dict[str, Vector | BaseException]
"""Map from a query to its embedding, or to the error of the embedder."""

Nearest = dict[tuple[Place, str], list[Neighbour] | BaseException]
"""Map from place and query to the nearest entries, or to the comparison's error."""

T = TypeVar("T")


class PendingSearch(NamedTuple):
    """Call of `Searcher.search` that waits for its hits."""

    requests: Sequence[SearchRequest]
    step: int
    """Completed actor steps at the time of the call."""
    counted: bool
    hits: asyncio.Future[list[Hit | None]]


class Searcher:
    """Scheduler that answers searches in batches (CRL appendix C.2).

    If no batch is in progress, a search is answered at once. Otherwise searches wait until they
    have B requests, until t_max has passed, or until no batch is in progress.

    Batches are embedded concurrently. Their experiences are chosen one batch after the other, in
    the order of the searches. An error of a query fails only the search that the query belongs to.

    The constructor permanently limits numpy's BLAS to one thread in the whole process. Parallelism
    comes from the queries, and the last bits of a product that is computed on several threads
    depend on their number. OpenBLAS has no limit for a single thread or a block of code.
    """

    def __init__(self, bank: Bank, embedder: Embedder, settings: RetrievalSection) -> None:
        self._bank, self._embedder, self._settings = bank, embedder, settings
        self._lock = ReadWriteLock()
        self._workers = ThreadPoolExecutor(settings.workers, thread_name_prefix="search")
        self._waiting: list[PendingSearch] = []
        self._waiting_requests = 0  # number of requests in `_waiting`
        self._timer: asyncio.TimerHandle | None = None
        self._batches: set[asyncio.Future[None]] = set()  # in progress
        self._last_batch: asyncio.Future[None] | None = None
        self._builds: set[asyncio.Task[None]] = set()
        self._stop = threading.Event()
        threadpool_limits(1, user_api="blas")

    async def search(
        self, requests: Sequence[SearchRequest], step: int, *, counted: bool
    ) -> list[Hit | None]:
        """Return at most one experience per request, in the order of the requests.

        A caller that is cancelled before its experiences are chosen changes no counters. Errors of
        the embedder are raised.
        """
        if counted and (group_choices := self._bank.group_choices(requests)) is not None:
            return group_choices
        if not self._batches and not any(map(self._is_large, requests)):
            return await self._search_alone(requests, step, counted)
        pending = PendingSearch(requests, step, counted, asyncio.get_running_loop().create_future())
        self._waiting.append(pending)
        self._waiting_requests += len(requests)
        if not self._batches or self._waiting_requests >= self._settings.batch:
            self._start_batch()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(
                self._settings.max_wait, self._start_batch
            )
        return await pending.hits

    async def nearest(self, task: Task, query: str, accept: Accept) -> list[tuple[Entry, float]]:
        """Return the entries nearest to a query with their similarities, the nearest first.

        They are those of `Bank.nearest`. A worker thread compares the query with a large bank, and
        calls `accept`. Nothing is counted. Raise the embedder's error.
        """
        (vector,) = await self._embedder.embed([query])
        async with self._lock.read():
            compare = partial(self._bank.nearest, task, vector, accept)
            if self._bank.size(task) > THREADS_FROM:
                found = await asyncio.get_running_loop().run_in_executor(self._workers, compare)
            else:
                found = compare()
            return [(self._bank.entries[uid], similarity) for uid, similarity in found]

    async def change(self, put: Iterable[tuple[Entry, Vector]], remove: Iterable[str] = ()) -> None:
        """Add or replace the entries `put` and remove the entries `remove` between two searches."""
        async with self._lock.write():
            for entry, vector in put:
                self._bank.put(entry, vector)
            for uid in remove:
                self._bank.remove(uid)
        for index in self._bank.indexes_to_rebuild():
            self._builds.add(asyncio.create_task(self._build(index, index.begin_build())))

    def check(self) -> None:
        """Raise the error of a failed index build, once per build.

        The index keeps its current snapshot and gets no new one.
        """
        for build in [build for build in self._builds if build.done()]:
            self._builds.discard(build)
            build.result()

    async def aclose(self) -> None:
        """Answer the open searches and shut down the threads. Raise the error of a failed build."""
        self._stop.set()
        while self._batches:
            await asyncio.wait(set(self._batches))
        self._workers.shutdown()
        await asyncio.gather(*self._builds)

    # ── one search ────────────────────────────────────────────────────────────────────────────────

    async def _search_alone(
        self, requests: Sequence[SearchRequest], step: int, counted: bool
    ) -> list[Hit | None]:
        """Answer a search in the caller's task.

        The task yields to the event loop only if it must wait for the embedder or for a change.
        """
        self._last_batch = batch = asyncio.get_running_loop().create_future()
        self._batches.add(batch)
        try:
            vectors = await self._embed(requests)
            async with self._lock.read():
                return self._choose(requests, step, counted, vectors, {})
        finally:
            batch.set_result(None)
            self._batch_done(batch)

    # ── batches ───────────────────────────────────────────────────────────────────────────────────

    def _start_batch(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting, self._waiting_requests = self._waiting, [], 0
        self._last_batch = asyncio.create_task(self._answer_batch(batch, self._last_batch))
        self._batches.add(self._last_batch)
        self._last_batch.add_done_callback(self._batch_done)

    def _batch_done(self, batch: asyncio.Future[None]) -> None:
        self._batches.discard(batch)
        if self._waiting and not self._batches:
            self._start_batch()

    async def _answer_batch(
        self, batch: Sequence[PendingSearch], previous: asyncio.Future[None] | None
    ) -> None:
        try:
            vectors = await self._embed(
                [request for pending in batch for request in pending.requests]
            )
            if previous and not previous.done():
                await asyncio.wait([previous])
            async with self._lock.read():
                near = await self._nearest(batch, vectors)
                for pending in batch:
                    if not pending.hits.done():
                        self._set_hits(pending, vectors, near)
        except Exception as error:  # not of a single search: fail all, or they would wait forever
            for pending in batch:
                if not pending.hits.done():
                    pending.hits.set_exception(error)

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
        # A single text may have caused the failure, so embed each one alone.
        results = await asyncio.gather(
            *(
                self._embed([request])
                for request in {request.query: request for request in requests}.values()
            )
        )
        return {query: vector for vectors in results for query, vector in vectors.items()}

    async def _nearest(self, batch: Sequence[PendingSearch], vectors: Vectors) -> Nearest:
        """Return the nearest entries of the queries to a large bank, found by the worker threads.

        `Bank.search` compares the other queries itself. Return only when all workers have finished,
        even if one fails, because the following steps change the data that the workers read.
        """
        loop = asyncio.get_running_loop()
        inputs = {
            _query_key(request): (request.task, vector)
            for pending in batch
            for request in pending.requests
            if self._is_large(request)
            and not self._bank.has_group_choice(request, counted=pending.counted)
            if not isinstance(vector := vectors[request.query], BaseException)
        }
        jobs = [
            loop.run_in_executor(self._workers, self._bank.nearest, task, vector)
            for task, vector in inputs.values()
        ]
        return dict(zip(inputs, await asyncio.gather(*jobs, return_exceptions=True), strict=True))

    def _set_hits(self, pending: PendingSearch, vectors: Vectors, near: Nearest) -> None:
        try:
            pending.hits.set_result(
                self._choose(pending.requests, pending.step, pending.counted, vectors, near)
            )
        except Exception as error:
            pending.hits.set_exception(error)

    def _choose(
        self,
        requests: Sequence[SearchRequest],
        step: int,
        counted: bool,
        vectors: Vectors,
        near: Nearest,
    ) -> list[Hit | None]:
        """Return the experiences of one search.

        Equal requests that follow each other get different experiences. If a request has an error,
        raise it before any request is counted.
        """
        inputs = [
            (
                r,
                len(list(equal)),
                _value_or_raise(vectors[r.query]),
                _value_or_raise(near.get(_query_key(r))),
            )
            for r, equal in groupby(requests)
        ]
        hits: list[Hit | None] = []
        for r, count, vector, nearest in inputs:
            found = self._bank.search_several(
                r, vector, step, count=count, counted=counted, near=nearest
            )
            hits += [*found, *[None] * (count - len(found))]
        return hits

    def _is_large(self, request: SearchRequest) -> bool:
        return self._bank.size(request.task) > THREADS_FROM

    # ── snapshots ─────────────────────────────────────────────────────────────────────────────────

    async def _build(self, index: Index, build: Build) -> None:
        """Build the next snapshot of a large index and swap it in.

        Searches continue during the build and wait only for the swap.
        """
        if await asyncio.to_thread(build.run, self._stop):
            async with self._lock.write():
                index.swap(build)


def _query_key(request: SearchRequest) -> tuple[Place, str]:
    return request.task.place, request.query


def _value_or_raise(value: T | BaseException) -> T:
    if isinstance(value, BaseException):
        raise value
    return value

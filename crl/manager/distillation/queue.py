"""Queue of finished episodes that wait for distillation, with retries.

Episodes are distilled in the background or at step boundaries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from crl.errors import RolloutError, TransientError
from crl.failures import TaskGroup
from crl.manager.records import Distilled, DistilRequest, Stamp
from crl.manager.settings import ManagerSettings
from crl.manager.storage.store import Store

Outcome = Distilled | str
"""Result of a request, or the reason why the request is dead."""


class DistilQueue:
    """Queue of distillation requests.

    * `stamp`: returns the stamp of an operation that happens now.
    * `attempt`: asks the extractor about a request once.
    * `settle`: writes an outcome to completion, even if its caller is cancelled, and then calls
      `count_settled`.

    The attribute `retried` counts failed attempts that were followed by another attempt.
    """

    def __init__(
        self, store: Store, settings: ManagerSettings, stamp: Callable[[], Stamp],
        attempt: Callable[[DistilRequest], Awaitable[Distilled]],
        settle: Callable[[DistilRequest, Outcome], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._store, self._settings, self._stamp, self._attempt, self._settle = (
            store,
            settings,
            stamp,
            attempt,
            settle,
        )
        self.retried = 0
        self._settled = 0
        self._in_progress: set[str] = set()  # ids of the requests that `run` has leased
        self._leasing = False
        self._drain_lock = asyncio.Lock()
        self._arrived = asyncio.Event()
        self._changed = asyncio.Condition()

    @property
    def busy(self) -> bool:
        """True while `run` or `drain` has requests in progress."""
        return self._running or self._drain_lock.locked()

    @property
    def _running(self) -> bool:
        return self._leasing or bool(self._in_progress)

    async def submit(self, request: DistilRequest) -> None:
        """Queue a request (see `ExperienceManager.submit`)."""
        while True:
            settled = self._settled
            if await self._store.submit(request, self._stamp(), self._settings.queue_size):
                self._arrived.set()
                return
            async with self._changed:
                await self._changed.wait_for(lambda seen=settled: self._settled != seen)

    async def run(self) -> None:
        """Distil requests until cancelled (see `ExperienceManager.run`)."""
        try:
            async with TaskGroup() as tasks:
                while True:
                    for request in await self._lease_next():
                        tasks.create_task(self._process(request), name=f"distil {request.id}")
        finally:
            in_progress, self._in_progress = self._in_progress, set()
            await self._store.release(in_progress)
            async with self._changed:
                self._changed.notify_all()

    async def drain(self) -> None:
        """Settle every request that was submitted before this call.

        The requests that this call leases are settled in request order.
        """
        async with self._drain_lock:  # another call may have leased some of the requests
            requests = await self._store.lease()
            try:
                async with TaskGroup() as tasks:
                    outcomes = [tasks.create_task(self._outcome(request)) for request in requests]
                # The tasks begin in request order. The writes and the changes in memory follow it.
                await asyncio.gather(
                    *(
                        self._settle(r, outcome.result())
                        for r, outcome in zip(requests, outcomes, strict=True)
                    )
                )
            except BaseException:
                await self._store.release([request.id for request in requests])
                raise
        async with self._changed:
            await self._changed.wait_for(lambda: not self._running)

    async def count_settled(self) -> None:
        """Record that a request was applied or marked as dead, so that the queue has space."""
        async with self._changed:
            self._settled += 1
            self._changed.notify_all()

    def notify_pending(self) -> None:
        """Let `run` check for pending requests that did not arrive through `submit`."""
        self._arrived.set()

    async def _lease_next(self) -> list[DistilRequest]:
        """Lease pending requests up to `concurrency`. Wait until there is at least one."""
        while True:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: len(self._in_progress) < self._settings.concurrency
                )
            self._arrived.clear()
            self._leasing = True  # so that `drain` waits for requests that are being leased
            try:
                free_slots = self._settings.concurrency - len(self._in_progress)
                leased = await self._store.lease(free_slots)
                self._in_progress.update(request.id for request in leased)
            finally:
                self._leasing = False
            if leased:
                return leased
            async with self._changed:
                self._changed.notify_all()
            await self._arrived.wait()

    async def _process(self, request: DistilRequest) -> None:
        await self._settle(request, await self._outcome(request))
        async with self._changed:
            self._in_progress.discard(request.id)
            self._changed.notify_all()

    async def _outcome(self, request: DistilRequest) -> Outcome:
        """Return the result of a request, or the reason why the request is dead.

        A request is dead if an attempt fails with a `RolloutError` that is not a `TransientError`,
        or if `attempts` attempts have failed. The pause between attempts doubles each time.
        """
        while True:
            try:
                return await self._attempt(request)
            except RolloutError as error:
                # The message may quote invalid Unicode.
                reason = str(error).encode(errors="replace").decode()
                failed = await self._store.record_failure(request, reason)
                if not isinstance(error, TransientError) or failed >= self._settings.queue.attempts:
                    return reason
            self.retried += 1
            await asyncio.sleep(self._settings.queue.backoff * 2 ** (failed - 1))

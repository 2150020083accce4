"""Background requests to an engine, which yield to an exchange of its weights.

An exchange waits until no request is decoding (`Engine.update_weights`). No episode waits for a
background request, such as the analysis of a failure by the actor. An exchange therefore cancels
these requests, and they are repeated with the new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from crl.protocols import Engine, PublishHandle
from crl.types import Completion, Sampling

MAX_INTERRUPTIONS = 3
"""Maximum number of interruptions of a request.

An exchange that finds such a request interrupts none: it waits for all of them. Requests that take
longer than a step therefore end, and delay at most every fourth exchange.
"""


class BackgroundEngine:
    """`crl.protocols.Engine` for background requests to `engine`.

    Requests of episodes go to `engine` itself. New weights must go through this object.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: dict[asyncio.Task[Completion], int] = {}
        """Open requests, and how often each was interrupted."""
        self._no_exchange = asyncio.Event()
        self._no_exchange.set()
        self.interrupted = 0
        """Number of interruptions so far."""

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def busy_s(self) -> float:
        return self._engine.busy_s

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        """Sample one completion of `ids`. See `crl.protocols.Engine`.

        A request that an exchange of weights interrupts is repeated after it, with the same `rng`.
        """
        caller = asyncio.current_task()
        assert caller is not None
        cancellations, interruptions = caller.cancelling(), 0
        while True:
            await self._no_exchange.wait()
            request = asyncio.ensure_future(
                self._engine.generate(ids, sampling, session=session, rng=rng)
            )
            self._open[request] = interruptions
            try:
                return await request
            except asyncio.CancelledError:
                interrupted = self._open[request] > interruptions
                if not interrupted or caller.cancelling() > cancellations:
                    raise
            finally:
                interruptions = self._open.pop(request)

    async def score(self, ids: Sequence[int]) -> Sequence[float]:
        return await self._engine.score(ids)

    async def update_weights(self, handle: PublishHandle) -> None:
        """Swap the weights. See `crl.protocols.Engine`.

        Open background requests are interrupted, unless one of them was interrupted
        `MAX_INTERRUPTIONS` times before. New ones wait for the end of the swap.
        """
        self._no_exchange.clear()
        try:
            if max(self._open.values(), default=0) < MAX_INTERRUPTIONS:
                for request in self._open:
                    interrupted = request.cancel()  # False if its result was not read yet
                    self._open[request] += interrupted
                    self.interrupted += interrupted
            await self._engine.update_weights(handle)
        finally:
            self._no_exchange.set()

    async def health(self) -> None:
        await self._engine.health()

    def details(self) -> list[str]:
        return self._engine.details()

    async def aclose(self) -> None:
        await self._engine.aclose()

"""Between episodes and their engine: `Direct` passes requests on as they come, `Waves` fixes who shares a forward pass.

Deterministic mode uses `Waves`: it holds requests back until every live episode waits for one, then hands them over in the
order of the episodes' names, so that timing has no influence on what is computed together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from crl.protocols import Engine
from crl.types import Completion, Sampling


class Sampler(Protocol):
    """Episodes `join` before any of them runs and `leave` when they end; in between they `generate`."""

    def join(self, session: str) -> None: ...
    def leave(self, session: str) -> None: ...
    async def turn(self, session: str) -> None:
        """Returns when this episode may do what must happen in order, such as a search."""
        ...

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, session: str, rng: int | None
    ) -> Completion: ...


class Direct:
    """Every request goes to the engine at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def join(self, session: str) -> None:
        """Nobody waits for anybody here."""

    def leave(self, session: str) -> None:
        """Nobody waits for anybody here."""

    async def turn(self, session: str) -> None:
        """Nobody waits for anybody here."""

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, session: str, rng: int | None
    ) -> Completion:
        return await self._engine.generate(ids, sampling, session=session, rng=rng)


class Waves:
    """Every request and search waits until all live episodes have one; a wave is let go as a whole, in the order of the names."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._live: set[str] = set()
        self._held: dict[str, asyncio.Future[None]] = {}

    def join(self, session: str) -> None:
        self._live.add(session)

    def leave(self, session: str) -> None:
        self._live.discard(session)
        self._held.pop(session, None)
        self._release_soon()

    async def turn(self, session: str) -> None:
        turn = self._held[session] = asyncio.get_running_loop().create_future()
        self._release_soon()
        await turn

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, session: str, rng: int | None
    ) -> Completion:
        await self.turn(session)
        return await self._engine.generate(ids, sampling, session=session, rng=rng)

    def _release_soon(self) -> None:
        """Not at once: the last episode to ask has to wait for its turn like the others."""
        asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        if set(self._held) != self._live:
            return
        wave, self._held = sorted(self._held.items()), {}
        for _, turn in wave:
            if not turn.cancelled():
                turn.set_result(None)  # wakes the episodes in this order

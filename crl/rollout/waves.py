"""Between episodes and their engine: `Direct` passes requests on as they come, `Waves` fixes who shares a forward pass.

Deterministic mode uses `Waves`: it holds requests back until every live episode waits for one, then hands them over in the
order of the episodes' names, so that timing has no influence on what is computed together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from crl.protocols import Engine
from crl.types import Completion, Sampling


class Sampler(Protocol):
    """Episodes `join` before any of them runs and `leave` when they end; in between they `generate`."""

    def join(self, session: str) -> None: ...
    def leave(self, session: str) -> None: ...
    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str, rng: int | None) -> Completion: ...


class Direct:
    """Every request goes to the engine at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def join(self, session: str) -> None:
        """Nobody waits for anybody here."""

    def leave(self, session: str) -> None:
        """Nobody waits for anybody here."""

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str, rng: int | None) -> Completion:
        return await self._engine.generate(ids, sampling, session=session, rng=rng)


@dataclass(frozen=True)
class _Held:
    ids: Sequence[int]
    sampling: Sampling
    rng: int | None
    future: asyncio.Future[Completion]


class Waves:
    """Every request waits until all live episodes have one; a wave is submitted as a whole, in the order of the names."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._under_way: set[asyncio.Future[Completion]] = set()
        self._live: set[str] = set()
        self._held: dict[str, _Held] = {}

    def join(self, session: str) -> None:
        self._live.add(session)

    def leave(self, session: str) -> None:
        self._live.discard(session)
        self._held.pop(session, None)
        self._release()

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str, rng: int | None) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._held[session] = _Held(ids, sampling, rng, future)
        self._release()
        return await future

    def _release(self) -> None:
        if not self._held or set(self._held) != self._live:
            return
        wave, self._held = sorted(self._held.items()), {}
        for session, held in wave:
            task = asyncio.create_task(self._engine.generate(held.ids, held.sampling, session=session, rng=held.rng))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
            task.add_done_callback(lambda done, future=held.future: _pass_on(done, future))


def _pass_on(done: asyncio.Future[Completion], future: asyncio.Future[Completion]) -> None:
    if future.done():
        return
    if done.cancelled():
        future.cancel()
    elif error := done.exception():
        future.set_exception(error)
    else:
        future.set_result(done.result())

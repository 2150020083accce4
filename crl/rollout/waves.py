"""Samplers: the layer between episodes and their engine.

`DirectSampler` forwards requests immediately. The others are used in deterministic mode.
`LockstepSampler` determines which requests share a forward pass. It holds requests until every live
episode waits for one. Then it forwards them in the order of the episodes' names, so that timing
does not influence batching. `SequentialSampler` forwards them one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from crl.protocols import Engine
from crl.types import Completion, Sampling


class Sampler(Protocol):
    """Access of episodes to an engine.

    Episodes call `join` before any of them runs, `generate` while they run, and `leave` at the end.
    """

    def join(self, session: str) -> None: ...
    def leave(self, session: str) -> None: ...
    async def wait_turn(self, session: str) -> None:
        """Return when this episode may perform an ordered operation, for example a search."""
        ...

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, session: str, rng: int | None
    ) -> Completion: ...


class DirectSampler:
    """`Sampler` that forwards every request to the engine immediately."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def join(self, session: str) -> None:
        """Do nothing: episodes do not wait for each other."""

    def leave(self, session: str) -> None:
        """Do nothing: episodes do not wait for each other."""

    async def wait_turn(self, session: str) -> None:
        """Do nothing: episodes do not wait for each other."""

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, session: str, rng: int | None
    ) -> Completion:
        return await self._engine.generate(ids, sampling, session=session, rng=rng)


class LockstepSampler:
    """`Sampler` that holds requests and searches until all live episodes wait for one.

    A wave is then released as a whole, in the order of the sessions' names.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._live: set[str] = set()
        self._waiting: dict[str, asyncio.Future[None]] = {}

    def join(self, session: str) -> None:
        self._live.add(session)

    def leave(self, session: str) -> None:
        self._live.discard(session)
        self._waiting.pop(session, None)
        self._release_soon()

    async def wait_turn(self, session: str) -> None:
        turn = self._waiting[session] = asyncio.get_running_loop().create_future()
        self._release_soon()
        await turn

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, session: str, rng: int | None
    ) -> Completion:
        await self.wait_turn(session)
        return await self._engine.generate(ids, sampling, session=session, rng=rng)

    def _release_soon(self) -> None:
        """Schedule the release of a wave.

        The release is not immediate: the last episode must first wait for its turn like the others.
        """
        asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        if set(self._waiting) != self._live:
            return
        wave, self._waiting = sorted(self._waiting.items()), {}
        for _, turn in wave:
            if not turn.cancelled():
                turn.set_result(None)  # episodes wake up in this order


class SequentialSampler(LockstepSampler):
    """`LockstepSampler` whose completions do not depend on the other episodes.

    One request is in the engine at a time, and every request reads its whole prompt. The last bits
    of the logits therefore do not depend on the number or the progress of other episodes: forward
    passes of different shapes round differently, and so do reused keys and values.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._turn = asyncio.Lock()

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, session: str, rng: int | None
    ) -> Completion:
        await self.wait_turn(session)
        async with self._turn:
            return await self._engine.generate(ids, sampling, session=None, rng=rng)

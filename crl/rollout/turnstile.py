"""Many episodes are answered at once, and each then computes for a moment: it tokenises, renders, records."""

from __future__ import annotations

import asyncio


class Turnstile:
    """Lets coroutines through one by one, in the order in which they came, each in a round of the event loop of its own: what they compute
    until they await again delays everything else by one of them, and not by all."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def passed(self) -> None:
        async with self._lock:
            await asyncio.sleep(0)

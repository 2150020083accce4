"""Fair distribution of event-loop time between episodes that are answered at the same time.

After an answer, every episode computes for a short time: it tokenises, renders and records.
"""

from __future__ import annotations

import asyncio


class Turnstile:
    """Gate that coroutines pass one by one, in order of arrival.

    Each coroutine passes in a separate round of the event loop. Other work is therefore delayed by
    the computation of one coroutine, not of all of them.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def pass_through(self) -> None:
        """Wait for the caller's turn."""
        async with self._lock:
            await asyncio.sleep(0)

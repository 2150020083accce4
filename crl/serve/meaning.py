"""Search of banks by meaning, on a thread of its own.

The embedder is that of the run. It is opened at the first search, and kept until a search needs
another one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from contextlib import AsyncExitStack
from pathlib import Path

from crl.config.schema import EmbedderSection
from crl.embedders import open_embedder
from crl.errors import ConfigError
from crl.manager.inspection.reading import open_reader
from crl.protocols import Embedder
from crl.report.search import embedder_of, similarities

MAX_EMBEDDED = 500_000
"""Maximum number of characters of the experiences of a bank without vectors, which are embedded."""

SEARCH_S = 60.0
"""Maximum number of seconds of a search, including the opening of the embedder."""

REMEDY = "Search by words, or with crl bank search"


class MeaningSearch:
    """Searcher with one embedder at a time. One search runs at a time; others wait."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._opened: tuple[EmbedderSection, Embedder] | None = None

    async def search(self, text: str, bank: Path, uids: Collection[str]) -> list[tuple[str, float]]:
        """Return the active entries among `uids` with their cosine similarities, highest first.

        Raise `ConfigError` or `EngineError` if the embedder is not available or does not fit to the
        bank, and `TimeoutError` after `SEARCH_S`. A package of an embedder may raise other errors.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # The end of the process does not wait for the search of a daemon thread.
            threading.Thread(target=self._run, args=(self._loop,), daemon=True).start()
        work = asyncio.run_coroutine_threadsafe(
            self._search(text, bank, frozenset(uids)), self._loop
        )
        return await asyncio.wait_for(asyncio.wrap_future(work), SEARCH_S)

    def close(self) -> None:
        """Close the embedder in the background, after a search that is still running."""
        if self._loop:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        loop.run_until_complete(self._stack.aclose())
        loop.close()

    async def _search(self, text: str, bank: Path, uids: frozenset[str]) -> list[tuple[str, float]]:
        async with self._lock:
            with open_reader(bank) as reader:
                keys = reader.keys()
                entries = [entry for entry in reader.entries() if entry.uid in uids]
            if keys.name is None and sum(len(entry.text) for entry in entries) > MAX_EMBEDDED:
                reason = "it has no vectors yet, and too much text to embed it for one search"
                remedy = "Choose fewer experiences with the filters, or search with crl bank search"
                raise ConfigError("bank", str(bank), reason, remedy)
            embedder = await self._embedder(embedder_of(bank, keys))
            found = await similarities(text, entries, keys, embedder)
        pairs = zip(entries, found, strict=True)
        return sorted(((e.uid, cosine) for e, cosine in pairs), key=lambda pair: -pair[1])

    async def _embedder(self, section: EmbedderSection) -> Embedder:
        if section.is_url:  # the config of a run must not choose where an API key is sent
            reason = "the server sends no texts and no API keys to endpoints"
            raise ConfigError("embedder.model", section.model, reason, REMEDY)
        if section.kind == "vllm":
            reason = "this embedder runs in an engine of its own, which the server does not start"
            raise ConfigError("embedder.kind", "vllm", reason, REMEDY)
        # The run may need the whole GPU and all other cores.
        section = section.model_copy(update={"device": "cpu", "threads": 1})
        if self._opened is None or self._opened[0] != section:
            self._opened = None
            await self._stack.aclose()
            self._stack = AsyncExitStack()
            embedder = await self._stack.enter_async_context(open_embedder(section))
            self._opened = section, embedder
        return self._opened[1]

"""Cache of any embedder's vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from crl.errors import EngineError
from crl.protocols import Embedder


class CachedEmbedder:
    """`crl.protocols.Embedder` that caches the vectors of the `size` most recently used texts.

    A text is never requested from `embedder` twice at the same time. `misses` counts the texts that
    were passed to `embedder`. `hits` counts all others, including duplicates within one call and
    texts whose request is in progress. Raise `ValueError` if `size` is below 1.
    """

    def __init__(self, embedder: Embedder, size: int) -> None:
        if size < 1:
            raise ValueError(f"the size of the cache must be at least one text, not {size}")
        self.name, self.dim = embedder.name, embedder.dim
        self.hits = self.misses = 0
        self._embedder, self._size = embedder, size
        self._vectors: dict[str, NDArray[np.float32]] = {}  # the most recently used last
        self._pending: dict[str, asyncio.Task[dict[str, NDArray[np.float32]]]] = {}

    @property
    def hit_rate(self) -> float:
        """Share of hits among all texts so far; 0 before the first text."""
        return self.hits / max(self.hits + self.misses, 1)

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings: float32 [len(texts), dim], unit norm.

        Raise `EngineError` if the vectors of `embedder` have the wrong shape or are not finite.
        Errors of `embedder` are raised too.
        """
        found = {text: self._vectors[text] for text in texts if text in self._vectors}
        missing = dict.fromkeys(text for text in texts if text not in found)
        to_fetch = [text for text in missing if text not in self._pending]
        self.misses += len(to_fetch)
        self.hits += len(texts) - len(to_fetch)
        if to_fetch:
            # In a separate task: others may wait for these texts after this caller is cancelled.
            self._pending |= dict.fromkeys(to_fetch, asyncio.create_task(self._fetch(to_fetch)))
        for pending in dict.fromkeys(self._pending[text] for text in missing):
            fetched = await asyncio.shield(pending)
            found |= {text: vector for text, vector in fetched.items() if text in missing}
        self._store(found)
        return (
            np.stack([found[text] for text in texts])
            if texts
            else np.zeros((0, self.dim), np.float32)
        )

    async def _fetch(self, texts: list[str]) -> dict[str, NDArray[np.float32]]:
        try:
            vectors = await self._embedder.embed(texts)
        finally:
            for text in texts:
                del self._pending[text]
        if vectors.shape != (len(texts), self.dim) or not np.isfinite(vectors).all():
            raise EngineError(
                f"embedder {self.name}: the vectors of {len(texts)} texts do not all consist of "
                f"{self.dim} finite numbers"
            )
        by_text = dict(zip(texts, map(np.array, vectors), strict=True))
        self._store(by_text)
        return by_text

    def _store(self, vectors: Mapping[str, NDArray[np.float32]]) -> None:
        for text, vector in vectors.items():
            self._vectors.pop(text, None)
            self._vectors[text] = vector
        while len(self._vectors) > self._size:
            del self._vectors[next(iter(self._vectors))]

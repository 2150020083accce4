"""An embedder that needs no model, and a cache in front of any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crl.protocols import Embedder


class HashEmbedder:
    """`crl.protocols.Embedder`: hashed character n-grams (2 to 4, within words). Stateless, the same on every machine.

    It tells texts apart by their wording, not by their meaning: right for templated lessons and named places, a stand-in
    for everything else.
    """

    def __init__(self, dim: int = 384) -> None:
        from sklearn.feature_extraction.text import HashingVectorizer  # a second of imports that only this class needs

        self.name, self.dim = f"hash-char_wb-2-4-{dim}", dim
        self._vectorizer: Any = HashingVectorizer(analyzer="char_wb", ngram_range=(2, 4), n_features=dim, norm="l2")

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """float32 [len(texts), dim], unit norm; texts without any n-gram share one arbitrary direction."""
        if not texts:
            return np.zeros((0, self.dim), np.float32)
        vectors = self._vectorizer.transform(texts).toarray().astype(np.float32)
        vectors[~vectors.any(axis=1), 0] = 1.0
        return vectors


class CachedEmbedder:
    """`crl.protocols.Embedder` that remembers the vectors of the `size` texts that were asked for last.

    misses: texts that went to `embedder`; hits: all others, duplicates in one call among them.
    """

    def __init__(self, embedder: Embedder, size: int) -> None:
        if size < 1:
            raise ValueError(f"a cache holds at least one text, not {size}")
        self.name, self.dim = embedder.name, embedder.dim
        self.hits = self.misses = 0
        self._embedder, self._size = embedder, size
        self._vectors: dict[str, NDArray[np.float32]] = {}  # the last asked for last

    @property
    def hit_rate(self) -> float:
        """Share of the texts so far that were remembered; 0 before the first."""
        return self.hits / max(self.hits + self.misses, 1)

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """float32 [len(texts), dim], unit norm."""
        found = {text: self._vectors[text] for text in texts if text in self._vectors}
        unknown = [text for text in dict.fromkeys(texts) if text not in found]
        self.misses += len(unknown)
        self.hits += len(texts) - len(unknown)
        if unknown:
            found.update(zip(unknown, map(np.array, await self._embedder.embed(unknown)), strict=True))
        for text, vector in found.items():
            self._vectors.pop(text, None)
            self._vectors[text] = vector
        while len(self._vectors) > self._size:
            del self._vectors[next(iter(self._vectors))]
        return np.stack([found[text] for text in texts]) if texts else np.zeros((0, self.dim), np.float32)

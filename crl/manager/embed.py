"""An embedder that needs no model, a cache in front of any, and what entries are found by."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crl.errors import EngineError
from crl.protocols import Embedder


class HashEmbedder:
    """`crl.protocols.Embedder`: hashed character n-grams (2 to 4, within words). Stateless, the same on every machine.

    It tells texts apart by their wording, not by their meaning: right for templated lessons and named places, a stand-in
    for everything else.
    """

    def __init__(self, dim: int = 384) -> None:
        from sklearn.feature_extraction.text import (
            HashingVectorizer,
        )  # a second of imports that only this class needs

        self.name, self.dim = f"hash-char_wb-2-4-{dim}", dim
        self._vectorizer: Any = HashingVectorizer(
            analyzer="char_wb", ngram_range=(2, 4), n_features=dim, norm="l2"
        )

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """float32 [len(texts), dim], unit norm; texts without any n-gram share one arbitrary direction."""
        if not texts:
            return np.zeros((0, self.dim), np.float32)
        vectors = self._vectorizer.transform(texts).toarray().astype(np.float32)
        vectors[~vectors.any(axis=1), 0] = 1.0
        return vectors


class CachedEmbedder:
    """`crl.protocols.Embedder` that remembers the vectors of the `size` texts that were asked for last, and asks for no text twice at
    the same time.

    misses: texts that went to `embedder`; hits: all others, duplicates in one call and those on their way among them.
    """

    def __init__(self, embedder: Embedder, size: int) -> None:
        if size < 1:
            raise ValueError(f"a cache holds at least one text, not {size}")
        self.name, self.dim = embedder.name, embedder.dim
        self.hits = self.misses = 0
        self._embedder, self._size = embedder, size
        self._vectors: dict[str, NDArray[np.float32]] = {}  # the last asked for last
        self._coming: dict[str, asyncio.Task[dict[str, NDArray[np.float32]]]] = {}

    @property
    def hit_rate(self) -> float:
        """Share of the texts so far that were remembered; 0 before the first."""
        return self.hits / max(self.hits + self.misses, 1)

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """float32 [len(texts), dim], unit norm. Raises `EngineError` for vectors that cannot be compared, beside what `embedder` raises."""
        found = {text: self._vectors[text] for text in texts if text in self._vectors}
        missing = dict.fromkeys(text for text in texts if text not in found)
        unknown = [text for text in missing if text not in self._coming]
        self.misses += len(unknown)
        self.hits += len(texts) - len(unknown)
        if unknown:
            # A task of its own: others may be waiting for these texts when this caller is cancelled.
            self._coming |= dict.fromkeys(unknown, asyncio.create_task(self._fetch(unknown)))
        for coming in [self._coming[text] for text in missing]:
            fetched = await asyncio.shield(coming)
            found |= {text: fetched[text] for text in missing if text in fetched}
        self._remember(found)
        return (
            np.stack([found[text] for text in texts])
            if texts
            else np.zeros((0, self.dim), np.float32)
        )

    async def _fetch(self, texts: list[str]) -> dict[str, NDArray[np.float32]]:
        try:
            made = await self._embedder.embed(texts)
        finally:
            for text in texts:
                del self._coming[text]
        if made.shape != (len(texts), self.dim) or not np.isfinite(made).all():
            raise EngineError(
                f"embedder {self.name}: its vectors of {len(texts)} texts are not each of {self.dim} finite numbers"
            )
        vectors = dict(zip(texts, map(np.array, made), strict=True))
        self._remember(vectors)
        return vectors

    def _remember(self, vectors: Mapping[str, NDArray[np.float32]]) -> None:
        for text, vector in vectors.items():
            self._vectors.pop(text, None)
            self._vectors[text] = vector
        while len(self._vectors) > self._size:
            del self._vectors[next(iter(self._vectors))]


class Keys:
    """What entries are found by: unit(embed(goal) + text_weight·embed(text)); **ours**. None = embed(text) alone, as in the paper.

    For a weight w < 1 a key's cosine to its own goal is at least √(1 − w²), whatever the text. Raises `ValueError` below 0.
    """

    def __init__(self, embedder: Embedder, text_weight: float | None) -> None:
        if text_weight is not None and not text_weight >= 0:
            raise ValueError(f"text_weight must not be negative, not {text_weight}")
        self._embedder, self._weight = embedder, text_weight

    @property
    def name(self) -> str:
        """How they are made; vectors of another name do not compare with them."""
        return (
            self._embedder.name
            if self._weight is None
            else f"{self._embedder.name}: goal + {self._weight} text"
        )

    async def embed(self, entries: Sequence[tuple[str, str]]) -> NDArray[np.float32]:
        """The keys of (goal, text) pairs: float32 [len(entries), dim], unit norm."""
        if not entries:
            return np.zeros((0, self._embedder.dim), np.float32)
        texts = await self._embedder.embed([text for _, text in entries])
        if self._weight is None:
            return texts
        keys = await self._embedder.embed([goal for goal, _ in entries]) + self._weight * texts
        return keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), 1e-12)

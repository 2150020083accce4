"""Embedders that need no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


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

"""Embedder without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crl.embedders.parts import embed_in_parts


class HashEmbedder:
    """`crl.protocols.Embedder` of hashed character n-grams (length 2 to 4, within words).

    It has no state and gives the same vectors on every machine. It compares the wording of texts,
    not their meaning. This suits lessons from templates and named places; for other texts it is
    only a substitute.
    """

    def __init__(self, dim: int = 384) -> None:
        # These imports take a second, and only this class needs them.
        from sklearn.feature_extraction import FeatureHasher
        from sklearn.feature_extraction.text import HashingVectorizer

        self.name, self.dim = f"hash-char_wb-2-4-{dim}", dim
        vectorizer: Any = HashingVectorizer(analyzer="char_wb", ngram_range=(2, 4))
        self._n_grams: Callable[[str], list[str]] = vectorizer.build_analyzer()
        self._hasher: Any = FeatureHasher(dim, input_type="string")

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings: float32 [len(texts), dim], unit norm.

        All texts without any n-gram have the same arbitrary vector.
        """
        return await embed_in_parts(texts, self.dim, self._embed)

    def _embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        counts = self._hasher.transform(map(self._n_grams, texts)).toarray()  # signed, float64
        counts[~counts.any(axis=1), 0] = 1.0
        return (counts / np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)

"""Embedder without a model."""

from __future__ import annotations

from collections.abc import Sequence
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
        from sklearn.feature_extraction.text import (
            HashingVectorizer,
        )  # this import takes a second, and only this class needs it

        self.name, self.dim = f"hash-char_wb-2-4-{dim}", dim
        self._vectorizer: Any = HashingVectorizer(
            analyzer="char_wb", ngram_range=(2, 4), n_features=dim, norm="l2"
        )

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings: float32 [len(texts), dim], unit norm.

        All texts without any n-gram have the same arbitrary vector.
        """
        return await embed_in_parts(texts, self.dim, self._embed)

    def _embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = self._vectorizer.transform(texts).toarray().astype(np.float32)
        vectors[~vectors.any(axis=1), 0] = 1.0
        return vectors

"""BM25 over stemmed words, for the searches of environments."""

from __future__ import annotations

import os
from collections.abc import Sequence

# bm25s imports JAX if it is installed, and JAX would reserve three quarters of a GPU's memory.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import bm25s
import numpy as np
import Stemmer


class Bm25:
    """Index of texts, with Lucene's formula and Pyserini's parameters.

    It is immutable, and may be used from any thread.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._bm25 = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
        self._bm25.index(_words(texts), show_progress=False)

    def scores(self, query: str) -> np.ndarray | None:
        """Return the score [n] of each text, 0 for a text without any word of the query.

        None if no text has one.
        """
        (words,) = _words([query])
        indexed = [word for word in words if word in self._bm25.vocab_dict]
        return self._bm25.get_scores(indexed) if indexed else None


def _words(texts: Sequence[str]) -> list[list[str]]:
    stemmer = Stemmer.Stemmer("porter")  # not safe to share between threads
    return bm25s.tokenize(
        list(texts), stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False
    )  # type: ignore[return-value]

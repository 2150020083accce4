"""Retrievers of documents in this process: BM25, and dense vectors with exact search.

A retriever is immutable and shared by all games of the process, from any thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from crl.envs.base import EmbedTexts
from crl.envs.bm25 import Bm25
from crl.envs.search_qa.questions import Document

logger = logging.getLogger(__name__)

_CHUNK = 1024
"""Documents that are embedded between two reports."""


class Retriever(Protocol):
    """Search for documents."""

    def search(self, query: str, n: int) -> list[Document]:
        """Return at most n documents, best first.

        Raise `RolloutError` if the search fails, `TransientError` if a retry may help.
        """
        ...


class BM25Retriever:
    """`Retriever` by BM25 over stemmed words."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = tuple(documents)
        self._bm25 = Bm25([document.contents for document in documents])

    def search(self, query: str, n: int) -> list[Document]:
        """Return the documents that contain any word of the query.

        Documents with equal scores are in the corpus's order.
        """
        scores = self._bm25.scores(query)
        if scores is None:
            return []
        return [self._documents[i] for i in _best(scores, n) if scores[i] > 0]


class DenseRetriever:
    """`Retriever` by the inner product of embeddings, compared with every document.

    The prefixes precede the embedded texts. E5 needs `query: ` and `passage: `.
    """

    def __init__(
        self, documents: Sequence[Document], embed: EmbedTexts, *, query_prefix: str = "",
        document_prefix: str = "",
    ) -> None:  # fmt: skip
        self._documents = tuple(documents)
        self._embed, self._query_prefix = embed, query_prefix
        parts = []
        for start in range(0, len(self._documents), _CHUNK):
            part = self._documents[start : start + _CHUNK]
            parts.append(embed([document_prefix + document.contents for document in part]))
            if len(self._documents) > 10 * _CHUNK:
                logger.info("embedded %d of %d documents", start + len(part), len(self._documents))
        self._vectors = np.concatenate(parts)

    def search(self, query: str, n: int) -> list[Document]:
        scores = self._vectors @ self._embed([self._query_prefix + query])[0]
        return [self._documents[i] for i in _best(scores, n)]


def _best(scores: Any, n: int) -> list[int]:
    """Return the indices of the n highest scores, best first. Ties are in index order."""
    if n < len(scores):
        limit = np.partition(scores, -n)[-n]
        candidates = np.flatnonzero(scores >= limit)
    else:
        candidates = np.arange(len(scores))
    return candidates[np.argsort(-scores[candidates], kind="stable")][:n].tolist()

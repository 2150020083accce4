"""Search engine of the shop: BM25 over stemmed words, like the original's Lucene index."""

from __future__ import annotations

from collections.abc import Sequence

import bm25s
import numpy as np
import Stemmer

from crl.envs.webshop.catalogue import Product

MAX_RESULTS = 50
"""Maximum number of products that a search returns."""


class SearchEngine:
    """Search engine of a catalogue. Immutable, and shared by all games from any thread."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = tuple(products)
        self._bm25 = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
        self._bm25.index(_words([_document(product) for product in products]), show_progress=False)

    def search(self, keywords: str) -> list[Product]:
        """Return the products that contain any of the keywords, best first, at most `MAX_RESULTS`.

        Products with equal scores are in the catalogue's order.
        """
        (words,) = _words([keywords])
        indexed = [word for word in words if word in self._bm25.vocab_dict]
        if not indexed:
            return []
        scores = self._bm25.get_scores(indexed)
        best = np.argsort(-scores, kind="stable")[:MAX_RESULTS]
        return [self._products[i] for i in best if scores[i] > 0]


def _document(product: Product) -> str:
    options = ", and ".join(
        f"{name}: {', '.join(values)}" for name, values in product["options"].items()
    )
    return " ".join(
        [product["Title"], product["Description"], *product["BulletPoints"][:1], options]
    ).lower()


def _words(texts: list[str]) -> list[list[str]]:
    stemmer = Stemmer.Stemmer("porter")  # not safe to share between threads
    return bm25s.tokenize(
        texts, stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False
    )  # type: ignore[return-value]

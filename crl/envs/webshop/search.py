"""Search engine of the shop: BM25 over stemmed words, like the original's Lucene index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from crl.envs.bm25 import Bm25
from crl.envs.webshop.catalogue import Product

MAX_RESULTS = 50
"""Maximum number of products that a search returns."""


class SearchEngine:
    """Search engine of a catalogue. Immutable, and shared by all games from any thread."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = tuple(products)
        self._bm25 = Bm25([_document(product) for product in products])

    def search(self, keywords: str) -> list[Product]:
        """Return the products that contain any of the keywords, best first, at most `MAX_RESULTS`.

        Products with equal scores are in the catalogue's order.
        """
        scores = self._bm25.scores(keywords)
        if scores is None:
            return []
        best = np.argsort(-scores, kind="stable")[:MAX_RESULTS]
        return [self._products[i] for i in best if scores[i] > 0]


def _document(product: Product) -> str:
    options = ", and ".join(
        f"{name}: {', '.join(values)}" for name, values in product["options"].items()
    )
    return " ".join(
        [product["Title"], product["Description"], *product["BulletPoints"][:1], options]
    ).lower()

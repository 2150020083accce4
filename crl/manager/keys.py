"""Keys of entries, which searches compare with queries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from crl.protocols import Embedder


class KeyEmbedder:
    """Keys of entries, which are compared with queries.

    A key is unit(embed(goal) + text_weight·embed(text)); **ours**. If `text_weight` is None, the
    key is embed(text), as in the paper. For a weight w < 1, the cosine of a key and its own goal is
    at least √(1 − w²) for any text. Raise `ValueError` for a negative weight.
    """

    def __init__(
        self, embedder: Embedder, text_weight: float | None, *, of_states: bool = False
    ) -> None:
        """Prepare keys. `of_states`: the texts are states of episodes, without the goal's key."""
        if text_weight is not None and not text_weight >= 0:
            raise ValueError(f"text_weight must not be negative, not {text_weight}")
        self._embedder, self._weight = embedder, None if of_states else text_weight
        self.of_states = of_states
        """True if the texts of keys are states of episodes (EMPO²), not those of entries."""

    @property
    def name(self) -> str:
        """Name of the embedder and the formula. Only vectors with equal names are comparable."""
        if self.of_states:
            return f"{self._embedder.name}: state"
        return (
            self._embedder.name
            if self._weight is None
            else f"{self._embedder.name}: goal + {self._weight} text"
        )

    async def embed(self, entries: Sequence[tuple[str, str]]) -> NDArray[np.float32]:
        """Return the keys of (goal, text) pairs: float32 [len(entries), dim], unit norm."""
        if not entries:
            return np.zeros((0, self._embedder.dim), np.float32)
        texts = await self._embedder.embed([text for _, text in entries])
        if self._weight is None:
            return texts
        keys = await self._embedder.embed([goal for goal, _ in entries]) + self._weight * texts
        return keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), 1e-12)

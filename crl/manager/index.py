"""Exact nearest neighbours: an immutable snapshot and a small tail behind it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]

TAIL = 256
"""Rows that the tail holds at least before it is folded into a new snapshot."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """similarity: the cosine of query and key, both of unit norm."""

    uid: str
    similarity: float


class ExactIndex:
    """Cosine top-k over unit vectors of `dim`. `put` and `remove` take effect at once.

    No row is changed in place: a new vector of an entry is a new row of the tail, and the old row is passed over until the
    next fold.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._snapshot = np.zeros((0, dim), np.float32)
        self._tail = np.empty((TAIL, dim), np.float32)
        self._uids: list[str] = []  # of every row: the snapshot's, then the tail's
        self._alive = np.zeros(TAIL, bool)
        self._rows: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, uid: str, vector: Vector) -> None:
        """Adds `uid`, or gives it another vector. Raises `ValueError` for a vector of another size."""
        if vector.shape != (self.dim,):
            raise ValueError(f"a vector of shape {vector.shape} does not fit an index of dimension {self.dim}")
        self.remove(uid)
        if len(self._uids) == len(self._alive):
            self._fold()
        row = len(self._uids)
        self._tail[row - len(self._snapshot)] = vector
        self._uids.append(uid)
        self._alive[row] = True
        self._rows[uid] = row

    def remove(self, uid: str) -> None:
        """Forgets `uid`; not an error when it is not there."""
        row = self._rows.pop(uid, None)
        if row is not None:
            self._alive[row] = False

    def nearest(self, query: Vector, k: int) -> list[Neighbour]:
        """At most `k` neighbours, the most similar first; equals in the order in which they were put."""
        used = len(self._uids)
        # One matrix-vector product a query: in a larger product the last bits would depend on who else asks.
        scores = np.concatenate([self._snapshot @ query, self._tail[: used - len(self._snapshot)] @ query])
        rows = np.flatnonzero(self._alive[:used])
        if len(rows) > k:
            # All that are as good as the k-th best stay for the sort, so that equals are cut by age and not by chance.
            bound = np.partition(scores[rows], len(rows) - k)[len(rows) - k]
            rows = rows[scores[rows] >= bound]
        best = rows[np.argsort(-scores[rows], kind="stable")][:k]
        return [Neighbour(self._uids[row], float(scores[row])) for row in best]

    def _fold(self) -> None:
        """Makes the next snapshot out of the live rows. The tail grows with it: a fold costs each put a constant."""
        live = np.flatnonzero(self._alive[: len(self._uids)])
        self._snapshot = np.concatenate([self._snapshot, self._tail])[live]
        self._uids = [self._uids[row] for row in live]
        self._rows = {uid: row for row, uid in enumerate(self._uids)}
        self._tail = np.empty((max(TAIL, len(live) // 4), self.dim), np.float32)
        self._alive = np.zeros(len(live) + len(self._tail), bool)
        self._alive[: len(live)] = True

"""Filter for adds that repeat an active experience. **Ours**.

It is only active with `bank.duplicate_similarity`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from crl.manager.records import Distilled, Entry, Write
from crl.manager.retrieval.choice import SIMILARITY_TOLERANCE
from crl.manager.retrieval.entries import Bank
from crl.protocols import Embedder
from crl.types import Task

Vector = NDArray[np.float32]

MAX_CACHED_TEXTS = 16384
"""Number of texts whose vectors are cached.

This is far more than the number of texts that the answers in flight are compared with.
"""


class DuplicateFilter:
    """Filter for near duplicates of active experiences.

    * min_cosine: cosine of two texts at or above which an add is dropped.
    * with_goals: True if the goal is part of an experience's key. Then, only experiences with the
      same goal are compared, and their texts are embedded for it, because their keys are similar.

    An add is compared only with the entries that `Bank.nearest` returns for its task, so
    experiences that no query can retrieve together are never compared.
    """

    def __init__(
        self, bank: Bank, embedder: Embedder, min_cosine: float, *, with_goals: bool
    ) -> None:
        self._bank, self._embedder, self._min_cosine, self._with_goals = (
            bank,
            embedder,
            min_cosine - SIMILARITY_TOLERANCE,
            with_goals,
        )
        self._vectors: dict[str, Vector] = {}  # by text, the most recently used last

    async def prepare(self, distilled: Distilled) -> None:
        """Embed the texts that `without_duplicates` will compare, as far as they are known now.

        Other texts are embedded when the answers that write them are prepared.
        """
        if self._with_goals:
            near = [
                entry.text
                for write in distilled.writes
                for entry in self._near(write, distilled.request.task)
            ]
            await self._embed(
                list(dict.fromkeys([*near, *(write.text for write in distilled.writes)]))
            )

    def without_duplicates(self, distilled: Distilled) -> Distilled:
        """Return `distilled` without near-duplicate adds.

        An add is dropped if its text is nearly equal to the text of an active entry or of an
        earlier write of the same answer. The result is valid for the current state of the bank in
        memory, so it must be applied before any other change. With goals in the keys, entries that
        a merge has written since `prepare` are not compared.
        """
        novel: list[Write] = []
        earlier: list[Vector] = []
        for write in distilled.writes:
            vector = self._vectors.get(write.text) if self._with_goals else write.vector
            near = (
                []
                if vector is None
                else self._similarities(write, vector, distilled.request.task, earlier)
            )
            if write.targets or max(near, default=-1.0) < self._min_cosine:
                novel.append(write)
                earlier += [] if vector is None else [vector]
        return replace(
            distilled, writes=tuple(novel), duplicates=len(distilled.writes) - len(novel)
        )

    def _similarities(
        self, write: Write, vector: Vector, task: Task, earlier: Sequence[Vector]
    ) -> list[float]:
        if self._with_goals:
            others = [
                self._vectors[entry.text]
                for entry in self._near(write, task)
                if entry.text in self._vectors
            ]
            similarities = [float(other @ vector) for other in others]
        else:
            similarities = [
                neighbour.similarity for neighbour in self._bank.nearest(task, write.vector)
            ]
        return similarities + [float(other @ vector) for other in earlier]

    def _near(self, write: Write, task: Task) -> list[Entry]:
        """Return the entries near the write that have the goal of the task."""
        entries = [
            self._bank.entries[neighbour.uid]
            for neighbour in self._bank.nearest(task, write.vector)
        ]
        return [entry for entry in entries if entry.goal == task.goal]

    async def _embed(self, texts: Sequence[str]) -> None:
        cached = {text: self._vectors[text] for text in texts if text in self._vectors}
        missing = [text for text in texts if text not in cached]
        new = (
            dict(zip(missing, await self._embedder.embed(missing), strict=True)) if missing else {}
        )
        for text, vector in (cached | new).items():
            self._vectors.pop(text, None)
            self._vectors[text] = vector
        while len(self._vectors) > MAX_CACHED_TEXTS:
            del self._vectors[next(iter(self._vectors))]

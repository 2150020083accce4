"""Leaves out adds that say what an active experience says already. **Ours**; off unless `bank.duplicate` is set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from crl.manager.bank import Bank
from crl.manager.records import Distilled, Entry, Write
from crl.manager.retrieval import EQUAL
from crl.protocols import Embedder
from crl.types import Task

Vector = NDArray[np.float32]

TEXTS = 16384
"""Texts whose vectors are remembered; far more than the answers on their way are compared with."""


class DuplicateFilter:
    """least: cosine of two texts from which on they say the same; with_goals: the goal is part of what an experience is found by, so that
    only those of one goal are compared, and by their own texts, since their keys are alike.

    Experiences that no query can find together are never compared; those that can are among the nearest.
    """

    def __init__(self, bank: Bank, embedder: Embedder, least: float, *, with_goals: bool) -> None:
        self._bank, self._embedder, self._least, self._with_goals = (
            bank,
            embedder,
            least - EQUAL,
            with_goals,
        )
        self._vectors: dict[str, Vector] = {}  # of texts; the last asked for last

    async def prepare(self, distilled: Distilled) -> None:
        """Embeds what `novel` will compare, as far as it is known now; the rest comes with the answers that write it."""
        if self._with_goals:
            near = [
                entry.text
                for write in distilled.writes
                for entry in self._near(write, distilled.request.task)
            ]
            await self._embed(
                list(dict.fromkeys([*near, *(write.text for write in distilled.writes)]))
            )

    def novel(self, distilled: Distilled) -> Distilled:
        """Without the adds whose text is nearly that of an active entry, or of what the same answer wrote before.

        It holds for the bank as it is in memory: nothing else may be applied until this is. What a merge wrote since `prepare` is not
        compared.
        """
        kept: list[Write] = []
        said: list[Vector] = []
        for write in distilled.writes:
            vector = self._vectors.get(write.text) if self._with_goals else write.vector
            near = (
                []
                if vector is None
                else self._similarities(write, vector, distilled.request.task, said)
            )
            if write.targets or max(near, default=-1.0) < self._least:
                kept.append(write)
                said += [] if vector is None else [vector]
        return replace(distilled, writes=tuple(kept), duplicates=len(distilled.writes) - len(kept))

    def _similarities(
        self, write: Write, vector: Vector, task: Task, said: Sequence[Vector]
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
                neighbour.similarity for neighbour in self._bank.nearest(task.name, write.vector)
            ]
        return similarities + [float(other @ vector) for other in said]

    def _near(self, write: Write, task: Task) -> list[Entry]:
        """Entries of the task's goal."""
        entries = [
            self._bank.entries[neighbour.uid]
            for neighbour in self._bank.nearest(task.name, write.vector)
        ]
        return [entry for entry in entries if entry.goal == task.goal]

    async def _embed(self, texts: Sequence[str]) -> None:
        known = {text: self._vectors[text] for text in texts if text in self._vectors}
        missing = [text for text in texts if text not in known]
        made = (
            dict(zip(missing, await self._embedder.embed(missing), strict=True)) if missing else {}
        )
        for text, vector in (known | made).items():
            self._vectors.pop(text, None)
            self._vectors[text] = vector
        while len(self._vectors) > TEXTS:
            del self._vectors[next(iter(self._vectors))]

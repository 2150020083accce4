"""The active entries in memory: what searches read. The store is the truth; this is its copy with an index per scope."""

from __future__ import annotations

import random
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from crl.manager.index import ExactIndex
from crl.manager.records import Entry, UnitKey
from crl.manager.retrieval import Candidate, RetrievalSettings, pick
from crl.protocols import Hit, SearchRequest
from crl.seeds import generator
from crl.types import ExperienceUse

Scope = Literal["task", "shared"]
Vector = NDArray[np.float32]

GROUPS = 4096
"""Groups whose pick is remembered for members that ask later; far more than are ever in flight."""


class Bank:
    """dim: of the vectors; scope: entries guide their own task alone, or any; seed: of the draws that decide ties.

    No method awaits: what is put is seen whole by the next search, and a search never waits.
    """

    def __init__(self, dim: int, scope: Scope, settings: RetrievalSettings, seed: int) -> None:
        self.entries: dict[str, Entry] = {}  # the last written last
        self._indexes: dict[str, ExactIndex] = {}
        self._dim, self._scope, self._settings, self._seed = dim, scope, settings, seed
        self._picks: dict[tuple[str, int], Hit | None] = {}
        self._counts: dict[UnitKey, tuple[int, int | None]] = {}

    def put(self, entry: Entry, vector: Vector) -> None:
        """Adds an entry or its next version. An older version than the one that is there changes nothing."""
        known = self.entries.get(entry.uid)
        if known is None or known.version < entry.version:
            self.entries.pop(entry.uid, None)
            self.entries[entry.uid] = entry
            self._indexes.setdefault(self._room(entry.task), ExactIndex(self._dim)).put(entry.uid, vector)

    def remove(self, uid: str) -> None:
        """The entry guides nobody any more; not an error when it is not there."""
        entry = self.entries.pop(uid, None)
        if entry is not None:
            self._indexes[self._room(entry.task)].remove(uid)

    def credit(self, unit: UnitKey, reward: float) -> None:
        """One more credited episode of the unit, if it is a current version."""
        entry = self.entries.get(unit.uid)
        if entry is not None and entry.version == unit.version:
            entry.credited += 1
            entry.credit += reward

    def search(self, request: SearchRequest, query: Vector, step: int, *, counted: bool) -> Hit | None:
        """The experience for one episode, counted at once, so that the next search sees it as retrieved.

        With `per = "group"` the members of a group get what the first of them got, and it counts once. counted = False leaves
        no trace: it neither counts nor remembers.
        """
        group = (request.task.name, request.group)
        shared = self._settings.per == "group"
        if shared and counted and group in self._picks:
            return self._picks[group]
        address = (step, request.group) if shared else (step, request.group, request.member)
        entry = self._pick(request.task.name, query, step, generator(self._seed, "retrieval", *address))
        hit = Hit(entry.text, ExperienceUse(entry.uid, entry.version, entry.generation, "start"), entry.goal) if entry else None
        if counted:
            if entry:
                entry.retrieved += 1
                entry.last_returned_step = step
                self._counts[entry.unit] = (entry.retrieved, step)
            if shared:
                self._remember(group, hit)
        return hit

    def take_counts(self) -> dict[UnitKey, tuple[int, int | None]]:
        """(retrieved, last_returned_step) of the units that were returned since the last call."""
        counts, self._counts = self._counts, {}
        return counts

    def _pick(self, task: str, query: Vector, step: int, rng: random.Random) -> Entry | None:
        index = self._indexes.get(self._room(task))
        if index is None:
            return None
        neighbours = index.nearest(query, self._settings.candidates)
        candidates = [Candidate(self.entries[neighbour.uid], neighbour.similarity) for neighbour in neighbours]
        return pick(candidates, step, rng, self._settings)

    def _remember(self, group: tuple[str, int], hit: Hit | None) -> None:
        self._picks[group] = hit
        if len(self._picks) > GROUPS:
            del self._picks[next(iter(self._picks))]

    def _room(self, task: str) -> str:
        return task if self._scope == "task" else ""

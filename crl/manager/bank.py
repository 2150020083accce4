"""The active entries in memory: what searches read. The store is the truth; this is its copy with an index per scope."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from crl.manager.index import Index, Neighbour
from crl.manager.records import Entry, UnitKey
from crl.manager.retrieval import Candidate, RetrievalSettings, is_trial, pick
from crl.protocols import Hit, SearchRequest
from crl.seeds import generator
from crl.types import ExperienceUse, Lift, UseKind

Scope = Literal["task", "shared"]
Vector = NDArray[np.float32]

GROUPS = 4096
"""Groups whose pick is remembered for members that ask later; far more than are ever in flight."""


class Bank:
    """dim: of the vectors; scope: entries guide their own task alone, or any; seed: of the draws that decide ties.

    No method awaits. What is put is seen whole by the next search. `nearest` alone may be called on other threads, while nothing is
    put or removed.
    """

    def __init__(self, dim: int, scope: Scope, settings: RetrievalSettings, seed: int) -> None:
        self.entries: dict[str, Entry] = {}  # the last written last
        self._indexes: dict[str, Index] = {}
        self._dim, self._scope, self._settings, self._seed = dim, scope, settings, seed
        self._picks: dict[tuple[str, int], Hit | None] = {}  # with per = "group" alone
        self._counts: dict[UnitKey, tuple[int, int | None]] = {}

    def put(self, entry: Entry, vector: Vector) -> None:
        """Adds an entry or its next version. An older version than the one that is there changes nothing."""
        known = self.entries.get(entry.uid)
        if known is None or known.version < entry.version:
            self.entries.pop(entry.uid, None)
            self.entries[entry.uid] = entry
            self._indexes.setdefault(
                self._room(entry.task), Index(self._dim, exact=self._settings.exact)
            ).put(entry.uid, vector)

    def remove(self, uid: str) -> None:
        """The entry guides nobody any more; not an error when it is not there."""
        entry = self.entries.pop(uid, None)
        if entry is not None:
            self._indexes[self._room(entry.task)].remove(uid)

    def credit(self, unit: UnitKey, reward: float) -> None:
        """One more credited episode of the unit, if it is a current version."""
        if entry := self._current(unit):
            entry.credited += 1
            entry.credit += reward

    def lift(self, unit: UnitKey, lift: Lift) -> None:
        """Add a group's lift to the unit's, if it is a current version."""
        if entry := self._current(unit):
            entry.lift = entry.lift + lift if entry.lift else lift

    def vote(self, unit: UnitKey, value: int) -> None:
        """One more vote on the unit, if it is a current version."""
        if entry := self._current(unit):
            entry.votes += value

    def nearest(self, task: str, query: Vector) -> list[Neighbour]:
        """What `task` may be guided by, the most similar first: at most as many as are looked at."""
        index = self._indexes.get(self._room(task))
        return index.nearest(query, self._settings.candidates) if index else []

    def size(self, task: str) -> int:
        """Entries that `task` may be guided by."""
        return len(self._indexes.get(self._room(task), ()))

    def due(self) -> list[Index]:
        """The indexes whose next snapshot is to be built."""
        return [index for index in self._indexes.values() if index.due]

    def decided(self, request: SearchRequest, *, counted: bool) -> bool:
        """Whether a member of the request's group has searched before it, and its pick is shared."""
        return counted and not request.asked and (request.task.name, request.group) in self._picks

    def remembered(self, requests: Sequence[SearchRequest]) -> list[Hit | None] | None:
        """The picks that earlier members of the requests' groups made for all of them; None where one has to be made."""
        if any(request.asked for request in requests):
            return None
        try:
            return [self._picks[request.task.name, request.group] for request in requests]
        except KeyError:
            return None

    def search(
        self,
        request: SearchRequest,
        query: Vector,
        step: int,
        *,
        counted: bool,
        near: Sequence[Neighbour] | None = None,
    ) -> Hit | None:
        """The experience for one episode, counted at once, so that the next search sees it as retrieved.

        With `per = "group"` the members of a group get at their start what the first of them got, and it counts once. A question is
        answered to its member alone. counted = False leaves no trace: it neither counts nor remembers. near: what `nearest` finds, where
        it was asked before.
        """
        group = (request.task.name, request.group)
        if self.decided(request, counted=counted):
            return self._picks[group]
        shared = self._shared(request)
        address = (
            (step, request.group)
            if shared
            else (step, request.group, request.member, *([request.asked] if request.asked else []))
        )
        near = self.nearest(request.task.name, query) if near is None else near
        candidates = [Candidate(self.entries[uid], similarity) for uid, similarity in near]
        rng = partial(generator, self._seed, "retrieval", *address)
        trial = counted and not request.asked and self._is_trial(request)
        entry = pick(candidates, step, rng, self._settings, trial=trial)
        hit = _hit(entry, "ask_unrefined" if request.asked else "start") if entry else None
        if counted:
            if entry:
                entry.retrieved += 1
                entry.last_returned_step = step
                self._counts[entry.unit] = (entry.retrieved, step)
            if shared:
                self._remember(group, hit)
        return hit

    def _is_trial(self, request: SearchRequest) -> bool:
        """Return whether the search tries an entry. The members of a group share a phase, whenever they search."""
        share = self._settings.trials
        if not share:
            return False
        phase = generator(self._seed, "trials", request.task.name, request.group).random()
        return is_trial(0 if self._shared(request) else request.member, share, phase)

    def take_counts(self) -> dict[UnitKey, tuple[int, int | None]]:
        """(retrieved, last_returned_step) of the units that were returned since the last call."""
        counts, self._counts = self._counts, {}
        return counts

    def _current(self, unit: UnitKey) -> Entry | None:
        entry = self.entries.get(unit.uid)
        return entry if entry is not None and entry.version == unit.version else None

    def _remember(self, group: tuple[str, int], hit: Hit | None) -> None:
        self._picks[group] = hit
        if len(self._picks) > GROUPS:
            del self._picks[next(iter(self._picks))]

    def _shared(self, request: SearchRequest) -> bool:
        return self._settings.per == "group" and not request.asked

    def _room(self, task: str) -> str:
        return task if self._scope == "task" else ""


def _hit(entry: Entry, how: UseKind) -> Hit:
    return Hit(
        entry.text,
        ExperienceUse(entry.uid, entry.version, entry.generation, how),
        entry.goal,
        entry.record,
    )

"""Active entries in memory, for searches.

The store is authoritative. This is a copy of its active entries, with one index per variation, per
goal, per task or for all tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from crl.config.schema import GOAL_SCOPES, RetrievalSection, Scope
from crl.manager.records import Entry, UnitKey
from crl.manager.retrieval.choice import Candidate, choose_entries, is_trial
from crl.manager.retrieval.index import Accept, Index, Neighbour
from crl.protocols import Hit, SearchRequest
from crl.seeds import generator
from crl.types import MAX_OUTCOMES, ExperienceUse, Lift, Place, Task, UseKind

Vector = NDArray[np.float32]

MAX_STORED_CHOICES = 4096
"""Maximum number of groups whose choice of a shared entry is stored for later members.

This is far more than the number of groups in flight.
"""


class Bank:
    """In-memory copy of the active entries with their indexes.

    * dim: size of the vectors.
    * seed: seed of the draws that break ties and place trials.
    * exact: True if large banks are searched exactly. Results then do not depend on when an index
      was built.

    No method awaits, so a search sees a change either completely or not at all. Only `nearest` may
    be called on other threads, and only while no entry is put or removed.
    """

    def __init__(
        self, dim: int, scope: Scope, settings: RetrievalSection, seed: int, *, exact: bool = False
    ) -> None:
        self.entries: dict[str, Entry] = {}  # in the order in which they were last written
        self._indexes: dict[Place, Index] = {}
        self._dim, self._scope, self._settings, self._seed = dim, scope, settings, seed
        self._exact = exact
        self._group_choices: dict[tuple[str, int], Hit | None] = {}  # only with per = "group"
        self._unsaved_counts: dict[UnitKey, tuple[int, int | None]] = {}

    def put(self, entry: Entry, vector: Vector) -> None:
        """Add an entry or a newer version of it. Ignore a version that is not newer."""
        current = self.entries.get(entry.uid)
        if current is None or current.version < entry.version:
            self.entries.pop(entry.uid, None)
            self.entries[entry.uid] = entry
            self._indexes.setdefault(
                self._key_of_entry(entry), Index(self._dim, exact=self._exact)
            ).put(entry.uid, vector)

    def remove(self, uid: str) -> None:
        """Remove an entry, so that no search returns it. Do nothing if it is not in the bank."""
        entry = self.entries.pop(uid, None)
        if entry is not None:
            self._indexes[self._key_of_entry(entry)].remove(uid)

    def add_credit(self, unit: UnitKey, reward: float) -> None:
        """Add a credited episode to the unit if it is the current version of an entry."""
        if entry := self._current_entry(unit):
            counters = entry.counters
            entry.counters = replace(
                counters,
                credited=counters.credited + 1,
                credit=counters.credit + reward,
                outcomes=(*counters.outcomes, reward)[-MAX_OUTCOMES:],
            )

    def add_lift(self, unit: UnitKey, lift: Lift) -> None:
        """Add a group's lift to the unit's lift if it is the current version of an entry."""
        if entry := self._current_entry(unit):
            known = entry.counters.lift
            entry.counters = replace(entry.counters, lift=known + lift if known else lift)

    def add_vote(self, unit: UnitKey, value: int) -> None:
        """Add a vote to the unit if it is the current version of an entry."""
        if entry := self._current_entry(unit):
            entry.counters = replace(entry.counters, votes=entry.counters.votes + value)

    def nearest(self, task: Task, query: Vector, accept: Accept | None = None) -> list[Neighbour]:
        """Return the entries that may guide `task`, the most similar first.

        At most `retrieval.candidates` entries are returned. Entries that `accept` refuses are left
        out before this limit.
        """
        index = self._indexes.get(self._index_key(task.place))
        return index.nearest(query, self._settings.candidates, accept) if index else []

    def size(self, task: Task) -> int:
        """Return the number of entries that may guide `task`."""
        key = self._index_key(task.place)
        return len(self._indexes.get(key, ()))

    def indexes_to_rebuild(self) -> list[Index]:
        """Return the indexes whose next snapshot should be built now."""
        return [index for index in self._indexes.values() if index.needs_rebuild]

    def has_group_choice(self, request: SearchRequest, *, counted: bool) -> bool:
        """Return whether an earlier member of the group has already chosen the shared entry."""
        return (
            counted
            and not request.question
            and (request.task.name, request.group) in self._group_choices
        )

    def group_choices(self, requests: Sequence[SearchRequest]) -> list[Hit | None] | None:
        """Return the shared entries that earlier members of the requests' groups have chosen.

        Return None if at least one entry is still to be chosen.
        """
        if any(request.question for request in requests):
            return None
        try:
            return [self._group_choices[request.task.name, request.group] for request in requests]
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
        """Return the experience that guides one episode. See `search_several`."""
        hits = self.search_several(request, query, step, count=1, counted=counted, near=near)
        return hits[0] if hits else None

    def search_several(
        self,
        request: SearchRequest,
        query: Vector,
        step: int,
        *,
        count: int,
        counted: bool,
        near: Sequence[Neighbour] | None = None,
    ) -> list[Hit]:
        """Return at most `count` experiences that guide one episode, the best first.

        The retrievals are counted immediately, so the next search sees the updated counts.

        Entries that the episode has been shown are chosen like others and left out of the result.
        Ties are broken in the same way at all turns of an episode.

        With `per = "group"`, all members of a group get the same experience at their start: the one
        that the first of them got. It is counted once. A question is answered for its member alone.

        * step: completed actor steps.
        * counted: if False, the search is neither counted nor stored as the group's choice.
        * near: result of `nearest`, if it has been computed before.
        """
        group = (request.task.name, request.group)
        if self.has_group_choice(request, counted=counted):
            choice = self._group_choices[group]
            return [choice] if choice else []
        shared = self._is_shared(request)
        count = 1 if shared else count
        address = (
            (request.group,)
            if shared
            else (
                request.group,
                request.member,
                *([request.question] if request.question else []),
            )
        )
        near = self.nearest(request.task, query) if near is None else near
        candidates = [Candidate(self.entries[uid], similarity) for uid, similarity in near]
        rng = partial(generator, self._seed, "retrieval", *address)
        starts = not request.question and not request.turn
        trial = counted and starts and self._is_trial(request)
        chosen = choose_entries(candidates, step, rng, self._settings, count=count, trial=trial)
        entries = [entry for entry in chosen if entry.uid not in request.shown]
        hits = [_hit(e, "ask_unrefined" if request.question else "start") for e in entries]
        if counted:
            for entry in entries:
                self.count(entry.unit, step)
            if shared:
                self._store_choice(group, hits[0] if hits else None)
        return hits

    def count(self, unit: UnitKey, step: int) -> None:
        """Count a retrieval of the unit if it is the current version of an entry."""
        if entry := self._current_entry(unit):
            retrieved = entry.counters.retrieved + 1
            entry.counters = replace(entry.counters, retrieved=retrieved, last_returned_step=step)
            self._unsaved_counts[unit] = (retrieved, step)

    def _is_trial(self, request: SearchRequest) -> bool:
        """Return whether the search is a trial of a rarely retrieved entry.

        All members of a group have the same phase, regardless of when they search.
        """
        share = self._settings.trial_share
        if not share:
            return False
        phase = generator(self._seed, "trials", request.task.name, request.group).random()
        return is_trial(0 if self._is_shared(request) else request.member, share, phase)

    def take_counts(self) -> dict[UnitKey, tuple[int, int | None]]:
        """Return the counts of the units that were retrieved since the last call.

        The counts are (retrieved, last_returned_step) by unit.
        """
        counts, self._unsaved_counts = self._unsaved_counts, {}
        return counts

    def _current_entry(self, unit: UnitKey) -> Entry | None:
        entry = self.entries.get(unit.uid)
        return entry if entry is not None and entry.version == unit.version else None

    def _store_choice(self, group: tuple[str, int], hit: Hit | None) -> None:
        self._group_choices[group] = hit
        if len(self._group_choices) > MAX_STORED_CHOICES:
            del self._group_choices[next(iter(self._group_choices))]

    def _is_shared(self, request: SearchRequest) -> bool:
        return self._settings.per == "group" and not request.question

    def _key_of_entry(self, entry: Entry) -> Place:
        """Return the key of the index that holds the entry."""
        return self._index_key(entry.place)

    def _index_key(self, place: Place) -> Place:
        """Return the key of the index that the episodes of a place search."""
        return Place(
            place.task if self._scope != "shared" else "",
            place.goal if self._scope in GOAL_SCOPES else "",
            place.variation if self._scope == "variation" else "",
        )


def start_hit(entry: Entry) -> Hit:
    """Return the hit with which an entry guides an episode from its start."""
    return _hit(entry, "start")


def _hit(entry: Entry, how: UseKind) -> Hit:
    return Hit(
        entry.text,
        ExperienceUse(entry.uid, entry.version, entry.provenance.generation, how),
        entry.goal,
        entry.counters.record,
    )

"""Failures of a run's training episodes, as its bank holds them (Role-Agent §3.3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence

from crl.manager.failure_notes import read_note
from crl.manager.manager import ExperienceManager
from crl.manager.records import Distilled
from crl.protocols import Failure, State
from crl.types import Experience, Segment

Address = tuple[int, int]
"""Step and group of an episode."""


class BankFailures:
    """`FailureLibrary` of the active entries that the run `run` has written.

    Entries of other runs (in a bank that the run started with) are left out, because their tasks
    may be tasks of evaluations.
    """

    def __init__(self, manager: ExperienceManager, run: str) -> None:
        self._manager, self._run = manager, run
        self._new: list[str] = []
        """Uids of the failures for which no tasks were retrieved yet."""
        self._modes: dict[str, str] = {}
        """Mode of each entry at the last call of `modes`; empty for entries of other runs."""

    def add(self, distilled: Distilled) -> None:
        """Note the entries of an answer that was applied to the bank."""
        id = distilled.request.id
        self._new += [f"{id}#{write.op}" for write in distilled.writes if not write.targets]

    def new(self) -> list[Failure]:
        entries = [self._manager.entry(uid) for uid in self._new]
        return [failure for entry in entries if entry and (failure := self._failure(entry))]

    def mark_retrieved(self, failures: Sequence[Failure]) -> None:
        done = {failure.uid for failure in failures}
        active = self._manager.entry
        self._new = [uid for uid in self._new if uid not in done and active(uid)]

    def modes(self) -> Mapping[str, int]:
        known = self._modes  # each note is parsed once
        self._modes = {
            uid: known[uid] if uid in known else self._mode(uid) for uid in self._manager.uids()
        }
        return Counter(mode for mode in self._modes.values() if mode)

    def _mode(self, uid: str) -> str:
        entry = self._manager.entry(uid)
        return read_note(entry.text).mode if entry and self._address(uid) else ""

    async def similar(
        self, failure: Failure, groups: Container[Address]
    ) -> Sequence[tuple[Failure, float]]:
        def accept(uid: str) -> bool:
            address = self._address(uid)
            return uid != failure.uid and address is not None and address in groups

        query = read_note(failure.text).query
        found = await self._manager.similar(failure.task, failure.goal, query, accept)
        return [
            (other, similarity) for entry, similarity in found if (other := self._failure(entry))
        ]

    async def tokens(self, prompt: Sequence[Segment]) -> int:
        return await self._manager.tokens(prompt)

    async def ask(self, name: str, prompt: Sequence[Segment]) -> str:
        return await self._manager.ask(name, prompt)

    def state(self) -> State:
        """Return the state for a checkpoint, whose snapshot of the bank is taken before."""
        return {"new": list(self._new)}

    def load_state(self, state: State) -> None:
        """Load a state.

        The bank must have been rolled back before. Answers that were applied after the snapshot are
        removed, and their requests are answered again.
        """
        self._new = [uid for uid in state["new"] if self._manager.entry(uid)]

    def _failure(self, entry: Experience) -> Failure | None:
        """Return the failure of an entry; None if no training episode of the run made it."""
        address = self._address(entry.uid)
        if address is None:
            return None
        return Failure(entry.uid, address, entry.task, entry.goal, entry.text)

    def _address(self, uid: str) -> Address | None:
        """Return step and group of the training episode that made an entry; None if none did."""
        run, *address = uid.partition("#")[0].split("/")
        if run != self._run or len(address) != 3:
            return None
        return int(address[0]), int(address[1])

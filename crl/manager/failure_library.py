"""Failures of a run's training episodes, as its bank holds them (Role-Agent §3.3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from crl.manager.failure_notes import read_note
from crl.manager.manager import ExperienceManager
from crl.manager.records import Distilled
from crl.protocols import Failure, State
from crl.types import Experience, Segment


class BankFailures:
    """`FailureLibrary` of the active entries that the run `run` has written.

    Entries of other runs, as in a bank that the run started with, are left out: their tasks may be
    those of evaluations.
    """

    def __init__(self, manager: ExperienceManager, run: str) -> None:
        self._manager, self._run = manager, run
        self._new: list[str] = []
        """Uids of the failures for which no tasks were retrieved yet."""

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

    def failures(self) -> Iterator[Failure]:
        for entry in self._manager.entries():
            if failure := self._failure(entry):
                yield failure

    async def similar(self, failure: Failure) -> Sequence[tuple[Failure, float]]:
        query = read_note(failure.text).query
        found = await self._manager.similar(failure.task, failure.goal, query)
        return [
            (other, similarity)
            for entry, similarity in found
            if (other := self._failure(entry)) and other.uid != failure.uid
        ]

    async def ask(self, name: str, prompt: Sequence[Segment]) -> str:
        return await self._manager.ask(name, prompt)

    def state(self) -> State:
        """Return the state for a checkpoint, whose snapshot of the bank is taken before."""
        return {"new": list(self._new)}

    def load_state(self, state: State) -> None:
        """Load a state. The bank is rolled back before.

        An answer that was applied after the snapshot is unknown now. Its request will be answered
        again.
        """
        self._new = [uid for uid in state["new"] if self._manager.entry(uid)]

    def _failure(self, entry: Experience) -> Failure | None:
        """Return the failure of an entry; None if no training episode of the run made it."""
        run, *address = entry.uid.partition("#")[0].split("/")
        if run != self._run or len(address) != 3:
            return None
        step, group, _ = map(int, address)
        return Failure(entry.uid, (step, group), entry.task, entry.goal, entry.text)

"""Library of failures of a bank, as `crl bank failures` prints it (Role-Agent §3.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from crl.manager.failure_notes import FailureNote, read_note
from crl.manager.inspection.reading import EntryView


@dataclass(frozen=True, slots=True)
class FailureView:
    """Note on a failed episode."""

    uid: str
    step: int | None
    """Completed actor steps when the note was written; None if in another run."""
    task: str
    goal: str
    note: FailureNote


@dataclass(frozen=True, slots=True)
class ModeView:
    """Failures of one mode."""

    mode: str
    failures: int
    """Number of notes."""
    goals: int
    """Number of different goals, per task."""
    step: int | None
    """Step of the last note."""
    lesson: str
    """Lesson of the last note."""


def failure_views(entries: Iterable[EntryView]) -> list[FailureView]:
    """Return the notes in the texts of entries, in the same order."""
    return [
        FailureView(entry.uid, entry.step, entry.task, entry.goal, read_note(entry.text))
        for entry in entries
    ]


def mode_views(failures: Sequence[FailureView]) -> list[ModeView]:
    """Return the modes of notes, the most frequent first, then in alphabetical order.

    The last note of a mode is the last of `failures`.
    """
    modes: dict[str, list[FailureView]] = {}
    for failure in failures:
        modes.setdefault(failure.note.mode, []).append(failure)
    views = [
        ModeView(mode, len(of_mode), goals, of_mode[-1].step, of_mode[-1].note.lesson)
        for mode, of_mode in modes.items()
        for goals in [len({(failure.task, failure.goal) for failure in of_mode})]
    ]
    return sorted(views, key=lambda view: (-view.failures, view.mode))

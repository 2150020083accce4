"""Library of failures of a bank, as `crl bank failures` prints it (Role-Agent §3.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from crl.manager.failure_notes import read_note
from crl.manager.inspection.reading import EntryView


@dataclass(frozen=True, slots=True)
class FailureView:
    """Note on a failed episode. The fields are those of the entry and of its `FailureNote`."""

    uid: str
    step: int | None
    """Completed actor steps when the note was written; None if in another run."""
    task: str
    goal: str
    mode: str
    detail: str
    critical_step: str
    lesson: str
    query: str


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
        FailureView(
            entry.uid, entry.step, entry.task, entry.goal, note.mode, note.detail,
            note.critical_step, note.lesson, note.query,
        )
        for entry in entries
        for note in [read_note(entry.text)]
    ]  # fmt: skip


def mode_views(failures: Sequence[FailureView]) -> list[ModeView]:
    """Return the modes of notes, the most frequent first, then in alphabetical order.

    The last note of a mode is the last of `failures`.
    """
    modes: dict[str, list[FailureView]] = {}
    for failure in failures:
        modes.setdefault(failure.mode, []).append(failure)
    views = [
        ModeView(
            mode, len(notes), len({(note.task, note.goal) for note in notes}),
            notes[-1].step, notes[-1].lesson,
        )
        for mode, notes in modes.items()
    ]  # fmt: skip
    return sorted(views, key=lambda view: (-view.failures, view.mode))

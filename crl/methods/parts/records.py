"""Text of an experience's record in a prompt."""

from __future__ import annotations

from collections.abc import Callable

from crl.types import TrackRecord

RecordWriter = Callable[[str, TrackRecord], str]
"""Adds a record to an experience's text. Returns the text alone where the record has no episodes."""


def compact_record(text: str, record: TrackRecord) -> str:
    """Write a record for tiny models, before the text: `won 3 of 4`; that of more than ten episodes as a share of ten."""
    if not record.credited:
        return text
    shown = min(record.credited, 10)
    return f"won {round(shown * record.won / record.credited)} of {shown} {text}"


def full_record(text: str, record: TrackRecord) -> str:
    """Write a record for language models, on a line of its own below the text: episodes, successes, and the lift if it is known."""
    if not record.credited:
        return text
    lift = "" if record.lift is None else f"; success with it minus success without it: {100 * record.lift:+.0f} percentage points"
    return f"{text}\n(It guided {record.credited} earlier episodes, of which {record.won} succeeded{lift}.)"

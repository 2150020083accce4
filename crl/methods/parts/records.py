"""Text of an experience's record in a prompt."""

from __future__ import annotations

from collections.abc import Callable

from crl.types import TrackRecord

RecordWriter = Callable[[str, TrackRecord], str]
"""Function that adds a record to an experience's text. Without episodes it returns the text."""


def compact_record(text: str, record: TrackRecord) -> str:
    """Prefix `text` with its record for tiny models, such as `won 3 of 4`.

    A record of more than ten episodes is scaled to ten.
    """
    if not record.credited:
        return text
    shown = min(record.credited, 10)
    return f"won {round(shown * record.won / record.credited)} of {shown} {text}"


def full_record(text: str, record: TrackRecord) -> str:
    """Add a line with the record below `text` for language models: episodes, successes, lift."""
    if not record.credited:
        return text
    lift = ""
    if record.lift is not None:
        points = 100 * record.lift
        lift = f"; success with it minus success without it: {points:+.0f} percentage points"
    return (
        f"{text}\n(It guided {record.credited} earlier episodes,"
        f" of which {record.won} succeeded{lift}.)"
    )

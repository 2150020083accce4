"""Wording that several parts of the output share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from crl.intervals import interval_text
from crl.types import Lift

SEGMENT_TITLES: Mapping[str, str] = {
    "task": "task",
    "env": "environment",
    "policy": "answer",
    "experience": "experience",
    "tool_spec": "tool",
    "tool_call": "question",
    "tool_result": "answer to the question",
}
"""Title of a text of a conversation, by its origin."""


OPERATION_WORDS: Mapping[str, str] = {
    "submit": "submitted",
    "add": "added",
    "update": "updated",
    "return": "returned",
    "up": "voted up",
    "down": "voted down",
    "drop": "refused",
    "merge": "merged",
    "discard": "discarded",
    "evict": "evicted",
    "refine": "refined",
    "malformed": "malformed",
    "dead": "given up",
    "import": "imported",
    "retrieve": "retrieved",
    "credit": "credited",
    "stray": "unknown version",
    "lift": "lift measured",
    "train": "trained on",
    "snapshot": "snapshots",
    "chunk": "chunks of merges",
}
"""Words for the operations of a bank, by the kind in its log (`ops/` in docs/metrics.md)."""


def counted(n: int, singular: str, plural: str | None = None) -> str:
    """Return a number with its noun. Examples: 1 group; 1,200 groups; 2 processes."""
    return f"{n:,} {singular if n == 1 else plural or singular + 's'}"


def times(n: int) -> str:
    """Return a positive number of times in words. Examples: once; twice; 1,200 times."""
    return {1: "once", 2: "twice"}.get(n, f"{n:,} times")


def listed(items: Iterable[object]) -> str:
    """Return items in words. Examples: 0; 0 and 2; 0, 2 and 5."""
    *first, last = map(str, items)
    return f"{', '.join(first)} and {last}" if first else last


def lift_text(lift: Lift | None) -> str:
    """Return a lift with its 95 % interval, such as "+0.25 [-0.44, +0.94]".

    Return "–" if the lift is unknown.
    """
    return interval_text(lift.mean, lift.low, lift.high, "+.2f") if lift else "–"


def percent(share: float, digits: int = 0) -> str:
    """Return a share as text. Example: 72.5 %."""
    return f"{100 * share:.{digits}f} %"


def duration(seconds: float | None) -> str:
    """Return a duration, for example "1:02:03", or "–" for None."""
    if seconds is None:
        return "–"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def device_text(device: str) -> str:
    """Return a setting of a device for people."""
    return "cuda if available, else cpu" if device == "auto" else device


class _Escapes(dict[int, str]):
    """Table for `str.translate`: the escape of a character, or itself if it is printable."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        escaped = character.encode("unicode_escape").decode()
        self[code] = character if character.isprintable() else escaped
        return self[code]


_ESCAPES = _Escapes()


def printable(line: str) -> str:
    """Return the line with an escape for every character that is not printable.

    A terminal would interpret or hide these characters.
    """
    return line if line.isprintable() else line.translate(_ESCAPES)


def printable_lines(text: str) -> str:
    """Return the text with escapes as `printable`. Line breaks are kept, and tabs are expanded."""
    return "\n".join(printable(line.expandtabs()) for line in text.split("\n"))

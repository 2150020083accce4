"""Wording that several parts of the output share."""

from __future__ import annotations


def counted(n: int, singular: str, plural: str | None = None) -> str:
    """Return a number with its noun. Examples: 1 group; 1,200 groups; 2 processes."""
    return f"{n:,} {singular if n == 1 else plural or singular + 's'}"


def device_text(device: str) -> str:
    """Return a setting of a device for people."""
    return "cuda if available, else cpu" if device == "auto" else device

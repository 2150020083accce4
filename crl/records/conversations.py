"""Files of conversations that other programs wrote: one JSON object in each line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from crl.errors import ConfigError
from crl.types import Segment

ROLES = ("system", "user", "assistant")
"""Roles of the messages."""

FORMAT = '{"messages": [{"role": "user", "content": "…"}, …]}'


def read_lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the place of each line that is not empty, for error messages, and its JSON value.

    The value is None if the line is not JSON. Raise `ConfigError` for a file that is not UTF-8.
    """
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"is not a text in UTF-8 ({error})"
        raise ConfigError("--from", str(file), reason, "Save it in UTF-8") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            yield f"{file}, line {number}", value


def is_text(value: object) -> TypeGuard[str]:
    """Return whether a value is a text that UTF-8 can encode: without lone surrogates."""
    return isinstance(value, str) and value == value.encode(errors="ignore").decode()


def conversation(value: Any, place: str) -> list[Segment]:
    """Return the messages of a line as segments. Those of the assistant are the policy's.

    Raise `ConfigError` with the place of the line if it is not a conversation, begins with the
    assistant, has no message of the assistant, or a text that is not valid in UTF-8.
    """
    try:
        segments = [
            Segment(m["role"], m["content"], "policy" if m["role"] == "assistant" else "env")
            for m in value["messages"]
        ]
        valid = segments[0].role != "assistant" and all(
            s.role in ROLES and is_text(s.text) for s in segments
        )
    except (ValueError, KeyError, TypeError, IndexError):
        segments, valid = [], False
    if not valid or not any(segment.origin == "policy" for segment in segments):
        reason = "is not a conversation in which the assistant answers"
        raise ConfigError("--from", place, reason, f"Write {FORMAT} in each line")
    return segments

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

    Raise `ConfigError` for a file that is not UTF-8, and for a line that is not JSON.
    """
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"is not a text in UTF-8 ({error})"
        raise ConfigError("--from", str(file), reason, "Save it in UTF-8") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{file}, line {number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                remedy = "Write one JSON object in each line"
                raise ConfigError("--from", place, f"is not JSON ({error})", remedy) from error
            yield place, value


def is_text(value: object) -> TypeGuard[str]:
    """Return whether a value is a text that UTF-8 can encode: without lone surrogates."""
    return isinstance(value, str) and value == value.encode(errors="ignore").decode()


def conversation(value: Any, place: str) -> list[Segment]:
    """Return the messages of a line as segments. Those of the assistant are the policy's.

    Raise `ConfigError` with the place of the line if it is not a conversation, begins with the
    assistant, has no message of the assistant, or a text that is not valid in UTF-8.
    """
    if fault := _fault(value):
        raise ConfigError("--from", place, fault, f"Write {FORMAT} in each line")
    return [
        Segment(m["role"], m["content"], "policy" if m["role"] == "assistant" else "env")
        for m in value["messages"]
    ]


def _fault(value: Any) -> str:
    """Return why a value is not a conversation in which the assistant answers; empty if it is."""
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list):
        return "has no list of messages"
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            return f"message {number} has no role or no content"
        if message["role"] not in ROLES:
            return f"message {number} has the role {message['role']!r}, not {', '.join(ROLES)}"
        if not is_text(message["content"]):
            return f"the content of message {number} is not a text"
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        return "has no message of the assistant"
    return "begins with the assistant" if roles[0] == "assistant" else ""

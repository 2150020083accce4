"""Position at which a malformed answer of the extractor departs from all usable answers.

Before its departure, a malformed answer is equal to the start of a usable one. After it, the answer
often looks like a usable one again. Therefore only the token at the departure is punished
(`ops.ParsedOps.head`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

Span = tuple[int, int]

DECODER = json.JSONDecoder(strict=False)  # not strict: models put line breaks inside texts

KEYS = ("op", "text", "target", "targets", "operations")
"""Keys of JSON objects in usable answers."""

_LEAD = re.compile(r"\s*(?:```\w*\s*)?")
_KEY = re.compile(r'"([^"]*)"\s*\Z')
_LITERALS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,4})?")
"""Start of an escape in a JSON string, such as \\n or \\u00e9."""


def broken_at(text: str, answer: int, position: int | None) -> int:
    """Return the position at which the answer stops being the start of a valid one.

    Return the length of the text if the answer is the start of a valid one and ended too early.
    Prose in place of ops departs with its first word.

    * answer: start of the answer, after the thinking.
    * position: start of the object that was taken for an op; None if there was none.
    """
    found = _LEAD.match(text, answer)
    lead = found.end() if found else answer
    if lead == len(text):
        return lead
    if text[lead] in "[{":
        broken = _json_breaks(text, lead)
        if broken is not None:
            return broken
        if position is None:  # JSON without an op: it departs at its closing bracket
            return DECODER.raw_decode(text, lead)[1] - 1
    elif position is None:
        return lead
    return position if (broken := _json_breaks(text, position)) is None else broken


def _json_breaks(text: str, start: int) -> int | None:
    """Return the position at which the text from `start` stops being the start of valid JSON.

    Return None if it is valid JSON.
    """
    try:
        DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return _departure(text, start, error)
    except (ValueError, RecursionError):  # thousands of digits or of brackets
        return start
    return None


def _departure(text: str, start: int, error: json.JSONDecodeError) -> int:
    at = error.pos
    if "escape" in error.msg and (escape := _ESCAPE.match(text, text.rfind("\\", start, at + 1))):
        return escape.end()
    rest = text[at:]
    in_literal = any(literal.startswith(rest) for literal in _LITERALS)
    if error.msg.startswith("Unterminated string") or in_literal or not rest.strip():
        return len(text)
    if error.msg.startswith("Expecting ':'") and (key := _KEY.search(text, start, at)):
        # An unknown key is wrong before the missing colon.
        return at if key[1] in KEYS else key.start(1) + _shared(key[1], KEYS)
    return at


def wrong_at(
    text: str, span: Span, kinds: Sequence[str], shown: int, max_chars: int, about: str
) -> int:
    """Return the position of the first character at which a refused op differs from usable ops.

    * span: characters of the refused op, an object with an "op" key.
    * kinds: allowed kinds of ops.
    * shown: number of experiences in the prompt. A target is a number from 1 to `shown`.
    * about: key that the op was refused for, if its kind is allowed: "text" or "target".

    An op without the required key departs at its closing brace.
    """
    kind = _value(text, span, "op")
    wanted = [json.dumps(one) for one in kinds]
    if kind and text[slice(*kind)] not in wanted:
        return kind[0] + _shared(text[slice(*kind)], wanted)
    value = _value(text, span, "text") if about == "text" else target_span(text, span)
    if value is None:
        return span[1] - 1
    start, end = value
    if about == "text":
        if text[start] != '"':
            return start
        return min(start + 1 + max_chars, end - 1)
    numbers = [str(number) for number in range(1, shown + 1)]
    if text[start] == "[":
        wrong = (one for one in re.finditer(r"\d+", text[start:end]) if one[0] not in numbers)
        return next((start + one.start() for one in wrong), end - 1)
    return start + min(
        _shared(text[start:end], [*numbers, *map(json.dumps, numbers)]), end - start - 1
    )


def target_span(text: str, span: Span) -> Span | None:
    """Return the characters of an op's value of "targets" or "target"; None if it has neither."""
    return _value(text, span, "targets") or _value(text, span, "target")


def _value(text: str, span: Span, key: str) -> Span | None:
    """Return the characters of the value of `key` in the JSON object at `span`; None without it."""
    found = re.compile(rf'"{key}"\s*:\s*').search(text, *span)
    return (found.end(), DECODER.raw_decode(text, found.end())[1]) if found else None


def _shared(text: str, others: Sequence[str]) -> int:
    """Return the length of the longest common prefix of `text` and any of `others`."""
    length = 0
    while length < len(text) and any(other.startswith(text[: length + 1]) for other in others):
        length += 1
    return length

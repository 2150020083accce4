"""Position at which a malformed answer of the extractor departs from all usable answers.

Before its departure, a malformed answer equals the start of a usable one. After the departure, the
answer often looks usable again. Therefore only the token at the departure is punished
(`ops.ParsedOps.head_chars`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

Span = tuple[int, int]

DECODER = json.JSONDecoder(strict=False)  # not strict: models put line breaks inside texts

KNOWN_KEYS = ("op", "text", "target", "targets", "operations")
"""Keys of JSON objects in usable answers."""

_BEFORE_ANSWER = re.compile(r"\s*(?:```\w*\s*)?")
_LAST_KEY = re.compile(r'"([^"]*)"\s*\Z')
_LITERALS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,4})?")
"""Start of an escape in a JSON string, such as \\n or \\u00e9."""


def json_departure(text: str, answer: int, position: int | None) -> int:
    """Return the position at which the answer stops being the start of a valid one.

    Return the length of the text if the answer is the start of a valid one and ended too early.
    Prose in place of ops departs with its first word.

    * answer: start of the answer, after the thinking.
    * position: start of the object that was taken for an op; None if there was none.
    """
    prefix = _BEFORE_ANSWER.match(text, answer)
    start = prefix.end() if prefix else answer
    if start == len(text):
        return start
    if text[start] in "[{":
        broken = _json_error_position(text, start)
        if broken is not None:
            return broken
        if position is None:  # JSON without an op: it departs at its closing bracket
            return DECODER.raw_decode(text, start)[1] - 1
    elif position is None:
        return start
    return position if (broken := _json_error_position(text, position)) is None else broken


def _json_error_position(text: str, start: int) -> int | None:
    """Return the position at which the text from `start` stops being the start of valid JSON.

    Return None if it is valid JSON.
    """
    try:
        DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return _error_position(text, start, error)
    except (ValueError, RecursionError):  # thousands of digits or of brackets
        return start
    return None


def _error_position(text: str, start: int, error: json.JSONDecodeError) -> int:
    position = error.pos
    if "escape" in error.msg and (
        escape := _ESCAPE.match(text, text.rfind("\\", start, position + 1))
    ):
        return escape.end()
    rest = text[position:]
    in_literal = any(literal.startswith(rest) for literal in _LITERALS)
    if error.msg.startswith("Unterminated string") or in_literal or not rest.strip():
        return len(text)
    if error.msg.startswith("Expecting ':'") and (key := _LAST_KEY.search(text, start, position)):
        # An unknown key is wrong before the missing colon.
        if key[1] in KNOWN_KEYS:
            return position
        return key.start(1) + _common_prefix_length(key[1], KNOWN_KEYS)
    return position


def op_departure(
    text: str, span: Span, kinds: Sequence[str], num_shown: int, max_chars: int, refused_key: str
) -> int:
    """Return the position of the first character at which a refused op differs from usable ops.

    * span: characters of the refused op, an object with an "op" key.
    * kinds: allowed kinds of ops.
    * num_shown: number of experiences in the prompt. A target is a number from 1 to `num_shown`.
    * refused_key: key that the op was refused for, if its kind is allowed: "text" or "target".

    An op without the required key departs at its closing brace.
    """
    kind = _value_span(text, span, "op")
    allowed = [json.dumps(kind_name) for kind_name in kinds]
    if kind and text[slice(*kind)] not in allowed:
        return kind[0] + _common_prefix_length(text[slice(*kind)], allowed)
    value = _value_span(text, span, "text") if refused_key == "text" else target_span(text, span)
    if value is None:
        return span[1] - 1
    start, end = value
    if refused_key == "text":
        if text[start] != '"':
            return start
        return min(start + 1 + max_chars, end - 1)
    numbers = [str(number) for number in range(1, num_shown + 1)]
    if text[start] == "[":
        wrong = (match for match in re.finditer(r"\d+", text[start:end]) if match[0] not in numbers)
        return next((start + match.start() for match in wrong), end - 1)
    return start + min(
        _common_prefix_length(text[start:end], [*numbers, *map(json.dumps, numbers)]),
        end - start - 1,
    )


def target_span(text: str, span: Span) -> Span | None:
    """Return the characters of an op's value of "targets" or "target"; None if it has neither."""
    return _value_span(text, span, "targets") or _value_span(text, span, "target")


def _value_span(text: str, span: Span, key: str) -> Span | None:
    """Return the characters of the value of `key` in the JSON object at `span`; None without it."""
    found = re.compile(rf'"{key}"\s*:\s*').search(text, *span)
    return (found.end(), DECODER.raw_decode(text, found.end())[1]) if found else None


def _common_prefix_length(text: str, others: Sequence[str]) -> int:
    """Return the length of the longest common prefix of `text` and any of `others`."""
    length = 0
    while length < len(text) and any(other.startswith(text[: length + 1]) for other in others):
        length += 1
    return length

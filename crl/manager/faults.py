"""Where an answer of the extractor departs from every answer that could be used.

Up to its departure a malformed answer shares its tokens with valid ones. After it the answer often
reads like a valid one again. So only the departure is punished (`ops.ParsedOps.head`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

Span = tuple[int, int]

DECODER = json.JSONDecoder(strict=False)  # models break lines within a text

KEYS = ("op", "text", "target", "targets", "operations")

_LEAD = re.compile(r"\s*(?:```\w*\s*)?")
_KEY = re.compile(r'"([^"]*)"\s*\Z')
_LITERALS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,4})?")
"""The beginning of an escape in a JSON string, such as \\n or \\u00e9."""


def broken_at(text: str, answer: int, position: int | None) -> int:
    """Return the first character at which no continuation would make the answer readable.

    This is the text's length if the answer is the beginning of a valid one: it ended too early.

    answer: where the answer begins, after the thinking. position: where the object begins that was
    taken for an op; None if there was none. Prose in place of ops departs with its first word.
    """
    found = _LEAD.match(text, answer)
    lead = found.end() if found else answer
    if lead == len(text):
        return lead
    if text[lead] in "[{":
        broken = _json_breaks(text, lead)
        if broken is not None:
            return broken
        if position is None:  # JSON without an op: it is over where its last bracket closes
            return DECODER.raw_decode(text, lead)[1] - 1
    elif position is None:
        return lead
    return position if (broken := _json_breaks(text, position)) is None else broken


def _json_breaks(text: str, start: int) -> int | None:
    """Return where the text from `start` stops being the beginning of JSON; None if it is JSON."""
    try:
        DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return _departure(text, start, error)
    except (ValueError, RecursionError):  # a number of thousands of digits, or brackets as many
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
        # A key that no op has was wrong before the colon that is missing.
        return at if key[1] in KEYS else key.start(1) + _shared(key[1], KEYS)
    return at


def wrong_at(
    text: str, span: Span, kinds: Sequence[str], shown: int, max_chars: int, about: str
) -> int:
    """Return the first character that no usable op has in the place of a refused one.

    span: the refused op, an object with an "op"; kinds: those that could be used; shown: how many
    numbers a target may have, from 1; about: the key that it was refused for, if its kind is right.
    A missing key is noticed at the closing brace.
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
    """Return the characters of an op's target or targets; None if it has none."""
    return _value(text, span, "targets") or _value(text, span, "target")


def _value(text: str, span: Span, key: str) -> Span | None:
    """Return the characters of the value under `key` in the JSON object at `span`."""
    found = re.compile(rf'"{key}"\s*:\s*').search(text, *span)
    return (found.end(), DECODER.raw_decode(text, found.end())[1]) if found else None


def _shared(text: str, others: Sequence[str]) -> int:
    """Return how many characters `text` has in common with the beginning of one of `others`."""
    length = 0
    while length < len(text) and any(other.startswith(text[: length + 1]) for other in others):
        length += 1
    return length

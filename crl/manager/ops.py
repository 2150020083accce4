"""Reads the operations out of what an extractor wrote, one by one: a bad op is dropped and counted, the good ones stand.

The answer is what follows the thinking (`</think>`). It holds a JSON list of objects

    [{"op": "add", "text": "The exit is behind the altar."},
     {"op": "update", "target": 1, "text": "Go southeast first; the exit is behind the altar."},
     {"op": "return"}]

add: a new experience. update: a better text for a retrieved experience, `target` its number in the prompt, from 1. return: nothing
to learn here; so says an empty list too. Objects are read wherever they stand: in a code fence, between sentences, one after the
other without a list, inside another object. CRL §3.2.1.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

OpKind = Literal["add", "update", "return"]
Span = tuple[int, int]

THINKING_OPENS, THINKING_ENDS = "<think>", "</think>"

_LOOKS_LIKE_AN_OP = re.compile(r'\{\s*["\']?op\b')
_NOTHING = re.compile(r"\[\s*\]")
_DECODER = json.JSONDecoder(strict=False)  # models break lines within a text


@dataclass(frozen=True, slots=True)
class OpLimits:
    """max_ops: ops of one answer, as many as the prompt `distil` asks for at most; max_chars: characters of one text."""

    max_ops: int = 3
    max_chars: int = 2000


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. span: its characters in the completion; target: 0-based, of an update only."""

    kind: OpKind
    span: Span
    text: str = ""
    target: int | None = None


@dataclass(frozen=True, slots=True)
class ParsedOps:
    """dropped: how many ops were refused, by reason; head: characters before the first op, good or bad."""

    ops: tuple[Op, ...]
    dropped: Mapping[str, int]
    head: int

    @property
    def malformed(self) -> bool:
        """Nothing in the completion could be used, not even a `return`."""
        return not self.ops


def parse_ops(completion: str, shown: int, *, thinking: bool = False, limits: OpLimits | None = None) -> ParsedOps:
    """The operations of `completion` in order. Any text is parsed; nothing is raised and nothing is evaluated.

    shown: how many experiences the prompt numbered; thinking: the prompt itself opened the thinking, so that an answer comes
    only after its end.
    """
    limits = limits or OpLimits()
    start = _answer(completion, thinking)
    if start is None:
        return ParsedOps((), {"the thinking did not end": 1}, len(completion))
    ops: list[Op] = []
    dropped: Counter[str] = Counter()
    head: int | None = None
    for value, span in _objects(completion, start):
        head = span[0] if head is None else head
        found = _op(value, span, shown, limits) if len(ops) < limits.max_ops else "too many ops"
        if isinstance(found, Op):
            ops.append(found)
        else:
            dropped[found] += 1
    if head is None:
        nothing = _NOTHING.search(completion, start)
        head = nothing.start() if nothing else len(completion)
        if nothing:
            ops.append(Op("return", nothing.span()))
        else:
            dropped["no op in the answer"] += 1
    return ParsedOps(tuple(ops), dict(dropped), head)


def _answer(completion: str, thinking: bool) -> int | None:
    """Where the answer begins; None while the thinking goes on."""
    end = completion.rfind(THINKING_ENDS)
    if end >= 0:
        return end + len(THINKING_ENDS)
    return None if thinking or THINKING_OPENS in completion else 0


def _objects(text: str, position: int) -> Iterable[tuple[Any, Span]]:
    """JSON objects with an "op", and None for what begins like one and is not JSON; each with its span."""
    while (position := text.find("{", position)) >= 0:
        try:
            value, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            broken = _LOOKS_LIKE_AN_OP.match(text, position)
            if broken:
                yield None, (position, broken.end())
            position = broken.end() if broken else position + 1
            continue
        if "op" in value:
            yield value, (position, end)
            position = end
        else:  # an object around the ops, such as {"operations": […]}
            position += 1


def _op(value: Any, span: Span, shown: int, limits: OpLimits) -> Op | str:
    """The op that `value` is, or why it is none."""
    if value is None:
        return "not JSON"
    kind = value["op"]
    if kind == "return":
        return Op("return", span)
    if kind not in ("add", "update"):
        return "unknown op"
    text = value.get("text")
    if not isinstance(text, str) or not _is_unicode(text):
        return "no text"
    text = text.strip()
    if not text:
        return "empty text"
    if len(text) > limits.max_chars:
        return "text too long"
    if kind == "add":
        return Op("add", span, text)
    target = _number(value.get("target"))
    if target is None:
        return "no target"
    if not 1 <= target <= shown:
        return "target out of range"
    return Op("update", span, text, target - 1)


def _number(value: Any) -> int | None:
    """A whole number, written as one or as a short string of digits, as models like to do."""
    if isinstance(value, str) and len(value) < 10 and value.isascii() and value.isdigit():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_unicode(text: str) -> bool:
    """No lone surrogates, which JSON's \\u escapes can spell and nothing can store."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def token_spans(decode: Callable[[Sequence[int]], str], ids: Sequence[int], spans: Sequence[Span]) -> list[Span]:
    """Character spans of decode(ids), in order, as token ranges [start, stop) that do not overlap.

    A token that lies across a border belongs to the span that it opens, and to the earlier of two spans that it lies in.
    """
    taken = 0
    ranges = []
    for first, end in spans:
        start = max(taken, _tokens_until(decode, ids, first + 1) - 1)
        taken = max(start, _tokens_until(decode, ids, end))
        ranges.append((start, taken))
    return ranges


def _tokens_until(decode: Callable[[Sequence[int]], str], ids: Sequence[int], chars: int) -> int:
    """How many tokens it takes until `chars` characters are complete."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        # The bytes of an unfinished character decode to U+FFFD; without them the length grows with every token or stays.
        if len(decode(ids[:middle]).rstrip("\ufffd")) >= chars:
            high = middle
        else:
            low = middle + 1
    return low

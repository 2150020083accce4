"""Reads the operations out of what an extractor wrote, one by one: a bad op is dropped and counted, the good ones stand.

The answer is what follows the thinking (`</think>`). Of an episode (CRL §3.2.1) it holds a JSON list of objects

    [{"op": "add", "text": "The exit is behind the altar."},
     {"op": "update", "target": 1, "text": "Go southeast first; the exit is behind the altar."},
     {"op": "up", "target": 2},
     {"op": "return"}]

add: a new experience. update: a better text for a retrieved experience, `target` its number in the prompt, from 1. up, down: a vote on
a retrieved experience, where the extractor is asked for votes. return: nothing to learn here; so says an empty list too. Of a chunk of
the bank (its periodic merge)

    [{"op": "merge", "targets": [1, 4], "text": "Go southeast first; the exit is behind the altar."},
     {"op": "discard", "target": 2},
     {"op": "keep", "target": 3}]

merge: one text in the place of several experiences. discard: one that is wrong or says nothing. keep: what stays as it is, as does
what is not mentioned. To the question of an agent (search_and_ask) it is

    [{"op": "refine", "text": "The altar is two rooms east of you."}]

refine: what was found, fitted to the agent's situation; or return: it is to stay as it is.

Objects are read wherever they stand: in a code fence, between sentences, one after the other without a list, inside another object.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from crl.manager.faults import DECODER, Span, broken_at, wrong_at

OpKind = Literal["add", "update", "return", "up", "down", "merge", "discard", "keep", "refine"]

THINKING_OPENS, THINKING_ENDS = "<think>", "</think>"

ATTEMPTS = 256
"""Braces of an answer that open no op, as far as it is read."""

_LOOKS_LIKE_AN_OP = re.compile(r'\{\s*["\']?op\b')
_NOTHING = re.compile(r"\[\s*\]")


@dataclass(frozen=True, slots=True)
class OpLimits:
    """max_ops: ops of one answer about an episode, as many as the prompt `distil` asks for at most; max_chars: characters of one text."""

    max_ops: int = 3
    max_chars: int = 2000


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. span: its characters in the completion; targets: 0-based, one of an update or a vote, several of a merge."""

    kind: OpKind
    span: Span
    text: str = ""
    targets: tuple[int, ...] = ()

    @property
    def is_vote(self) -> bool:
        return self.kind in ("up", "down")


@dataclass(frozen=True, slots=True)
class ParsedOps:
    """The ops of one answer, and where it can be trained apart from them."""

    ops: tuple[Op, ...]
    """Those that stand, in order."""
    dropped: Mapping[str, int]
    """How many ops were refused, by reason."""
    head: int
    """Characters before the first op, good or bad. Of a malformed answer: characters that it shares
    with answers that could be used (`crl.manager.faults`), all of them if it ended too early."""
    closed: bool = True
    """Nothing that was refused follows the last op: what follows closes the answer."""

    @property
    def malformed(self) -> bool:
        """Nothing in the completion could be used, not even a `return`."""
        return not self.ops


@dataclass(frozen=True, slots=True)
class _Asked:
    """What an answer may hold."""

    kinds: tuple[OpKind, ...]
    """Kinds of ops that could be used. An update or a vote needs an experience in the prompt."""
    nothing: OpKind
    """The op that an empty list stands for."""
    most: int
    """Ops of one answer."""
    shown: int
    """Experiences that the prompt numbered."""
    max_chars: int
    """Characters of one text."""


def parse_ops(
    completion: str,
    shown: int,
    *,
    thinking: bool = False,
    votes: bool = False,
    limits: OpLimits | None = None,
) -> ParsedOps:
    """Read an answer about an episode: add, update, return and, with `votes`, up and down, in order.

    shown: how many experiences the prompt numbered; thinking: the prompt itself opened the thinking, so that an answer comes
    only after its end. Any text is parsed; nothing is raised and nothing is evaluated.
    """
    limits = limits or OpLimits()
    kinds: tuple[OpKind, ...] = ("add", "return")
    if shown:
        kinds += ("update", "up", "down") if votes else ("update",)

    def read(value: Any, span: Span) -> Op | str:
        return (
            _vote(value, span, shown)
            if votes and value["op"] in ("up", "down")
            else _distil_op(value, span, shown, limits)
        )

    asked = _Asked(kinds, "return", limits.max_ops, shown, limits.max_chars)
    return _parse(completion, asked, read, thinking)


def parse_merge(
    completion: str, shown: int, *, thinking: bool = False, limits: OpLimits | None = None
) -> ParsedOps:
    """Read an answer about a chunk of `shown` experiences: merge, discard and keep, in order.

    Each experience is named once.
    """
    limits = limits or OpLimits()
    named: set[int] = set()

    def read(value: Any, span: Span) -> Op | str:
        op = _merge_op(value, span, shown, limits)
        if isinstance(op, Op):
            if named.intersection(op.targets):
                return "target named before"
            named.update(op.targets)
        return op

    asked = _Asked(("merge", "discard", "keep"), "keep", shown, shown, limits.max_chars)
    return _parse(completion, asked, read, thinking)


def parse_refine(
    completion: str, *, thinking: bool = False, limits: OpLimits | None = None
) -> ParsedOps:
    """Read an answer to a question: one refine or one return."""
    limits = limits or OpLimits()
    asked = _Asked(("refine", "return"), "return", 1, 0, limits.max_chars)
    return _parse(completion, asked, lambda value, span: _refine_op(value, span, limits), thinking)


def _parse(
    completion: str, asked: _Asked, read: Callable[[Any, Span], Op | str], thinking: bool
) -> ParsedOps:
    """read: returns the op that an object is, or why it is refused."""
    start = _answer(completion, thinking)
    if start is None:
        return ParsedOps((), {"the thinking did not end": 1}, len(completion))
    ops: list[Op] = []
    dropped: Counter[str] = Counter()
    refused: list[tuple[str, Span]] = []
    head: int | None = None
    closed = True
    for value, span in _objects(completion, start):
        head = span[0] if head is None else head
        found = (
            "too many ops"
            if len(ops) >= asked.most
            else "not JSON"
            if value is None
            else read(value, span)
        )
        closed = isinstance(found, Op)
        if isinstance(found, Op):
            ops.append(found)
        else:
            dropped[found] += 1
            refused.append((found, span))
    if head is None and (empty := _NOTHING.search(completion, start)):
        head = empty.start()
        ops.append(Op(asked.nothing, empty.span()))
    if not ops:
        dropped = dropped or Counter({"no op in the answer": 1})
        head = _departure(completion, asked, start, refused)
    assert head is not None
    return ParsedOps(tuple(ops), dict(dropped), head, closed)


def _departure(
    completion: str, asked: _Asked, answer: int, refused: Sequence[tuple[str, Span]]
) -> int:
    """Return where a completion without a usable op departs from those that have one."""
    if not refused:
        return broken_at(completion, answer, None)
    reason, span = refused[0]
    if reason == "not JSON":
        return broken_at(completion, answer, span[0])
    about = "text" if "text" in reason else "target"
    return wrong_at(completion, span, asked.kinds, asked.shown, asked.max_chars, about)


def _answer(completion: str, thinking: bool) -> int | None:
    """Where the answer begins; None while the thinking goes on."""
    end = completion.rfind(THINKING_ENDS)
    if end >= 0:
        return end + len(THINKING_ENDS)
    return None if thinking or THINKING_OPENS in completion else 0


def _objects(text: str, position: int) -> Iterable[tuple[Any, Span]]:
    """JSON objects with an "op", and None for what begins like one and is not JSON; each with its span.

    After ATTEMPTS at something else the rest is one None: each may read the text to its end.
    """
    attempts = 0
    while (position := text.find("{", position)) >= 0:
        if attempts == ATTEMPTS:
            yield None, (position, len(text))
            return
        attempts += 1
        try:
            value, end = DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            broken = _LOOKS_LIKE_AN_OP.match(text, position)
            if broken:
                yield None, (position, broken.end())
            position = broken.end() if broken else position + 1
            continue
        if "op" in value:
            yield value, (position, end)
            position = end
            attempts -= 1
        else:  # an object around the ops, such as {"operations": […]}
            position += 1


def _distil_op(value: Any, span: Span, shown: int, limits: OpLimits) -> Op | str:
    kind = value["op"]
    if kind == "return":
        return Op("return", span)
    if kind not in ("add", "update"):
        return "unknown op"
    text, reason = _text(value, limits)
    if reason:
        return reason
    if kind == "add":
        return Op("add", span, text)
    target = _target(value.get("target"), shown)
    return target if isinstance(target, str) else Op("update", span, text, (target,))


def _vote(value: Any, span: Span, shown: int) -> Op | str:
    target = _target(value.get("target"), shown)
    return target if isinstance(target, str) else Op(value["op"], span, targets=(target,))


def _merge_op(value: Any, span: Span, shown: int, limits: OpLimits) -> Op | str:
    kind = value["op"]
    if kind not in ("merge", "discard", "keep"):
        return "unknown op"
    listed = value.get("targets", value.get("target"))
    found = [_target(one, shown) for one in (listed if isinstance(listed, list) else [listed])]
    for target in found:
        if isinstance(target, str):
            return target
    targets = tuple(dict.fromkeys(target for target in found if isinstance(target, int)))
    if kind != "merge":
        return Op(kind, span, targets=targets) if targets else "no target"
    if len(targets) < 2:
        return "merge of less than two"
    text, reason = _text(value, limits)
    return reason or Op("merge", span, text, targets)


def _refine_op(value: Any, span: Span, limits: OpLimits) -> Op | str:
    if value["op"] == "return":
        return Op("return", span)
    if value["op"] != "refine":
        return "unknown op"
    text, reason = _text(value, limits)
    return reason or Op("refine", span, text)


def _text(value: Any, limits: OpLimits) -> tuple[str, str]:
    """The op's text, and why it is none."""
    text = value.get("text")
    if not isinstance(text, str) or not is_unicode(text):
        return "", "no text"
    text = text.strip()
    if not text:
        return "", "empty text"
    return text, "text too long" if len(text) > limits.max_chars else ""


def _target(value: Any, shown: int) -> int | str:
    """The experience (from 0) of a number in the prompt, or why it is none."""
    number = _number(value)
    if number is None:
        return "no target"
    return number - 1 if 1 <= number <= shown else "target out of range"


def _number(value: Any) -> int | None:
    """A whole number, written as one or as a short string of digits, as models like to do."""
    if isinstance(value, str) and len(value) < 10 and value.isascii() and value.isdigit():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def is_unicode(text: str) -> bool:
    """No lone surrogates, which JSON's \\u escapes can spell and nothing can store."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def token_spans(
    decode: Callable[[Sequence[int]], str], ids: Sequence[int], spans: Sequence[Span]
) -> list[Span]:
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

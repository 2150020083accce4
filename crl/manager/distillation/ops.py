"""Parser for the operations (ops) in an extractor's answer.

Ops are parsed one by one. An invalid op is dropped and counted; the valid ops remain usable.

The answer is the text after the thinking (`crl.modeling.thinking`). The answer about an episode
(CRL §3.2.1) is a JSON list of objects:

    [{"op": "add", "text": "The exit is behind the altar."},
     {"op": "update", "target": 1, "text": "Go southeast first; the exit is behind the altar."},
     {"op": "up", "target": 2},
     {"op": "return"}]

* add: a new experience.
* update: a better text for a retrieved experience. `target` is its number in the prompt, from 1.
* up, down: a vote on a retrieved experience, if the extractor is asked for votes.
* return: the episode teaches nothing. An empty list means the same.

The answer about a chunk of the bank (periodic merge):

    [{"op": "merge", "targets": [1, 4], "text": "Go southeast first, then behind the altar."},
     {"op": "discard", "target": 2},
     {"op": "keep", "target": 3}]

* merge: one text that replaces several experiences.
* discard: an experience that is wrong or says nothing.
* keep: an experience that stays unchanged. Experiences without an op stay unchanged too.

The answer to a question of an agent (search_and_ask):

    [{"op": "refine", "text": "The altar is two rooms east of you."}]

* refine: the retrieved experience, rewritten for the agent's situation.
* return: the retrieved experience stays unchanged.

Objects are read at any position: in a code fence, between sentences, one after the other without a
list, or inside another object.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from crl.manager.distillation.departure import DECODER, Span, json_departure, op_departure
from crl.modeling.thinking import answer_start

OpKind = Literal["add", "update", "return", "up", "down", "merge", "discard", "keep", "refine"]

MAX_ATTEMPTS = 256
"""Maximum number of opening braces without an op that are tried in one answer."""

_OP_START = re.compile(r'\{\s*["\']?op\b')
_EMPTY_LIST = re.compile(r"\[\s*\]")


@dataclass(frozen=True, slots=True)
class OpLimits:
    """Limits of one answer of the extractor."""

    max_ops: int = 3
    """Maximum number of ops about an episode. The prompt `distil` asks for at most as many."""
    max_chars: int = 2000
    """Maximum number of characters of one text."""


@dataclass(frozen=True, slots=True)
class Op:
    """Operation in an answer of the extractor."""

    kind: OpKind
    span: Span
    """Characters [start, stop) of the op in the completion."""
    text: str = ""
    targets: tuple[int, ...] = ()
    """Experiences in the prompt, from 0.

    An update or a vote has one target, a discard or a keep at least one, a merge at least two.
    """

    @property
    def is_vote(self) -> bool:
        """True if the op is an up vote or a down vote."""
        return self.kind in ("up", "down")


@dataclass(frozen=True, slots=True)
class ParsedOps:
    """Ops of one answer, with the data that is needed to train the text around the ops."""

    ops: tuple[Op, ...]
    """Usable ops, in order."""
    dropped: Mapping[str, int]
    """Number of refused ops, by reason."""
    head_chars: int
    """Number of characters before the first op, whether that op is usable or refused.

    For a malformed answer: number of leading characters that it shares with usable answers
    (`crl.manager.distillation.departure`). This is the whole length if the answer ended too early.
    """
    ends_cleanly: bool = True
    """True if no refused op follows the last usable op. The text after it then ends the answer."""

    @property
    def malformed(self) -> bool:
        """True if the completion has no usable op, not even a `return`."""
        return not self.ops


@dataclass(frozen=True, slots=True)
class _AnswerRules:
    """Allowed content of an answer."""

    kinds: tuple[OpKind, ...]
    """Allowed kinds of ops. An update or a vote needs an experience in the prompt."""
    empty_list_op: OpKind
    """Op that an empty list means."""
    max_ops: int
    """Maximum number of ops in one answer."""
    num_shown: int
    """Number of experiences in the prompt."""
    max_chars: int
    """Maximum number of characters of one text."""


def parse_ops(
    completion: str,
    num_shown: int,
    *,
    thinking: bool = False,
    votes: bool = False,
    limits: OpLimits | None = None,
) -> ParsedOps:
    """Parse an answer about an episode. The ops keep their order.

    The kinds are add, update and return, and with `votes` also up and down.

    * num_shown: number of experiences in the prompt.
    * thinking: True if the prompt opened the thinking. The answer then starts after its end.

    Any text can be parsed: no error is raised and nothing is evaluated.
    """
    limits = limits or OpLimits()
    kinds: tuple[OpKind, ...] = ("add", "return")
    if num_shown:
        kinds += ("update", "up", "down") if votes else ("update",)

    def parse_op(value: Any, span: Span) -> Op | str:
        return (
            _vote(value, span, num_shown)
            if votes and value["op"] in ("up", "down")
            else _distil_op(value, span, num_shown, limits)
        )

    rules = _AnswerRules(kinds, "return", limits.max_ops, num_shown, limits.max_chars)
    return _parse(completion, rules, parse_op, thinking)


NoteReader = Callable[[str], tuple[str, str]]
"""Function from an answer after its thinking to the text of a note and the reason for refusal.

The reason is empty for a usable answer.
"""


def parse_note(
    completion: str,
    *,
    thinking: bool = False,
    limits: OpLimits | None = None,
    read: NoteReader | None = None,
) -> ParsedOps:
    """Parse an answer that is the text of one new experience: an add.

    The text is all that follows the thinking, without white space around it, or what `read` finds
    in it. It is refused if it is empty or longer than `limits.max_chars`.
    """
    limits = limits or OpLimits()
    start = answer_start(completion, thinking=thinking)
    if start is None:
        return ParsedOps((), {"the thinking did not end": 1}, len(completion))
    answer = completion[start:]
    text, reason = read(answer) if read else (answer, "")
    if not reason:
        text, reason = _text(text, limits)
    if reason:
        return ParsedOps((), {reason: 1}, start)
    begin = start + len(answer) - len(answer.lstrip())
    return ParsedOps((Op("add", (begin, len(completion)), text),), {}, begin)


def parse_merge(
    completion: str, num_shown: int, *, thinking: bool = False, limits: OpLimits | None = None
) -> ParsedOps:
    """Parse an answer about a chunk of `num_shown` experiences. The ops keep their order.

    The kinds are merge, discard and keep. An op that names an experience a second time is refused.
    """
    limits = limits or OpLimits()
    used_targets: set[int] = set()

    def parse_op(value: Any, span: Span) -> Op | str:
        op = _merge_op(value, span, num_shown, limits)
        if isinstance(op, Op):
            if used_targets.intersection(op.targets):
                return "target named before"
            used_targets.update(op.targets)
        return op

    rules = _AnswerRules(
        ("merge", "discard", "keep"), "keep", num_shown, num_shown, limits.max_chars
    )
    return _parse(completion, rules, parse_op, thinking)


def parse_refine(
    completion: str, *, thinking: bool = False, limits: OpLimits | None = None
) -> ParsedOps:
    """Parse an answer to a question: one refine or one return."""
    limits = limits or OpLimits()
    rules = _AnswerRules(("refine", "return"), "return", 1, 0, limits.max_chars)
    return _parse(completion, rules, lambda value, span: _refine_op(value, span, limits), thinking)


def _parse(
    completion: str, rules: _AnswerRules, parse_op: Callable[[Any, Span], Op | str], thinking: bool
) -> ParsedOps:
    """Parse the ops of an answer.

    `parse_op` returns the op of an object or the reason for refusal.
    """
    start = answer_start(completion, thinking=thinking)
    if start is None:
        return ParsedOps((), {"the thinking did not end": 1}, len(completion))
    ops: list[Op] = []
    dropped: Counter[str] = Counter()
    refused: list[tuple[str, Span]] = []
    head_chars: int | None = None
    ends_cleanly = True
    for value, span in _objects(completion, start):
        head_chars = span[0] if head_chars is None else head_chars
        found = (
            "too many ops"
            if len(ops) >= rules.max_ops
            else "not JSON"
            if value is None
            else parse_op(value, span)
        )
        ends_cleanly = isinstance(found, Op)
        if isinstance(found, Op):
            ops.append(found)
        else:
            dropped[found] += 1
            refused.append((found, span))
    if head_chars is None and (empty := _EMPTY_LIST.search(completion, start)):
        head_chars = empty.start()
        ops.append(Op(rules.empty_list_op, empty.span()))
    if not ops:
        dropped = dropped or Counter({"no op in the answer": 1})
        head_chars = _departure(completion, rules, start, refused)
    assert head_chars is not None
    return ParsedOps(tuple(ops), dict(dropped), head_chars, ends_cleanly)


def _departure(
    completion: str, rules: _AnswerRules, answer: int, refused: Sequence[tuple[str, Span]]
) -> int:
    """Return the position at which a completion without a usable op departs from usable ones."""
    if not refused:
        return json_departure(completion, answer, None)
    reason, span = refused[0]
    if reason == "not JSON":
        return json_departure(completion, answer, span[0])
    refused_key = "text" if "text" in reason else "target"
    return op_departure(
        completion, span, rules.kinds, rules.num_shown, rules.max_chars, refused_key
    )


def _objects(text: str, position: int) -> Iterable[tuple[Any, Span]]:
    """Yield the JSON objects with an "op" key, each with its span.

    Yield None in place of an object that looks like an op but is not valid JSON. After
    `MAX_ATTEMPTS` braces that open no op, yield a single None for the rest of the text, because
    every attempt may read the text to its end.
    """
    attempts = 0
    while (position := text.find("{", position)) >= 0:
        if attempts == MAX_ATTEMPTS:
            yield None, (position, len(text))
            return
        attempts += 1
        try:
            value, end = DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            broken = _OP_START.match(text, position)
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


def _distil_op(value: Any, span: Span, num_shown: int, limits: OpLimits) -> Op | str:
    kind = value["op"]
    if kind == "return":
        return Op("return", span)
    if kind not in ("add", "update"):
        return "unknown op"
    text, reason = _text(value.get("text"), limits)
    if reason:
        return reason
    if kind == "add":
        return Op("add", span, text)
    target = _target(value.get("target"), num_shown)
    return target if isinstance(target, str) else Op("update", span, text, (target,))


def _vote(value: Any, span: Span, num_shown: int) -> Op | str:
    target = _target(value.get("target"), num_shown)
    return target if isinstance(target, str) else Op(value["op"], span, targets=(target,))


def _merge_op(value: Any, span: Span, num_shown: int, limits: OpLimits) -> Op | str:
    kind = value["op"]
    if kind not in ("merge", "discard", "keep"):
        return "unknown op"
    listed = value.get("targets", value.get("target"))
    found = [
        _target(number, num_shown) for number in (listed if isinstance(listed, list) else [listed])
    ]
    for target in found:
        if isinstance(target, str):
            return target
    targets = tuple(dict.fromkeys(target for target in found if isinstance(target, int)))
    if kind != "merge":
        return Op(kind, span, targets=targets) if targets else "no target"
    if len(targets) < 2:
        return "merge of less than two"
    text, reason = _text(value.get("text"), limits)
    return reason or Op("merge", span, text, targets)


def _refine_op(value: Any, span: Span, limits: OpLimits) -> Op | str:
    if value["op"] == "return":
        return Op("return", span)
    if value["op"] != "refine":
        return "unknown op"
    text, reason = _text(value.get("text"), limits)
    return reason or Op("refine", span, text)


def _text(text: Any, limits: OpLimits) -> tuple[str, str]:
    """Return the text without white space around it, and the reason for refusal.

    The reason is empty for a usable text.
    """
    if not isinstance(text, str) or not is_encodable(text):
        return "", "no text"
    text = text.strip()
    if not text:
        return "", "empty text"
    return text, "text too long" if len(text) > limits.max_chars else ""


def _target(value: Any, num_shown: int) -> int | str:
    """Return the experience (from 0) of a number in the prompt, or the reason for refusal."""
    number = _number(value)
    if number is None:
        return "no target"
    return number - 1 if 1 <= number <= num_shown else "target out of range"


def _number(value: Any) -> int | None:
    """Return an integer that is given as a number or as a short string of digits, else None.

    Models often write numbers as strings.
    """
    if isinstance(value, str) and len(value) < 10 and value.isascii() and value.isdigit():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def is_encodable(text: str) -> bool:
    """Return whether the text has no lone surrogates.

    JSON's \\u escapes can produce lone surrogates, but such a text cannot be encoded for storage.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def token_spans(
    decode: Callable[[Sequence[int]], str], ids: Sequence[int], spans: Sequence[Span]
) -> list[Span]:
    """Return the token ranges [start, stop) of character spans of `decode(ids)`.

    `spans` are in order. The ranges do not overlap. A token across the border of a span belongs to
    the span. A token that lies in two spans belongs to the earlier one.
    """
    stop = 0
    ranges = []
    for first, end in spans:
        start = max(stop, _tokens_until(decode, ids, first + 1) - 1)
        stop = max(start, _tokens_until(decode, ids, end))
        ranges.append((start, stop))
    return ranges


def _tokens_until(decode: Callable[[Sequence[int]], str], ids: Sequence[int], chars: int) -> int:
    """Return the smallest number of tokens whose text has at least `chars` complete characters."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        # The bytes of an incomplete character decode to U+FFFD. Without these, the text never gets
        # shorter when a token is added.
        if len(decode(ids[:middle]).rstrip("\ufffd")) >= chars:
            high = middle
        else:
            low = middle + 1
    return low

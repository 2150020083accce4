"""JSON schemas of the answers that the extractor's prompts ask for.

An engine that supports structured outputs samples only completions that match such a schema
(`Sampling.json_schema`). The schemas have the form of the examples in the prompts: a JSON list of
objects whose first key is "op". They are stricter than the parser (`ops`), which also accepts other
forms.

The parser refuses a few operations that match a schema, because the schemas use only keywords that
xgrammar supports: a text of spaces alone, and a target that was named before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crl.manager.distillation.ops import OpKind, OpLimits

Schema = dict[str, Any]
"""JSON schema."""


def distil_schema(
    num_shown: int, *, votable: Sequence[int] = (), limits: OpLimits | None = None
) -> Schema:
    """Return the schema of an answer about an episode.

    * num_shown: number of experiences in the prompt.
    * votable: numbers of the experiences that the extractor may vote on; empty for no votes.
    """
    limits = limits or OpLimits()
    ops = [_op("add", text=_text(limits)), _op("return")]
    if num_shown:
        ops.append(_op("update", target=_number(num_shown), text=_text(limits)))
    if votable:
        ops += [_op(vote, target={"enum": list(votable)}) for vote in ("up", "down")]
    return _list_of(ops, 1, limits.max_ops)


def merge_schema(num_shown: int, *, limits: OpLimits | None = None) -> Schema:
    """Return the schema of an answer about a chunk of `num_shown` experiences."""
    limits = limits or OpLimits()
    number = _number(num_shown)
    ops = [_op("discard", target=number), _op("keep", target=number)]
    if num_shown > 1:
        targets = {"type": "array", "items": number, "minItems": 2, "maxItems": num_shown}
        ops.append(_op("merge", targets=targets, text=_text(limits)))
    return _list_of(ops, 0, num_shown)


def refine_schema(limits: OpLimits | None = None) -> Schema:
    """Return the schema of an answer to a question."""
    return _list_of([_op("refine", text=_text(limits or OpLimits())), _op("return")], 1, 1)


def _list_of(ops: Sequence[Schema], min_ops: int, max_ops: int) -> Schema:
    return {
        "type": "array",
        "items": {"anyOf": list(ops)},
        "minItems": min_ops,
        "maxItems": max_ops,
    }


def _op(kind: OpKind, **fields: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {"op": {"const": kind}, **fields},
        "required": ["op", *fields],
        "additionalProperties": False,
    }


def _text(limits: OpLimits) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": limits.max_chars}


def _number(num_shown: int) -> Schema:
    return {"enum": list(range(1, num_shown + 1))}

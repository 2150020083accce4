"""Schemas of answers, compared with the parser and with the examples in the prompts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crl.config.schema import AskSection, BankSection, ExtractorSection
from crl.engines.scripted import ScriptedEngine
from crl.manager import ManagerSettings
from crl.manager.distillation.ops import (
    OpLimits,
    ParsedOps,
    is_encodable,
    parse_merge,
    parse_ops,
    parse_refine,
)
from crl.manager.distillation.schemas import Schema, distil_schema, merge_schema, refine_schema
from crl.protocols import Question
from crl.types import Completion, Sampling, Segment
from support.doors import renderer
from support.managers import PROMPTS, RETURN, add, hit, open_manager, request, task
from support.prompt_examples import prompt_examples

LIMITS = OpLimits(max_chars=12)


def values(schema: Schema) -> st.SearchStrategy[Any]:
    """Return a strategy of the values that match a schema of this module, without empty texts."""
    if "anyOf" in schema:
        return st.one_of([values(part) for part in schema["anyOf"]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema["type"] == "string":
        texts = st.text(min_size=schema["minLength"], max_size=schema["maxLength"])
        return texts.filter(lambda text: bool(text.strip()) and is_encodable(text))
    if schema["type"] == "array":
        items = values(schema["items"])
        sizes = {"min_size": schema["minItems"], "max_size": schema["maxItems"]}
        # Targets of a merge: a schema cannot say that they differ.
        return st.lists(items, unique="enum" in schema["items"], **sizes)
    assert schema["required"] == list(schema["properties"])
    assert not schema["additionalProperties"]
    return st.fixed_dictionaries({k: values(part) for k, part in schema["properties"].items()})


def matches(value: Any, schema: Schema) -> bool:
    """Return whether a value matches a schema of this module."""
    if "anyOf" in schema:
        return any(matches(value, part) for part in schema["anyOf"])
    if "const" in schema:
        return value == schema["const"]
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "string":
        return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
    if schema["type"] == "array":
        sized = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return sized and all(matches(item, schema["items"]) for item in value)
    # Engines hold answers to the order of the keys, too.
    return list(value) == schema["required"] and all(
        matches(value[key], part) for key, part in schema["properties"].items()
    )


def assert_parsed(answer: Any, parsed: ParsedOps, refusals: set[str]) -> None:
    assert parsed.dropped.keys() <= refusals, answer
    assert len(parsed.ops) + sum(parsed.dropped.values()) == max(1, len(answer))


@given(st.data(), st.integers(0, 4), st.booleans())
def test_answers_about_episodes_are_parsed(data: st.DataObject, shown: int, votes: bool) -> None:
    numbers = list(range(1, shown + 1))
    votable = data.draw(st.lists(st.sampled_from(numbers), unique=True)) if shown and votes else []
    answer = data.draw(values(distil_schema(shown, votable=votable, limits=LIMITS)))
    parsed = parse_ops(json.dumps(answer), shown, votes=votes, limits=LIMITS)
    assert_parsed(answer, parsed, set())
    assert {op.targets[0] + 1 for op in parsed.ops if op.is_vote} <= set(votable)


@given(st.data(), st.integers(1, 6))
def test_answers_about_chunks_are_parsed(data: st.DataObject, shown: int) -> None:
    answer = data.draw(values(merge_schema(shown, limits=LIMITS)))
    parsed = parse_merge(json.dumps(answer), shown, limits=LIMITS)
    assert_parsed(answer, parsed, {"target named before"})
    assert parsed.ops


@given(st.data())
def test_answers_to_questions_are_parsed(data: st.DataObject) -> None:
    answer = data.draw(values(refine_schema(LIMITS)))
    assert_parsed(answer, parse_refine(json.dumps(answer), limits=LIMITS), set())


@pytest.mark.parametrize(
    ("name", "schema", "count"),
    [
        ("distil", distil_schema(1), 2),
        ("vote", distil_schema(2, votable=[1, 2]), 1),
        ("merge", merge_schema(4), 2),
        ("refine", refine_schema(), 2),
    ],
)
def test_the_examples_in_the_prompts_match(name: str, schema: Schema, count: int) -> None:
    examples = [json.loads(example) for example in prompt_examples(name)]
    assert len(examples) == count
    for example in examples:
        assert matches(example, schema)


@pytest.mark.parametrize(
    ("answer", "schema"),
    [
        ([], distil_schema(1)),
        ([{"op": "return"}] * 4, distil_schema(1)),
        ([{"op": "add", "text": ""}], distil_schema(1)),
        ([{"op": "add", "text": "x" * 2001}], distil_schema(1)),
        ([{"op": "update", "target": 1, "text": "x"}], distil_schema(0)),
        ([{"op": "update", "target": 2, "text": "x"}], distil_schema(1)),
        ([{"op": "up", "target": 1}], distil_schema(1)),
        ([{"op": "up", "target": 2}], distil_schema(2, votable=[1])),
        ([{"op": "merge", "targets": [1], "text": "x"}], merge_schema(3)),
        ([{"op": "merge", "targets": [1, 1], "text": "x"}], merge_schema(1)),
        ([{"op": "discard", "target": 0}], merge_schema(3)),
        ([], refine_schema()),
        ([{"op": "return"}] * 2, refine_schema()),
        ([{"op": "add", "text": "x"}], refine_schema()),
    ],
)
def test_other_answers_do_not_match(answer: Any, schema: Schema) -> None:
    assert not matches(answer, schema)


# ── requests of the manager ───────────────────────────────────────────────────────────────────────


class SchemaEngine(ScriptedEngine):
    """Engine that records the schema of every request."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        super().__init__(renderer(), answer)
        self.schemas: list[Schema | None] = []

    async def generate(self, ids: Any, sampling: Sampling, **options: Any) -> Completion:
        text = sampling.json_schema
        self.schemas.append(json.loads(text) if text else None)
        return await super().generate(ids, replace(sampling, json_schema=""), **options)


def refine_prompt(question: Question, found: Any) -> list[Segment]:
    return [Segment("user", f"{question.query} {found.text}", "task")]


@pytest.mark.parametrize("structured", [True, False])
async def test_every_request_has_the_schema_of_its_prompt(
    tmp_path: Path, *, structured: bool
) -> None:
    """Check requests about episodes, a question and a merge.

    Only an experience that the agent read in its own words has a vote.
    """
    engine = SchemaEngine(lambda prompt: add("Go west.") if "first" in prompt else RETURN)
    settings = ManagerSettings(
        extractor=ExtractorSection(train=False, structured_outputs=structured),
        bank=BankSection(evict_votes=2),
        ask=AskSection(enabled=True),
    )
    prompts = replace(PROMPTS, refine=refine_prompt)
    manager = await open_manager(tmp_path / "bank.sqlite", engine, settings, prompts=prompts)
    own, reworded = hit("a#1"), hit("b#1")
    reworded = replace(reworded, use=replace(reworded.use, how="ask"))
    try:
        for index, shown in enumerate([(), (own, reworded), (reworded,)]):
            await manager.submit(request(group=index, note="first", shown=shown))
            await manager.drain()
        question = Question("q", task(), "Where?", (Segment("user", "at 2 3", "env"),))
        await asyncio.wait_for(manager.refine(question, own), 10)
        await manager.merge()
    finally:
        await manager.aclose()
    expected = [
        distil_schema(0),
        distil_schema(2, votable=[1]),
        distil_schema(1),
        refine_schema(),
        merge_schema(3),
    ]
    assert engine.schemas == (expected if structured else [None] * 5)

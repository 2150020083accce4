"""In-process engine with real tiny models.

The reference is the forward pass and `generate` of transformers.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import GPTJConfig, GPTJForCausalLM, PreTrainedModel

from crl.engines import PREFILL_TOKENS
from crl.engines.passes import MAX_STACKED_TOKENS, Pass
from crl.engines.torch import (
    MIN_PREFILL_TOKENS,
    MIN_SHARED_TOKENS,
    Request,
    prefill_limit,
    sample,
)
from crl.errors import EngineError, RolloutError
from crl.modeling.loading import InProcessWeights, load_model
from crl.types import Completion, Sampling
from support.torch_engines import (
    NEVER,
    Passes,
    V,
    greedy,
    prompts,
    qwen2,
    reference,
    serving,
    settled,
    true_logprobs,
)

# ── the same tokens as transformers ───────────────────────────────────────────────────────────────


@pytest.fixture(params=["qwen2", "qwen3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return (
        qwen2()
        if request.param == "qwen2"
        else load_model(request.getfixturevalue("random_qwen3"), torch.device("cpu"))
    )


async def test_greedy_equals_generate_for_a_ragged_batch(model: PreTrainedModel) -> None:
    prompt_list = prompts(1, 2, 3, 17, 40, 9, 25)
    async with serving(model) as engine:
        done = await asyncio.gather(
            *(engine.generate(p, greedy(12 + 3 * i)) for i, p in enumerate(prompt_list))
        )
    for i, (prompt, completion) in enumerate(zip(prompt_list, done, strict=True)):
        assert completion.ids == reference(model, prompt, 12 + 3 * i)
        assert completion.logprobs == pytest.approx(
            true_logprobs(model, prompt, completion.ids), abs=1e-4
        )
        assert completion.versions == (0,) * len(completion.ids)
        assert completion.finish == "length"


async def test_requests_that_join_and_leave_while_others_decode(model: PreTrainedModel) -> None:
    prompt_list, lengths = prompts(30, 4, 11, 50, 7, 1), [40, 3, 25, 9, 1, 30]
    async with serving(model, max_batch=4) as engine:
        passes = Passes(model)
        for number in (3, 8, 15):
            passes.hold(number)
        waves = [prompt_list[:2], prompt_list[2:3], prompt_list[3:5], prompt_list[5:]]
        tasks = []
        for i, wave in enumerate(waves):
            if i:
                await passes.held()
            tasks += [
                asyncio.create_task(engine.generate(p, greedy(lengths[prompt_list.index(p)])))
                for p in wave
            ]
            await settled()
            passes.go() if i else None
        done = await asyncio.gather(*tasks)
    assert max(map(len, passes.read)) > 2, "requests shared passes"
    assert [c.ids for c in done] == [
        reference(model, p, n) for p, n in zip(prompt_list, lengths, strict=True)
    ]


async def test_the_cache_grows_with_a_sequence_and_for_a_long_prompt() -> None:
    model = qwen2()
    # The sequences grow beyond 128 tokens, beyond 128 and 256, and beyond 256. The last prompt is
    # already longer than 256.
    prompt_list, lengths = (
        prompts(100, 10, 200, 300),
        [60, 280, 80, 20],
    )
    async with serving(model) as engine:
        first = [
            asyncio.create_task(engine.generate(p, greedy(n)))
            for p, n in zip(prompt_list[:2], lengths[:2], strict=True)
        ]
        one = await first[0]
        rest = await asyncio.gather(
            first[1],
            *(
                engine.generate(p, greedy(n))
                for p, n in zip(prompt_list[2:], lengths[2:], strict=True)
            ),
        )
    assert [c.ids for c in (one, *rest)] == [
        reference(model, p, n) for p, n in zip(prompt_list, lengths, strict=True)
    ]


async def test_more_requests_than_cache_rows() -> None:
    model = qwen2()
    prompt_list = prompts(*range(1, 14))
    async with serving(model, max_batch=3) as engine:
        passes = Passes(model)
        done = await asyncio.gather(
            *(engine.generate(p, greedy(3 + len(p) % 4)) for p in prompt_list)
        )
        assert engine.sampled_tokens == sum(len(c.ids) for c in done)
    assert max(map(len, passes.read)) == 3
    assert [c.ids for c in done] == [reference(model, p, 3 + len(p) % 4) for p in prompt_list]


async def test_prefill_passes_are_limited_and_a_longer_prompt_is_read_in_chunks() -> None:
    model = qwen2()
    prompt_list = prompts(*[300] * 9, PREFILL_TOKENS + 100, 5)
    async with serving(model, max_batch=16) as engine:
        passes = Passes(model)
        done = await asyncio.gather(*(engine.generate(p, greedy(2)) for p in prompt_list))
    fit = PREFILL_TOKENS // 300
    assert passes.read == [
        (300,) * fit,
        (*(1,) * fit, *(300,) * (9 - fit)),
        (*(1,) * (9 - fit), PREFILL_TOKENS),
        (100,),
        (1, 5),
        (1,),
    ]
    assert [c.ids for c in done] == [reference(model, p, 2) for p in prompt_list]


async def test_stop_tokens_end_a_completion_and_are_part_of_it() -> None:
    model = qwen2()
    (prompt,) = prompts(12)
    path = reference(model, prompt, 30)
    # The positions at which a token appears for the first time.
    new = [i for i, token in enumerate(path) if token not in path[:i]]
    early, late = new[2], new[4]
    async with serving(model) as engine:
        at_early = await engine.generate(prompt, greedy(30, [path[late], path[early]]))
        at_late = await engine.generate(prompt, greedy(30, [path[late]]))
        at_once = await engine.generate(prompt, greedy(30, [path[0]]))
        on_the_limit = await engine.generate(prompt, greedy(late + 1, [path[late]]))
        before_it = await engine.generate(prompt, greedy(late, [path[late]]))
    assert (at_early.ids, at_early.finish) == (path[: early + 1], "stop")
    assert (at_late.ids, at_late.finish) == (path[: late + 1], "stop")
    assert (at_once.ids, at_once.finish) == (path[:1], "stop")
    assert (on_the_limit.ids, on_the_limit.finish) == (path[: late + 1], "stop")
    assert (before_it.ids, before_it.finish) == (path[:late], "length")
    assert at_early.ids == reference(model, prompt, 30, [path[late], path[early]])


async def test_score_equals_the_log_softmax() -> None:
    model = qwen2()
    (ids,) = prompts(20)
    async with serving(model) as engine:
        scores, one, _ = await asyncio.gather(
            engine.score(ids), engine.score(ids[:1]), engine.generate(ids, greedy(5))
        )
    assert scores == pytest.approx(true_logprobs(model, ids[:1], ids[1:]), abs=1e-5)
    assert list(one) == []


# ── passes ────────────────────────────────────────────────────────────────────────────────────────


async def test_equal_prompts_that_arrive_together_are_read_once(model: PreTrainedModel) -> None:
    shared, other = prompts(30, 12)
    async with serving(model) as engine:
        passes = Passes(model)
        prompt_list = [shared, shared, other, shared]
        turns = [
            engine.generate(p, Sampling(8 + i, NEVER), session=str(i), rng=i)
            for i, p in enumerate(prompt_list)
        ]
        done = await asyncio.gather(*turns)
        assert passes.read[:2] == [(12, 30), (1, 1, 1, 1)]
        later = [(*p, *c.ids, 5) for p, c in zip(prompt_list, done, strict=True)]
        again = await asyncio.gather(
            *(engine.generate(p, greedy(4), session=str(i)) for i, p in enumerate(later))
        )
        alone = [
            await engine.generate(p, Sampling(8 + i, NEVER), rng=i)
            for i, p in enumerate(prompt_list)
        ]
    for prompt, completion, single in zip(prompt_list, done, alone, strict=True):
        assert completion.ids == single.ids
        assert completion.logprobs == pytest.approx(
            true_logprobs(model, prompt, completion.ids), abs=1e-4
        )
    assert [c.ids for c in again] == [reference(model, p, 4) for p in later]


async def test_equal_prompts_count_once_in_the_prefill_limit() -> None:
    model = qwen2()
    (shared,) = prompts(PREFILL_TOKENS - 100)
    async with serving(model) as engine:
        passes = Passes(model)
        await asyncio.gather(*(engine.generate(shared, greedy(2)) for _ in range(4)))
    assert passes.read == [(len(shared),), (1, 1, 1, 1)]


@pytest.mark.parametrize(
    ("width", "mask"),
    [
        (MAX_STACKED_TOKENS, (1, 1, 2 * MAX_STACKED_TOKENS, MAX_STACKED_TOKENS)),
        (MAX_STACKED_TOKENS + 1, (1, 1, MAX_STACKED_TOKENS + 1, MAX_STACKED_TOKENS + 1)),
    ],
)
def test_masks_of_long_prompts_are_not_repeated_for_grouped_queries(
    width: int, mask: tuple[int, ...]
) -> None:
    draw = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(shape, generator=draw)
        for shape in ((width, 4, 8), (1, 2, 64, 8), (1, 2, 64, 8))
    )
    (block,) = Pass([[1] * width], [0], 0, torch.device("cpu")).blocks
    out = block.attend(query, keys, values, None)
    assert [tuple(m.shape) for m in block._masks.values()] == [mask]
    k, v = (x[0, :, :width].repeat_interleave(2, 0) for x in (keys, values))
    whole = scaled_dot_product_attention(query.transpose(0, 1), k, v, is_causal=True).transpose(
        0, 1
    )
    torch.testing.assert_close(out, whole)


async def test_prompts_are_read_while_others_decode() -> None:
    model = qwen2()
    first, late = prompts(10, 6)
    async with serving(model) as engine:
        passes = Passes(model)
        passes.hold(2)
        one = asyncio.create_task(engine.generate(first, greedy(5)))
        await passes.held()
        two = asyncio.create_task(engine.generate(late, greedy(3)))
        await settled()
        passes.go()
        done = await asyncio.gather(one, two)
    assert passes.read == [(10,), (1,), (1,), (1, 6), (1, 1), (1,)]
    assert [c.ids for c in done] == [reference(model, first, 5), reference(model, late, 3)]


async def test_others_decode_finish_and_are_cancelled_while_a_prompt_is_read_in_chunks() -> None:
    model = qwen2()
    shorts = prompts(9, 10, 11)
    (long,) = prompts(350)
    async with serving(model) as engine:
        engine._decoder.prefill_limit = 100
        passes = Passes(model)
        passes.hold(1)
        first, second, third = (
            asyncio.create_task(engine.generate(p, greedy(n)))
            for p, n in zip(shorts, (3, 9, 20), strict=True)
        )
        await passes.held()
        long_ones = [asyncio.create_task(engine.generate(long, greedy(4))) for _ in range(2)]
        await settled()
        passes.hold(3)
        passes.go()
        await passes.held()
        third.cancel()
        passes.go()
        done = await asyncio.gather(first, second, *long_ones)
    chunks = [(1, 1, 1, 100), (1, 1, 100), (1, 100), (1, 50)]
    assert passes.read[1:7] == [(1, 1, 1), *chunks, (1, 1, 1)]
    assert [c.ids for c in done] == [
        reference(model, p, n) for p, n in zip((*shorts[:2], long, long), (3, 9, 4, 4), strict=True)
    ]


async def test_a_cancelled_long_prompt_makes_room_and_a_swap_waits_for_it() -> None:
    model, newer = qwen2(), qwen2(seed=1)
    long, short = prompts(350, 8)
    expected = reference(qwen2(), long, 4)
    async with serving(model) as engine:
        engine._decoder.prefill_limit = 100
        passes = Passes(model)
        passes.hold(2)
        cancelled = asyncio.create_task(engine.generate(long, greedy(4)))
        await passes.held()
        cancelled.cancel()
        after = asyncio.create_task(engine.generate(short, greedy(3)))
        await settled()
        passes.hold(7)
        passes.go()
        assert (await after).ids == reference(qwen2(), short, 3)
        again = asyncio.create_task(engine.generate(long, greedy(4)))
        await passes.held()
        handle = InProcessWeights.snapshot(newer, version=1)
        swap = asyncio.create_task(engine.update_weights(handle))
        await settled()
        passes.go()
        old, _ = await asyncio.gather(again, swap)
        new = await engine.generate(long, greedy(4))
    assert (old.ids, old.versions) == (expected, (0,) * 4)
    assert (new.ids, new.versions) == (reference(newer, long, 4), (1,) * 4)


async def test_a_prompt_copies_what_it_shares_with_a_running_request(
    model: PreTrainedModel,
) -> None:
    (first,) = prompts(60)
    second, little = (*first[:50], 3, 4, 5), (*first[: MIN_SHARED_TOKENS - 1], 3, 4)
    async with serving(model) as engine:
        passes = Passes(model)
        passes.hold(2)
        one = asyncio.create_task(engine.generate(first, greedy(12)))
        await passes.held()
        others = [
            asyncio.create_task(engine.generate(p, greedy(5))) for p in (second, first, little)
        ]
        await settled()
        passes.go()
        done = await asyncio.gather(one, *others)
    assert sorted(passes.read[3][1:]) == sorted((len(second) - 50, 1, len(little)))
    assert [c.ids for c in done] == [
        reference(model, p, n) for p, n in ((first, 12), (second, 5), (first, 5), (little, 5))
    ]


@pytest.mark.parametrize(
    ("parameters", "device", "limit"),
    [(200_000, "cpu", PREFILL_TOKENS), (125_000_000, "cpu", 200),
     (7_000_000_000, "cpu", MIN_PREFILL_TOKENS), (7_000_000_000, "cuda", PREFILL_TOKENS)],
)  # fmt: skip
def test_larger_models_read_less_in_a_pass_of_a_cpu(
    parameters: int, device: str, limit: int
) -> None:
    model: Any = SimpleNamespace(device=torch.device(device), num_parameters=lambda: parameters)
    assert prefill_limit(model) == limit


async def test_arrivals_cancellations_and_swaps_are_noticed_within_a_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that the compute thread looks for events between passes. Slices have no time limit."""
    monkeypatch.setattr("crl.engines.torch.SLICE_S", math.inf)
    model, new = qwen2(), qwen2(seed=1)
    (prompt,) = prompts(5)
    async with serving(model, max_batch=2) as engine:
        endless = [
            asyncio.create_task(engine.generate(prompt, Sampling(4000, NEVER), rng=i))
            for i in range(2)
        ]
        await settled()
        endless[0].cancel()
        assert (await engine.generate(prompt, greedy(6))).ids == reference(qwen2(), prompt, 6), (
            "the freed row is used again"
        )
        swap = asyncio.create_task(engine.update_weights(InProcessWeights.snapshot(new, version=1)))
        await settled()
        endless[1].cancel()
        await swap
        assert (await engine.generate(prompt, greedy(6))).ids == reference(new, prompt, 6)


async def test_scoring_does_not_wait_for_decoding_requests() -> None:
    model = qwen2()
    (prompt,) = prompts(5)
    async with serving(model) as engine:
        endless = asyncio.create_task(engine.generate(prompt, greedy(4000)))
        await settled()
        await engine.score(prompt)
        assert not endless.done()
        endless.cancel()


async def test_a_model_whose_attention_cannot_be_replaced_is_served_in_padded_blocks() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPTJConfig(
            vocab_size=V,
            n_embd=32,
            n_layer=2,
            n_head=4,
            rotary_dim=4,
            n_positions=256,
            initializer_range=0.25,
        )
        model = GPTJForCausalLM(config).eval()
    assert not model._can_set_attn_implementation()
    prompt_list = prompts(1, 17, 40, 9)
    async with serving(model) as engine:
        passes = Passes(model)
        passes.hold(2)
        first = [
            asyncio.create_task(engine.generate(p, Sampling(12, NEVER), session=str(p), rng=3))
            for p in prompt_list[:3]
        ]
        await passes.held()
        late = asyncio.create_task(
            engine.generate(prompt_list[3], Sampling(12, NEVER), session=str(prompt_list[3]), rng=3)
        )
        await settled()
        passes.go()
        done = await asyncio.gather(*first, late)
        later = [(*p, *c.ids, 1, 2) for p, c in zip(prompt_list, done, strict=True)]
        again = await asyncio.gather(
            *(
                engine.generate(q, greedy(4), session=str(p))
                for p, q in zip(prompt_list, later, strict=True)
            )
        )
    for prompt, completion in zip(prompt_list, done, strict=True):
        assert completion.logprobs == pytest.approx(
            true_logprobs(model, prompt, completion.ids), abs=1e-4
        )
    assert [c.ids for c in again] == [reference(model, p, 4) for p in later]


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────


async def test_logprobs_are_those_of_the_model_at_the_requests_temperature(
    model: PreTrainedModel,
) -> None:
    prompt_list = prompts(3, 30, 11, 18)
    temperatures = [0.7, 1.3, 0.7, 0.0]
    async with serving(model) as engine:
        done = await asyncio.gather(
            *(
                engine.generate(p, Sampling(20, NEVER, t), rng=i)
                for i, (p, t) in enumerate(zip(prompt_list, temperatures, strict=True))
            )
        )
    for prompt, temperature, completion in zip(prompt_list, temperatures, done, strict=True):
        assert completion.logprobs == pytest.approx(
            true_logprobs(model, prompt, completion.ids, temperature or 1.0), abs=1e-4
        )
    assert done[3].ids == reference(model, prompt_list[3], 20), (
        "a greedy row in a batch of sampled rows"
    )


async def test_equal_seeds_give_equal_tokens_in_any_batch() -> None:
    model = qwen2(initializer_range=0.1)
    one, *others = prompts(15, 1, 40, 22, 3, 60)
    sampling = Sampling(24, NEVER)
    async with serving(model, max_batch=4) as engine:
        alone = await engine.generate(one, sampling, rng=7)
        others_running = [
            asyncio.create_task(engine.generate(p, replace(sampling, temperature=0.5), rng=i))
            for i, p in enumerate(others)
        ]
        await settled()
        shared, again, different = await asyncio.gather(
            *(engine.generate(one, sampling, rng=seed) for seed in (7, 7, 8))
        )
        await asyncio.gather(*others_running)
    assert shared.ids == again.ids == alone.ids
    assert shared.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert different.ids != alone.ids


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_token_frequencies_follow_the_softmax(temperature: float) -> None:
    model, n = qwen2(vocab_size=8, initializer_range=0.15), 4000
    prompt = (1, 5, 2)
    with torch.no_grad():
        p = (
            (model(input_ids=torch.tensor([prompt])).logits[0, -1] / temperature)
            .softmax(-1)
            .tolist()
        )
    async with serving(model, max_batch=400) as engine:
        done = await asyncio.gather(
            *(engine.generate(prompt, Sampling(1, (), temperature), rng=seed) for seed in range(n))
        )
    counts = [sum(c.ids == (token,) for c in done) for token in range(8)]
    assert min(p) * n > 5, "chi-square needs every cell"
    assert sum((count - n * q) ** 2 / (n * q) for count, q in zip(counts, p, strict=True)) < 24.3, (
        "0.1 % of chi-square(7)"
    )


class FixedGenerator(random.Random):
    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def random(self) -> float:
        return self._value


@pytest.mark.parametrize(
    ("draw", "token"),
    [
        (0.0, 1),
        (0.0999, 1),
        (0.1001, 2),
        (0.2999, 2),
        (0.3001, 4),
        (0.5999, 4),
        (0.6001, 5),
        (1 - 2**-53, 5),
    ],
)
def test_sampling_inverts_the_cumulative_distribution(draw: float, token: int) -> None:
    logits = torch.tensor(
        [
            [
                -math.inf,
                math.log(0.1),
                math.log(0.2),
                -math.inf,
                math.log(0.3),
                math.log(0.4),
                -math.inf,
            ]
        ]
    )
    request = Request(
        (1,),
        Sampling(1, ()),
        FixedGenerator(draw),  # pyright: ignore[reportArgumentType]
        future=None,  # pyright: ignore[reportArgumentType]
    )
    tokens, logprobs, _ = sample(logits, [request])
    assert tokens == [token]
    assert math.exp(logprobs[0]) == pytest.approx({1: 0.1, 2: 0.2, 4: 0.3, 5: 0.4}[token])


# ── new weights ───────────────────────────────────────────────────────────────────────────────────


async def test_a_swap_finishes_running_requests_and_waiting_ones_use_the_new_weights() -> None:
    old, new = qwen2(seed=0), qwen2(seed=1)
    running, queued, late = prompts(10, 12, 8)
    model = qwen2(seed=0)
    async with serving(model, max_batch=1, version=4) as engine:
        passes = Passes(model)
        passes.hold(5)
        first = asyncio.create_task(engine.generate(running, greedy(30)))
        await passes.held()
        second = asyncio.create_task(engine.generate(queued, greedy(10)))  # no row is free
        await settled()
        swap = asyncio.create_task(engine.update_weights(InProcessWeights.snapshot(new, version=5)))
        await settled()
        third = asyncio.create_task(engine.generate(late, greedy(10)))
        await settled()
        with pytest.raises(EngineError, match="still in progress"):
            await engine.update_weights(InProcessWeights.snapshot(new, version=6))
        assert engine.version == 4
        assert not swap.done()
        passes.go()
        one, two, three, _ = await asyncio.gather(first, second, third, swap)
        assert engine.version == 5
        turn_2 = (*running, *one.ids, 3, 4)
        after = await engine.generate(turn_2, greedy(15))
        score = await engine.score(turn_2)
    assert (one.ids, one.versions) == (reference(old, running, 30), (4,) * 30)
    assert (two.ids, two.versions) == (reference(new, queued, 10), (5,) * 10)
    assert (three.ids, three.versions) == (reference(new, late, 10), (5,) * 10)
    async with serving(new, version=5) as fresh:
        assert await fresh.generate(turn_2, greedy(15)) == after
        assert await fresh.score(turn_2) == score


async def test_a_swap_waits_for_all_running_requests_and_starves_none() -> None:
    model, new = qwen2(seed=0), qwen2(seed=1)
    prompt_list = prompts(5, 6, 7)
    async with serving(model) as engine:
        passes = Passes(model)
        passes.hold(2)
        tasks = [
            asyncio.create_task(engine.generate(p, greedy(4 + 6 * i)))
            for i, p in enumerate(prompt_list)
        ]
        await passes.held()
        swap = asyncio.create_task(engine.update_weights(InProcessWeights.snapshot(new, version=1)))
        await settled()
        newcomers = [asyncio.create_task(engine.generate(p, greedy(5))) for p in prompt_list]
        passes.go()
        done = await asyncio.gather(*tasks)
        await swap
        fresh = await asyncio.gather(*newcomers)
    assert [set(c.versions) for c in done] == [{0}] * 3
    assert [c.ids for c in done] == [
        reference(qwen2(seed=0), p, 4 + 6 * i) for i, p in enumerate(prompt_list)
    ]
    assert [c.ids for c in fresh] == [reference(new, p, 5) for p in prompt_list]
    assert [c.versions for c in fresh] == [(1,) * 5] * 3


async def test_a_swap_copies_the_weights() -> None:
    """Check that later changes of the learner's tensors do not change the engine's weights."""
    model, source = qwen2(seed=0), qwen2(seed=1)
    (prompt,) = prompts(10)
    handle = InProcessWeights.snapshot(source, version=1)
    async with serving(model) as engine:
        await engine.update_weights(handle)
        before = await engine.generate(prompt, greedy(10))
        for tensor in handle.tensors.values():
            tensor.zero_()
        assert await engine.generate(prompt, greedy(10)) == before


def with_wrong_names(good: InProcessWeights) -> InProcessWeights:
    return replace(good, tensors={"x." + name: tensor for name, tensor in good.tensors.items()})


def with_changed_value(good: InProcessWeights) -> InProcessWeights:
    tensors = {name: tensor.clone() for name, tensor in good.tensors.items()}
    tensors["model.norm.weight"][0] += 1e-3
    return replace(good, tensors=tensors)


def with_wrong_shapes(good: InProcessWeights) -> InProcessWeights:
    # A copy into the model would broadcast these tensors without an error.
    return replace(good, tensors={name: tensor[:1] for name, tensor in good.tensors.items()})


def with_large_tensor(good: InProcessWeights) -> InProcessWeights:
    return replace(good, tensors=dict(good.tensors) | {"model.norm.weight": torch.ones(3)})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (with_wrong_names, "the names of the tensors differ"),
        (with_changed_value, "version 1 arrived with a different checksum"),
        (with_wrong_shapes, "version 1 arrived with a different checksum"),
        (with_large_tensor, "the engine failed: RuntimeError"),
    ],
)
async def test_damaged_weights_end_the_engine_and_fail_all_callers(
    damage: Callable[[InProcessWeights], InProcessWeights], message: str
) -> None:
    model = qwen2(seed=0)
    running, queued = prompts(10, 6)
    async with serving(model, max_batch=1) as engine:
        passes = Passes(model)
        passes.hold(3)
        first = asyncio.create_task(engine.generate(running, greedy(8)))
        await passes.held()
        swap = asyncio.create_task(
            engine.update_weights(damage(InProcessWeights.snapshot(qwen2(seed=1), version=1)))
        )
        await settled()
        second = asyncio.create_task(engine.generate(queued, greedy(8)))
        await settled()
        passes.go()
        assert (await first).ids == reference(qwen2(seed=0), running, 8), (
            "the request ran on the old weights"
        )
        for waiting in (swap, second):
            with pytest.raises(EngineError, match=message):
                await waiting
        for call in (
            engine.health(),
            engine.generate(queued, greedy(1)),
            engine.score(queued),
            engine.update_weights(UnsupportedHandle()),
        ):
            with pytest.raises(EngineError, match=message):
                await call
        assert engine.version == 0


@dataclass
class UnsupportedHandle:
    """Handle of a transport that the engine does not support."""

    version: int = 1
    checksum: int = 0
    transport: str = "nccl"
    manifest: Any = None

    def discard(self) -> None: ...


async def test_a_handle_of_an_unsupported_transport_is_rejected() -> None:
    model = qwen2()
    (prompt,) = prompts(4)
    async with serving(model) as engine:
        with pytest.raises(EngineError, match="cannot receive weights over nccl"):
            await engine.update_weights(UnsupportedHandle())
        assert (await engine.generate(prompt, greedy(3))).ids == reference(model, prompt, 3)


# ── failures ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_cancelled_request_frees_its_row_without_effect_on_others() -> None:
    model = qwen2()
    prompt_list = prompts(10, 20, 15, 7)
    async with serving(model, max_batch=3) as engine:
        passes = Passes(model)
        passes.hold(4)
        # No row is free for the last request.
        tasks = [asyncio.create_task(engine.generate(p, greedy(30))) for p in prompt_list]
        await passes.held()
        tasks[0].cancel()
        await settled()
        passes.go()
        done = await asyncio.gather(*tasks[1:])
    assert tasks[0].cancelled()
    # The waiting request receives the freed row, so 30 passes have three rows. The last request
    # needs five more passes for its 30 tokens.
    assert passes.read == [
        (10, 15, 20),
        *[(1, 1, 1)] * 4,
        (1, 1, 7),
        *[(1, 1, 1)] * 24,
        *[(1,)] * 5,
    ]
    assert [c.ids for c in done] == [reference(model, p, 30) for p in prompt_list[1:]]


async def test_a_request_cancelled_while_waiting_never_runs() -> None:
    model = qwen2()
    prompt_list = prompts(5, 6, 7)
    async with serving(model, max_batch=1) as engine:
        passes = Passes(model)
        passes.hold(1)
        tasks = [asyncio.create_task(engine.generate(p, greedy(4))) for p in prompt_list]
        await passes.held()
        tasks[1].cancel()
        await settled()
        passes.go()
        done = await asyncio.gather(tasks[0], tasks[2])
    assert passes.read == [(5,), *[(1,)] * 3, (7,), *[(1,)] * 3]
    assert [c.ids for c in done] == [
        reference(model, p, 4) for p in (prompt_list[0], prompt_list[2])
    ]


async def test_a_swap_does_not_wait_for_cancelled_requests() -> None:
    model = qwen2()
    (prompt,) = prompts(5)
    async with serving(model) as engine:
        passes = Passes(model)
        passes.hold(2)
        running = asyncio.create_task(engine.generate(prompt, greedy(4000)))
        await passes.held()
        swap = asyncio.create_task(
            engine.update_weights(InProcessWeights.snapshot(qwen2(seed=1), version=1))
        )
        await settled()
        running.cancel()
        await settled()
        passes.go()
        await swap
    assert len(passes.read) == 3


async def test_a_failed_pass_fails_all_requests() -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    model = qwen2()
    running, queued = prompts(5, 6)
    async with serving(model, max_batch=2) as engine:
        passes = Passes(model)
        passes.hold(3)
        passes.at(4, fail)
        tasks = [asyncio.create_task(engine.generate(running, greedy(50)))]
        await passes.held()
        tasks += [
            asyncio.create_task(engine.generate(ids, greedy(5))) for ids in (queued, queued, queued)
        ]
        await settled()
        passes.go()
        for task in tasks:
            with pytest.raises(EngineError, match="the engine failed: RuntimeError: out of memory"):
                await task
        with pytest.raises(EngineError, match="the engine failed: RuntimeError") as dead:
            await engine.health()
        assert isinstance(dead.value.__cause__, RuntimeError)
        with pytest.raises(EngineError, match="the engine failed: RuntimeError"):
            await engine.generate(queued, greedy(5))


async def test_an_unknown_token_fails_only_its_own_request() -> None:
    model = qwen2()
    (prompt,) = prompts(5)
    async with serving(model, max_batch=2) as engine:
        for unknown in (V, -1):
            with pytest.raises(RolloutError, match=f"outside the model's vocabulary of {V}"):
                await engine.generate((1, unknown), greedy(5))
        assert (await engine.generate(prompt, greedy(5))).ids == reference(model, prompt, 5)


async def test_nonfinite_logits_are_an_error() -> None:
    model = qwen2()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    async with serving(model) as engine:
        with pytest.raises(EngineError, match="not finite"):
            await engine.generate((1, 2, 3), greedy(5))


async def test_every_kind_of_failure_reaches_the_caller() -> None:
    """Use a model that raises TypeError, because it does not accept the engine's arguments."""

    def fail() -> None:
        raise TypeError("forward() got an unexpected keyword argument")

    model = qwen2()
    async with serving(model) as engine:
        Passes(model).at(1, fail)
        with pytest.raises(EngineError, match="the engine failed: TypeError"):
            await engine.generate((1, 2, 3), greedy(5))
        with pytest.raises(EngineError, match="the engine failed: TypeError"):
            await engine.health()


async def test_a_failed_score_fails_only_its_caller() -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    model = qwen2()
    (prompt,) = prompts(5)
    async with serving(model, max_context=64) as engine:
        Passes(model).at(0, fail)
        with pytest.raises(EngineError, match="the engine failed: RuntimeError: out of memory"):
            await engine.score((1, 2))
        for unfit in ((), (1,) * 65):
            with pytest.raises(RolloutError, match="do not fit into the context of 64"):
                await engine.score(unfit)
        with pytest.raises(RolloutError, match="outside the model's vocabulary"):
            await engine.score((1, V))
        assert (await engine.generate(prompt, greedy(5))).ids == reference(model, prompt, 5)


async def test_closing_fails_running_and_waiting_requests() -> None:
    model = qwen2()
    prompt_list = prompts(5, 6)
    async with serving(model, max_batch=1) as engine:
        passes = Passes(model)
        passes.hold(2)
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(engine.generate(p, greedy(500))) for p in prompt_list
        ]
        await passes.held()
        tasks.append(
            asyncio.create_task(engine.update_weights(InProcessWeights.snapshot(model, version=1)))
        )
        await settled()
        passes.go()
        await engine.aclose()
        for task in tasks:
            with pytest.raises(EngineError, match="the engine is closed"):
                await task
        for call in (
            engine.health(),
            engine.generate(prompt_list[0], greedy(1)),
            engine.score(prompt_list[0]),
        ):
            with pytest.raises(EngineError, match="the engine is closed"):
                await call
        await engine.aclose()


async def test_closing_fails_a_request_whose_first_pass_has_not_begun() -> None:
    model = qwen2()
    (prompt,) = prompts(5)
    async with serving(model) as engine:
        passes = Passes(model)
        passes.hold(0)
        scoring = asyncio.create_task(engine.score(prompt))  # keeps the compute thread busy
        await passes.held()
        waiting = asyncio.create_task(engine.generate(prompt, greedy(5)))
        await settled()
        passes.go()
        await engine.aclose()
        with pytest.raises(EngineError, match="the engine is closed"):
            await waiting
        assert len(await scoring) == 4


async def test_an_unused_engine_can_be_closed() -> None:
    async with serving(qwen2()) as engine:
        await engine.health()
    with pytest.raises(EngineError, match="closed"):
        await engine.health()


async def test_a_request_that_does_not_fit_is_a_rollout_error() -> None:
    model = qwen2()
    (prompt,) = prompts(10)
    async with serving(model, max_context=16) as engine:
        with pytest.raises(
            RolloutError, match=r"engine: 10 prompt tokens and 7 new tokens do not fit"
        ):
            await engine.generate(prompt, greedy(7))
        with pytest.raises(RolloutError, match="0 prompt tokens"):
            await engine.generate((), greedy(7))
        assert (await engine.generate(prompt, greedy(6))).ids == reference(model, prompt, 6)


async def test_a_json_schema_is_refused() -> None:
    async with serving(qwen2()) as engine:
        with pytest.raises(ValueError, match="no structured outputs: use the vLLM engine"):
            await engine.generate((3, 4), Sampling(2, NEVER, json_schema="{}"), rng=0)


async def test_sampling_needs_a_seed_but_greedy_decoding_does_not() -> None:
    async with serving(qwen2()) as engine:
        with pytest.raises(ValueError, match="needs a seed: pass rng"):
            await engine.generate((1, 2), Sampling(3, NEVER))
        assert isinstance(await engine.generate((1, 2), greedy(3)), Completion)


async def test_the_bundled_actor_is_served(tiny_actor: Path) -> None:
    model = load_model(tiny_actor, torch.device("cpu"))
    prompt_list = prompts(20, 35)
    async with serving(model) as engine:
        done = await asyncio.gather(*(engine.generate(p, greedy(8, (2,))) for p in prompt_list))
    assert [c.ids for c in done] == [reference(model, p, 8, (2,)) for p in prompt_list]

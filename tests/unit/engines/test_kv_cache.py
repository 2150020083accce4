"""Cached prefixes of conversations: only new tokens are read, and answers stay the same.

An update of the weights clears the cache.
"""

from __future__ import annotations

import asyncio

import torch

from crl.engines.kv_cache import PrefixCache, SlotCache
from crl.engines.passes import Pass
from crl.modeling.loading import InProcessWeights
from support.torch_engines import Passes, greedy, prompts, qwen2, reference, serving


async def test_the_second_turn_reads_only_new_tokens() -> None:
    """Compare the tokens that are read with numbers worked by hand.

    The first turn has 20 prompt tokens and 4 sampled tokens, of which the last was never read. The
    second turn adds 6 tokens, so 1 + 6 tokens are read.
    """
    model = qwen2()
    first, more = prompts(20, 6)
    async with serving(model) as engine:
        passes = Passes(model)
        first_reply = await engine.generate(first, greedy(4), session="a")
        second = (*first, *first_reply.ids, *more)
        second_reply = await engine.generate(second, greedy(5), session="a")
    assert passes.read == [(20,), (1,), (1,), (1,), (7,), (1,), (1,), (1,), (1,)]
    assert first_reply.ids == reference(model, first, 4)
    assert second_reply.ids == reference(model, second, 5)


async def test_concurrent_conversations_keep_separate_prefixes() -> None:
    model = qwen2()
    first_prompts = prompts(*range(3, 40, 2))
    more = prompts(*(1 + i % 7 for i in range(len(first_prompts))), seed=1)
    async with serving(model, max_batch=5) as engine:

        async def converse(i: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
            first_reply = await engine.generate(first_prompts[i], greedy(3 + i % 4), session=str(i))
            second = (*first_prompts[i], *first_reply.ids, *more[i])
            return second, (await engine.generate(second, greedy(6), session=str(i))).ids

        for second, sampled in await asyncio.gather(
            *(converse(i) for i in range(len(first_prompts)))
        ):
            assert sampled == reference(model, second, 6)


async def test_a_diverging_prompt_reuses_the_shared_prefix() -> None:
    """Check a prompt that shares only 12 of 20 tokens, so that 8 + 3 tokens are read.

    A template that rewrites messages has this effect, and so has a context window.
    """
    model = qwen2()
    first, other = prompts(20, 11)
    async with serving(model) as engine:
        await engine.generate(first, greedy(2), session="a")
        passes = Passes(model)
        assert other[0] != first[12]
        turned = (*first[:12], *other)
        assert (await engine.generate(turned, greedy(3), session="a")).ids == reference(
            model, turned, 3
        )
        assert passes.read[0] == (11,)


async def test_the_same_prompt_again_reads_its_last_token() -> None:
    model = qwen2()
    (prompt,) = prompts(9)
    async with serving(model) as engine:
        await engine.generate(prompt, greedy(4), session="a")
        passes = Passes(model)
        assert (await engine.generate(prompt, greedy(4), session="a")).ids == reference(
            model, prompt, 4
        )
        assert passes.read[0] == (1,)


async def test_without_a_session_no_prefix_is_stored() -> None:
    model = qwen2()
    (prompt,) = prompts(9)
    async with serving(model) as engine:
        await engine.generate(prompt, greedy(4))
        passes = Passes(model)
        await engine.generate((*prompt, 1, 2), greedy(1))
        assert passes.read == [(11,)]


async def test_the_second_turn_after_a_swap_equals_that_of_a_fresh_engine() -> None:
    old, new = qwen2(seed=0), qwen2(seed=1)
    first, more = prompts(20, 6)
    async with serving(old) as engine:
        first_reply = await engine.generate(first, greedy(4), session="a")
        second = (*first, *first_reply.ids, *more)
        await engine.update_weights(InProcessWeights.snapshot(new, version=1))
        passes = Passes(old)
        swapped = await engine.generate(second, greedy(5), session="a")
        assert passes.read[0] == (len(second),), "everything is read again"
    async with serving(new) as engine:
        fresh = await engine.generate(second, greedy(5), session="a")
    assert (swapped.ids, swapped.logprobs) == (fresh.ids, fresh.logprobs)
    assert swapped.versions == (1,) * 5


def test_the_stored_prefixes_are_limited() -> None:
    """Check the limit of two rows of 128 tokens: at most 256 tokens of prefixes are stored.

    The oldest prefixes are removed first.
    """
    cache = SlotCache(1, 2, torch.device("cpu"))
    cache.begin(Pass([[1]], [0], 0, torch.device("cpu")))
    cache.update(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), 0)
    prefixes = PrefixCache(cache)
    ids = tuple(range(100))
    for session in "abc":
        prefixes.store(session, ids, row=0)
    assert [prefixes.reusable(session, (*ids, 1)) for session in "abc"] == [0, 100, 100]
    prefixes.store("b", ids[:56], row=0)
    prefixes.store("d", ids, row=0)
    assert [prefixes.reusable(session, (*ids, 1)) for session in "bcd"] == [56, 100, 100]
    prefixes.clear()
    assert prefixes.reusable("d", (*ids, 1)) == 0


def test_rows_are_allocated_when_they_are_needed() -> None:
    """Check a cache of at most 100 rows with two passes, a copy of a row, and a restored row."""
    cache = SlotCache(1, 100, torch.device("cpu"))

    def run_pass(rows: int, start: int) -> None:
        cache.begin(Pass([[1]] * rows, [start] * rows, 0, torch.device("cpu")))
        new = torch.arange(1.0, rows + 1)[None, None, :, None].expand(1, 1, rows, 4)
        cache.update(new, new, 0)

    run_pass(3, start=0)
    assert (cache.rows, cache.capacity) == (4, 128)
    cache.move([1], [6], [1])
    assert cache.rows == 8
    saved = cache.copy_out(6, 1)
    run_pass(65, start=200)
    assert (cache.rows, cache.capacity) == (100, 256)
    cache.copy_in(90, 1, saved)
    for x in cache.copy_out(90, 1):
        assert x.tolist() == [[[2.0] * 4]], "the row that was copied twice"
    for x in cache.copy_out(2, 201):
        assert x[0, :, 0].tolist() == [3.0, *[0.0] * 199, 3.0]
    assert SlotCache(1, 100, torch.device("cuda")).rows == 100

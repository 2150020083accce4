"""Background requests yield to an exchange of weights, and each of them ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from transformers import PreTrainedModel

from crl.engines.background import MAX_INTERRUPTIONS, BackgroundEngine
from crl.engines.torch import TorchEngine
from crl.errors import EngineError, RolloutError
from crl.modeling.loading import InProcessWeights
from crl.types import Completion, Sampling
from support.torch_engines import NEVER, Passes, greedy, prompts, qwen2, reference, serving, settled

LONG = 4000
"""Tokens of a request that ends only if it is cancelled: its test would take a minute."""


def weights(model: PreTrainedModel, version: int) -> InProcessWeights:
    return InProcessWeights.snapshot(model, version=version)


async def test_an_exchange_interrupts_background_requests_and_repeats_them() -> None:
    model, new = qwen2(seed=0), qwen2(seed=1)
    first, second, reply = prompts(9, 11, 7)
    async with serving(model) as engine:
        background, passes = BackgroundEngine(engine), Passes(model)
        passes.hold(3)
        open_requests = [
            asyncio.create_task(background.generate(prompt, greedy(40)))
            for prompt in (first, second)
        ]
        episode = asyncio.create_task(engine.generate(reply, greedy(6)))
        await passes.held()
        swap = asyncio.create_task(background.update_weights(weights(new, 1)))
        await settled()
        late = asyncio.create_task(background.generate(first, greedy(5)))
        passes.go()
        await swap
        assert len(passes.read) == 6, "only the reply of the episode is waited for"
        assert (background.version, background.interrupted) == (1, 2)
        answered = await episode
        repeated = await asyncio.gather(*open_requests, late)
        await background.update_weights(weights(qwen2(seed=2), 2))
    assert (answered.ids, set(answered.versions)) == (reference(qwen2(seed=0), reply, 6), {0})
    assert [(c.ids, set(c.versions)) for c in repeated] == [
        (reference(new, first, 40), {1}),
        (reference(new, second, 40), {1}),
        (reference(new, first, 5), {1}),
    ]
    assert background.interrupted == 2, "nothing was open"


async def test_a_repeated_request_has_the_same_draws() -> None:
    model = qwen2()
    (prompt,) = prompts(9)
    sampling = Sampling(12, NEVER, temperature=1.0)
    async with serving(model) as engine:
        expected = await engine.generate(prompt, sampling, rng=7)
        background, passes = BackgroundEngine(engine), Passes(model)
        passes.hold(2)
        request = asyncio.create_task(background.generate(prompt, sampling, rng=7))
        await passes.held()
        swap = asyncio.create_task(background.update_weights(weights(qwen2(), 1)))
        await settled()
        passes.go()
        await swap
        repeated = await request
    assert repeated == replace(expected, versions=(1,) * 12)


async def test_a_request_that_was_interrupted_often_is_waited_for() -> None:
    """Otherwise a request that takes longer than a step would never end.

    The exchange that waits interrupts no other request either.
    """
    model = qwen2()
    old, young = prompts(9, 11)
    async with serving(model) as engine:
        background, passes = BackgroundEngine(engine), Passes(model)
        request = asyncio.create_task(background.generate(old, greedy(200)))
        for version in range(1, MAX_INTERRUPTIONS + 1):
            passes.hold(len(passes.read) + 2)
            await passes.held()
            swap = asyncio.create_task(background.update_weights(weights(model, version)))
            await settled()
            passes.go()
            await swap
            assert background.interrupted == version
            assert not request.done()
        passes.hold(len(passes.read) + 2)
        await passes.held()
        other = asyncio.create_task(background.generate(young, greedy(20)))
        await settled()
        passes.hold(len(passes.read) + 1)
        passes.go()
        await passes.held()
        swap = asyncio.create_task(background.update_weights(weights(model, 9)))
        await settled()
        passes.go()
        await swap
        finished = await asyncio.gather(request, other)
    assert background.interrupted == MAX_INTERRUPTIONS
    assert [set(c.versions) for c in finished] == [{MAX_INTERRUPTIONS}] * 2


@pytest.mark.parametrize("interrupted", [False, True])
async def test_a_cancelled_request_is_not_repeated(interrupted: bool) -> None:
    model = qwen2()
    (prompt,) = prompts(9)
    async with serving(model) as engine:
        background, passes = BackgroundEngine(engine), Passes(model)
        passes.hold(2)
        request = asyncio.create_task(background.generate(prompt, greedy(LONG)))
        await passes.held()
        if interrupted:
            swap = asyncio.create_task(background.update_weights(weights(model, 1)))
            await asyncio.sleep(0)
            request.cancel()
            passes.go()
            await swap
        else:
            request.cancel()
            passes.go()
        with pytest.raises(asyncio.CancelledError):
            await request
        await background.update_weights(weights(model, 2))
    assert len(passes.read) == 3
    assert background.interrupted == interrupted


async def test_a_timeout_ends_an_interrupted_request() -> None:
    class Stuck(TorchEngine):
        async def update_weights(self, handle: object) -> None:
            await asyncio.sleep(60)

        async def generate(self, *args: object, **options: object) -> Completion:
            await asyncio.sleep(60)
            raise AssertionError

    engine = Stuck(qwen2(), max_batch=1, max_context=64)
    background = BackgroundEngine(engine)
    (prompt,) = prompts(9)
    swap = asyncio.create_task(background.update_weights(weights(qwen2(), 1)))
    await settled()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await background.generate(prompt, greedy(4))
    swap.cancel()
    await engine.aclose()


async def test_errors_are_passed_on_and_a_failed_exchange_holds_nothing() -> None:
    model = qwen2()
    (prompt,) = prompts(9)
    async with serving(model, max_context=64) as engine:
        background = BackgroundEngine(engine)
        with pytest.raises(RolloutError, match="do not fit"):
            await background.generate(prompt, greedy(100))
        with pytest.raises(EngineError, match="checksum"):
            await background.update_weights(replace(weights(qwen2(seed=1), 1), checksum=1))
        with pytest.raises(EngineError, match="checksum"):
            await background.generate(prompt, greedy(4))


async def test_everything_else_is_that_of_the_engine() -> None:
    model = qwen2()
    (prompt,) = prompts(9)
    async with serving(model, version=3) as engine:
        background = BackgroundEngine(engine)
        assert await background.score(prompt) == await engine.score(prompt)
        await background.health()
        assert (background.version, background.busy_s) == (3, engine.busy_s)
        assert background.details() == engine.details()
        await background.aclose()
        with pytest.raises(EngineError, match="closed"):
            await engine.health()

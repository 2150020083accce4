"""Engine of the rollout benchmark.

Equal requests take equal time, regardless of earlier requests.
"""

from __future__ import annotations

import asyncio
import sys

import pytest

from crl.types import Sampling
from support.doors import renderer
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from latency_model import (  # pyright: ignore[reportMissingImports]
    PREFILL_RATE,
    REQUEST_RATE,
    LatencyModel,
)


class InstantModel(LatencyModel):
    """Latency model that answers at once and records the number of tokens it would have to read."""

    def __init__(self) -> None:
        super().__init__(renderer(), lambda session: ["north"], median=4)
        self.prompt_tokens: list[int] = []

    async def _serve(self, prompt: int, answer: int) -> None:
        self.prompt_tokens.append(prompt)


async def test_a_cancelled_request_is_removed() -> None:
    engine = LatencyModel(renderer(), lambda session: ["north"], median=4)
    prefills = [asyncio.create_task(engine._serve(10**9, 10)) for _ in range(2)]
    await asyncio.sleep(0)
    prefills[0].cancel()
    await asyncio.wait(prefills[:1])
    assert [entry[0] for entry in engine._prefill_queue] == [10**9], "the other one"
    prefills[1].cancel()
    decodes = [asyncio.create_task(engine._serve(1, answer)) for answer in (10**9, 1)]
    await asyncio.wait(decodes[1:])
    assert len(engine._decoding) == 1
    decodes[0].cancel()
    await asyncio.wait([*decodes, *prefills])
    assert (len(engine._prefill_queue), engine._decoding) == (0, [])
    await engine.aclose()


def advance_clock(engine: LatencyModel, seconds: float) -> None:
    """Advance the engine's clock by `seconds`."""
    assert engine._timer
    engine._timer.cancel()
    engine._last_tick -= seconds
    engine._advance()


async def test_time_spent_on_a_cancelled_prompt_is_lost() -> None:
    engine = LatencyModel(renderer(), lambda session: ["north"], median=4)
    long, short = (
        asyncio.create_task(engine._serve(round(PREFILL_RATE * seconds), 10))
        for seconds in (100, 5)
    )
    await asyncio.sleep(0)
    advance_clock(engine, 50)
    long.cancel()
    await asyncio.wait([long])
    advance_clock(engine, 3)
    assert len(engine._prefill_queue) == 1, "it takes 5 seconds"
    advance_clock(engine, 3)
    assert not engine._prefill_queue
    short.cancel()
    await asyncio.wait([short])
    await engine.aclose()


async def test_after_a_cancellation_the_shortest_request_ends_first() -> None:
    engine = LatencyModel(renderer(), lambda session: ["north"], median=4)
    first, last, next_one = tasks = [
        asyncio.create_task(engine._serve(0, round(REQUEST_RATE * seconds)))
        for seconds in (10, 50, 20)
    ]
    await asyncio.sleep(0)
    advance_clock(engine, 0.0)
    assert len(engine._decoding) == 3
    first.cancel()
    await asyncio.wait([first])
    advance_clock(engine, 30)
    await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [True, False, True]
    assert next_one.exception() is None
    last.cancel()
    await asyncio.wait([last])
    await engine.aclose()


async def episode(engine: LatencyModel, turns: int = 3) -> None:
    ids = tuple(range(100))
    for turn in range(turns):
        completion = await engine.generate(
            ids, Sampling(50, renderer().stop_ids), session="train/1/0/0", rng=turn
        )
        ids += completion.ids + tuple(range(10))


@pytest.mark.parametrize("episodes", [2, 3])
async def test_a_new_episode_of_a_session_reads_its_whole_prompt(episodes: int) -> None:
    engine = InstantModel()
    for _ in range(episodes):
        engine.clear_cache()
        await episode(engine)
    assert engine.prompt_tokens == [100, 10, 10] * episodes


async def test_a_new_session_reads_only_uncached_blocks() -> None:
    engine, stop = InstantModel(), renderer().stop_ids
    for session, last in (("a", 1), ("b", 2), ("c", 1)):
        await engine.generate((*range(40), last), Sampling(50, stop), session=session, rng=0)
    engine.clear_cache()
    await engine.generate((*range(40), 1), Sampling(50, stop), session="d", rng=0)
    assert engine.prompt_tokens == [41, 41 - 32, 41 - 32, 41], "in whole blocks of 16"

"""The engine of the rollout benchmark.

Equal requests take equal time, regardless of earlier requests.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from doors import renderer

from crl.types import Sampling

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from latency_model import (  # pyright: ignore[reportMissingImports]
    PER_REQUEST,
    PREFILL,
    LatencyModel,
)


class Unclocked(LatencyModel):
    """Latency model that answers at once and records the number of tokens it would have to read."""

    def __init__(self) -> None:
        super().__init__(renderer(), lambda session: ["north"], median=4)
        self.read: list[int] = []

    async def _served(self, prompt: int, answer: int) -> None:
        self.read.append(prompt)


async def test_a_request_that_was_cancelled_takes_no_time_of_the_others() -> None:
    engine = LatencyModel(renderer(), lambda session: ["north"], median=4)
    reading = [asyncio.create_task(engine._served(10**9, 10)) for _ in range(2)]
    await asyncio.sleep(0)
    reading[0].cancel()
    await asyncio.wait(reading[:1])
    assert [one[0] for one in engine._read] == [10**9], "the other one"
    reading[1].cancel()
    decoding = [asyncio.create_task(engine._served(1, answer)) for answer in (10**9, 1)]
    await asyncio.wait(decoding[1:])
    assert len(engine._decoding) == 1
    decoding[0].cancel()
    await asyncio.wait([*decoding, *reading])
    assert (len(engine._read), engine._decoding) == (0, [])
    await engine.aclose()


def later(engine: LatencyModel, seconds: float) -> None:
    """Advance the engine's clock by `seconds`."""
    assert engine._tick
    engine._tick.cancel()
    engine._then -= seconds
    engine._advance()


async def test_the_time_spent_on_a_prompt_that_was_cancelled_reads_no_other_one() -> None:
    engine = LatencyModel(renderer(), lambda session: ["north"], median=4)
    long, short = (
        asyncio.create_task(engine._served(round(PREFILL * seconds), 10)) for seconds in (100, 5)
    )
    await asyncio.sleep(0)
    later(engine, 50)
    long.cancel()
    await asyncio.wait([long])
    later(engine, 3)
    assert len(engine._read) == 1, "it takes 5 seconds"
    later(engine, 3)
    assert not engine._read
    short.cancel()
    await asyncio.wait([short])
    await engine.aclose()


async def test_of_those_that_are_left_the_shortest_ends_first() -> None:
    engine = LatencyModel(renderer(), lambda session: ["north"], median=4)
    first, last, next_one = tasks = [
        asyncio.create_task(engine._served(0, round(PER_REQUEST * seconds)))
        for seconds in (10, 50, 20)
    ]
    await asyncio.sleep(0)
    later(engine, 0.0)
    assert len(engine._decoding) == 3
    first.cancel()
    await asyncio.wait([first])
    later(engine, 30)
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
async def test_an_episode_of_the_same_name_reads_its_prompt_anew(episodes: int) -> None:
    engine = Unclocked()
    for _ in range(episodes):
        engine.forget()
        await episode(engine)
    assert engine.read == [100, 10, 10] * episodes


async def test_of_a_new_session_it_reads_what_no_first_prompt_began_with() -> None:
    engine, stop = Unclocked(), renderer().stop_ids
    for session, last in (("a", 1), ("b", 2), ("c", 1)):
        await engine.generate((*range(40), last), Sampling(50, stop), session=session, rng=0)
    engine.forget()
    await engine.generate((*range(40), 1), Sampling(50, stop), session="d", rng=0)
    assert engine.read == [41, 41 - 32, 41 - 32, 41], "in whole blocks of 16"

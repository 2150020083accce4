"""Waves: the requests of a forward pass depend only on the names and turns of the episodes.

They do not depend on timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crl.engines.scripted import ScriptedEngine
from crl.errors import EngineError, RolloutError
from crl.rollout.waves import DirectSampler, LockstepSampler, Sampler
from crl.types import Completion, Sampling
from support.doors import renderer

SAMPLING = Sampling(max_tokens=4, stop_ids=(2,))
ANSWER = Completion((7, 2), (-1.0, -1.0), (0, 0), "stop")


class RecordingEngine(ScriptedEngine):
    """Engine that records the sessions in the order of their requests.

    Each answer takes a number of event loop rounds, which is removed from the end of `delays`. A
    session in `errors` receives its error. With `hold` no request is answered.
    """

    def __init__(
        self,
        *,
        delays: Sequence[int] = (),
        errors: Mapping[str, Exception] | None = None,
        hold: bool = False,
    ) -> None:
        super().__init__(renderer(), lambda prompt: "")
        self.delays, self.errors, self.hold = list(delays), errors or {}, hold
        self.sessions: list[str] = []
        self.seeds: list[int | None] = []
        self.cancelled: list[str] = []

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        assert session is not None
        self.sessions.append(session)
        self.seeds.append(rng)
        if session in self.errors:
            raise self.errors[session]
        try:
            if self.hold:
                await asyncio.Event().wait()
            await wait_rounds(self.delays.pop() if self.delays else 0)
        except asyncio.CancelledError:
            self.cancelled.append(session)
            raise
        return ANSWER


async def wait_rounds(n: int) -> None:
    """Wait for `n` rounds of the event loop. This delay needs no clock."""
    for _ in range(n):
        await asyncio.sleep(0)


async def settled() -> None:
    await wait_rounds(20)


async def ask(sampler: Sampler, session: str, seed: int = 0) -> Completion:
    return await sampler.generate((1, 2), SAMPLING, session=session, rng=seed)


async def episode(sampler: Sampler, session: str, delays: Sequence[int]) -> None:
    """Play one turn per delay. Each turn starts after that many rounds of the event loop."""
    try:
        for turn, delay in enumerate(delays):
            await wait_rounds(delay)
            assert await ask(sampler, session, turn) == ANSWER
    finally:
        await wait_rounds(len(delays) % 3)
        sampler.leave(session)


async def play_episodes(delays: Sequence[Sequence[int]], engine: RecordingEngine) -> None:
    waves = LockstepSampler(engine)
    sessions = [f"e{i}" for i in range(len(delays))]
    for session in reversed(sessions):
        waves.join(session)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for session, turns in zip(sessions, delays, strict=True):
            tasks.create_task(episode(waves, session, turns))
    assert asyncio.all_tasks() == {asyncio.current_task()}, "a task is still running"


@given(
    delays=st.lists(st.lists(st.integers(0, 6), max_size=4), min_size=1, max_size=5),
    answers=st.lists(st.integers(0, 5), max_size=20),
)
def test_waves_do_not_depend_on_the_order_of_arrival(
    delays: list[list[int]], answers: list[int]
) -> None:
    engine = RecordingEngine(delays=answers)
    asyncio.run(play_episodes(delays, engine))
    longest = max(map(len, delays))
    expected = [
        (f"e{i}", turn)
        for turn in range(longest)
        for i in range(len(delays))
        if turn < len(delays[i])
    ]
    assert list(zip(engine.sessions, engine.seeds, strict=True)) == expected


async def test_a_wave_waits_for_every_live_episode() -> None:
    engine = RecordingEngine()
    waves = LockstepSampler(engine)
    for session in ("c", "a", "b"):
        waves.join(session)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for session in ("c", "a"):
            tasks.create_task(ask(waves, session))
        await settled()
        assert engine.sessions == []
        tasks.create_task(ask(waves, "b"))
    assert engine.sessions == ["a", "b", "c"]


async def test_a_wave_is_released_when_a_missing_episode_leaves() -> None:
    engine = RecordingEngine()
    waves = LockstepSampler(engine)
    for session in ("a", "b", "c"):
        waves.join(session)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for session in ("c", "a"):
            tasks.create_task(ask(waves, session))
        await settled()
        waves.leave("b")
        waves.leave("b")
        await settled()
        assert engine.sessions == ["a", "c"]


async def test_an_error_reaches_its_own_episode_only() -> None:
    engine = RecordingEngine(
        errors={"a": RolloutError("engine", "too long"), "b": EngineError("gone")}
    )
    waves = LockstepSampler(engine)
    for session in "abc":
        waves.join(session)
    async with asyncio.timeout(60):
        outcomes = await asyncio.gather(
            *(ask(waves, session) for session in "cba"), return_exceptions=True
        )
    assert outcomes == [ANSWER, engine.errors["b"], engine.errors["a"]]


async def test_a_cancelled_episode_does_not_block_the_others() -> None:
    engine = RecordingEngine()
    waves = LockstepSampler(engine)
    for session in "ab":
        waves.join(session)
    first = asyncio.create_task(episode(waves, "a", [0, 0]))
    await settled()
    first.cancel()  # "a" has not left yet when "b" sends its request
    second = asyncio.create_task(episode(waves, "b", [0]))
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await first
        await second
    assert engine.sessions == ["b"], "the request of the cancelled episode is not sent"


async def test_cancelling_an_episode_cancels_its_request() -> None:
    for sampler_class in (DirectSampler, LockstepSampler):
        engine = RecordingEngine(hold=True)
        sampler = sampler_class(engine)
        sampler.join("a")
        request = asyncio.create_task(ask(sampler, "a"))
        await settled()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await settled()
        assert engine.cancelled == ["a"], sampler_class
        assert asyncio.all_tasks() == {asyncio.current_task()}, sampler_class


async def test_the_direct_sampler_forwards_requests_immediately() -> None:
    engine = RecordingEngine()
    direct = DirectSampler(engine)
    direct.join("b")
    direct.join("a")
    assert await ask(direct, "b", 5) == ANSWER
    assert (engine.sessions, engine.seeds) == (["b"], [5])


# ── searches ──────────────────────────────────────────────────────────────────────────────────────


async def play_with_search(
    waves: LockstepSampler, session: str, delay: int, order: list[str], *, searches: bool
) -> None:
    """Play an episode that searches if `searches` is true and then sends two requests."""
    try:
        await wait_rounds(delay)
        if searches:
            await waves.wait_turn(session)
            # A search changes counters immediately after its turn begins, without an await.
            order.append(session)
        await episode(waves, session, [delay, 0])
    finally:
        waves.leave(session)


@given(
    delays=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    searches=st.lists(st.booleans(), min_size=6, max_size=6),
    rng=st.randoms(use_true_random=False),
)
def test_searches_run_in_the_order_of_the_names(
    delays: list[int], searches: list[bool], rng
) -> None:
    async def run() -> tuple[list[str], RecordingEngine]:
        order: list[str] = []
        engine = RecordingEngine()
        waves = LockstepSampler(engine)
        sessions = [f"e{i}" for i in range(len(delays))]
        for session in sessions:
            waves.join(session)
        members = list(zip(sessions, delays, searches, strict=False))
        rng.shuffle(members)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for session, delay, searching_too in members:
                tasks.create_task(
                    play_with_search(waves, session, delay, order, searches=searching_too)
                )
        return order, engine

    order, engine = asyncio.run(run())
    guided = [f"e{i}" for i in range(len(delays)) if searches[i]]
    assert order == guided
    free = [f"e{i}" for i in range(len(delays)) if not searches[i]]
    assert engine.sessions[: len(free)] == free, (
        "the first requests of free episodes are in the wave of the searches"
    )
    assert sorted(engine.sessions) == sorted(2 * [f"e{i}" for i in range(len(delays))])


async def test_a_cancelled_search_does_not_block_the_others() -> None:
    waves, order = LockstepSampler(RecordingEngine()), []
    for session in "abc":
        waves.join(session)
    first = asyncio.create_task(play_with_search(waves, "a", 0, order, searches=True))
    await settled()
    first.cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(
            first,
            *(play_with_search(waves, s, 0, order, searches=True) for s in "bc"),
            return_exceptions=True,
        )
    assert order == ["b", "c"]

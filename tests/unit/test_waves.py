"""Waves: the requests of a forward pass depend only on the names and turns of the episodes.

They do not depend on timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from doors import renderer
from hypothesis import given
from hypothesis import strategies as st

from crl.engines.scripted import ScriptedEngine
from crl.errors import EngineError, RolloutError
from crl.rollout.waves import DirectSampler, LockstepSampler, Sampler
from crl.types import Completion, Sampling

SAMPLING = Sampling(max_tokens=4, stop_ids=(2,))
ANSWER = Completion((7, 2), (-1.0, -1.0), (0, 0), "stop")


class Recorder(ScriptedEngine):
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
        self.asked: list[str] = []
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
        self.asked.append(session)
        self.seeds.append(rng)
        if session in self.errors:
            raise self.errors[session]
        try:
            if self.hold:
                await asyncio.Event().wait()
            await passes(self.delays.pop() if self.delays else 0)
        except asyncio.CancelledError:
            self.cancelled.append(session)
            raise
        return ANSWER


async def passes(n: int) -> None:
    """Wait for `n` rounds of the event loop. This delay needs no clock."""
    for _ in range(n):
        await asyncio.sleep(0)


async def settled() -> None:
    await passes(20)


async def ask(sampler: Sampler, session: str, seed: int = 0) -> Completion:
    return await sampler.generate((1, 2), SAMPLING, session=session, rng=seed)


async def episode(sampler: Sampler, session: str, delays: Sequence[int]) -> None:
    """Play one turn per delay. Each turn starts after that many rounds of the event loop."""
    try:
        for turn, delay in enumerate(delays):
            await passes(delay)
            assert await ask(sampler, session, turn) == ANSWER
    finally:
        await passes(len(delays) % 3)
        sampler.leave(session)


async def play(delays: Sequence[Sequence[int]], engine: Recorder) -> None:
    waves = LockstepSampler(engine)
    sessions = [f"e{i}" for i in range(len(delays))]
    for session in reversed(sessions):
        waves.join(session)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for session, turns in zip(sessions, delays, strict=True):
            tasks.create_task(episode(waves, session, turns))
    assert asyncio.all_tasks() == {asyncio.current_task()}, "something is left hanging"


@given(
    delays=st.lists(st.lists(st.integers(0, 6), max_size=4), min_size=1, max_size=5),
    answers=st.lists(st.integers(0, 5), max_size=20),
)
def test_waves_are_the_same_whatever_the_arrival_order(
    delays: list[list[int]], answers: list[int]
) -> None:
    engine = Recorder(delays=answers)
    asyncio.run(play(delays, engine))
    longest = max(map(len, delays))
    expected = [
        (f"e{i}", turn)
        for turn in range(longest)
        for i in range(len(delays))
        if turn < len(delays[i])
    ]
    assert list(zip(engine.asked, engine.seeds, strict=True)) == expected


async def test_a_wave_waits_for_every_live_episode() -> None:
    engine = Recorder()
    waves = LockstepSampler(engine)
    for session in ("c", "a", "b"):
        waves.join(session)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for session in ("c", "a"):
            tasks.create_task(ask(waves, session))
        await settled()
        assert engine.asked == []
        tasks.create_task(ask(waves, "b"))
    assert engine.asked == ["a", "b", "c"]


async def test_the_last_one_to_leave_sets_the_others_free() -> None:
    engine = Recorder()
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
        assert engine.asked == ["a", "c"]


async def test_an_error_reaches_the_one_that_asked() -> None:
    engine = Recorder(errors={"a": RolloutError("engine", "too long"), "b": EngineError("gone")})
    waves = LockstepSampler(engine)
    for session in "abc":
        waves.join(session)
    async with asyncio.timeout(60):
        outcomes = await asyncio.gather(
            *(ask(waves, session) for session in "cba"), return_exceptions=True
        )
    assert outcomes == [ANSWER, engine.errors["b"], engine.errors["a"]]


async def test_a_cancelled_episode_does_not_hold_up_the_rest() -> None:
    engine = Recorder()
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
    assert engine.asked == ["b"], "nobody waits for what a would have got"


async def test_cancelling_an_episode_cancels_its_request() -> None:
    for sampler_of in (DirectSampler, LockstepSampler):
        engine = Recorder(hold=True)
        sampler = sampler_of(engine)
        sampler.join("a")
        asking = asyncio.create_task(ask(sampler, "a"))
        await settled()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await settled()
        assert engine.cancelled == ["a"], sampler_of
        assert asyncio.all_tasks() == {asyncio.current_task()}, sampler_of


async def test_direct_passes_requests_on_as_they_come() -> None:
    engine = Recorder()
    direct = DirectSampler(engine)
    direct.join("b")
    direct.join("a")
    assert await ask(direct, "b", 5) == ANSWER
    assert (engine.asked, engine.seeds) == (["b"], [5])


# ── searches ──────────────────────────────────────────────────────────────────────────────────────


async def searching(
    waves: LockstepSampler, session: str, delay: int, order: list[str], *, searches: bool
) -> None:
    """Play an episode that searches if `searches` is true and then sends two requests."""
    try:
        await passes(delay)
        if searches:
            await waves.turn(session)
            # A search changes counters immediately after its turn begins, without an await.
            order.append(session)
        await episode(waves, session, [delay, 0])
    finally:
        waves.leave(session)


@given(
    delays=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    searches=st.lists(st.booleans(), min_size=6, max_size=6),
    shuffled=st.randoms(use_true_random=False),
)
def test_searches_happen_in_the_order_of_the_names(
    delays: list[int], searches: list[bool], shuffled
) -> None:
    async def run() -> tuple[list[str], Recorder]:
        order: list[str] = []
        engine = Recorder()
        waves = LockstepSampler(engine)
        sessions = [f"e{i}" for i in range(len(delays))]
        for session in sessions:
            waves.join(session)
        members = list(zip(sessions, delays, searches, strict=False))
        shuffled.shuffle(members)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for session, delay, searching_too in members:
                tasks.create_task(searching(waves, session, delay, order, searches=searching_too))
        return order, engine

    order, engine = asyncio.run(run())
    guided = [f"e{i}" for i in range(len(delays)) if searches[i]]
    assert order == guided
    free = [f"e{i}" for i in range(len(delays)) if not searches[i]]
    assert engine.asked[: len(free)] == free, "the others' first request is of the same wave"
    assert sorted(engine.asked) == sorted(2 * [f"e{i}" for i in range(len(delays))])


async def test_a_cancelled_search_does_not_hold_up_the_rest() -> None:
    waves, order = LockstepSampler(Recorder()), []
    for session in "abc":
        waves.join(session)
    first = asyncio.create_task(searching(waves, "a", 0, order, searches=True))
    await settled()
    first.cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(
            first,
            *(searching(waves, s, 0, order, searches=True) for s in "bc"),
            return_exceptions=True,
        )
    assert order == ["b", "c"]

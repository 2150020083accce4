"""Scheduler of evaluations: its bound, the order of episodes, and reuse of free episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from crl.engines.scripted import ScriptedEngine
from crl.errors import EngineError
from crl.evaluation.scheduling import EpisodeScheduler
from crl.rollout.episode import EpisodeKey, EpisodeRunner, Limits
from crl.rollout.waves import LockstepSampler
from crl.types import Completion, Sampling, Task, Trajectory
from support.doors import HIT, TASK, RecordingRetriever, dice, open_host, renderer, runner, until


class GatedEngine(ScriptedEngine):
    """Engine that records the sessions in the order of their first requests.

    All requests wait until the gate is open.
    """

    def __init__(self) -> None:
        super().__init__(renderer(), dice)
        self.opened = asyncio.Event()
        self.started_sessions: list[str] = []
        self.max_active = self._active = 0

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None,
        rng: int | None = None,
    ) -> Completion:  # fmt: skip
        assert session is not None
        if session not in self.started_sessions:
            self.started_sessions.append(session)
        self._active += 1
        self.max_active = max(self.max_active, self._active)
        try:
            await self.opened.wait()
            await asyncio.sleep(0.001)
        finally:
            self._active -= 1
        return await super().generate(ids, sampling, session=session, rng=rng)


def episodes(purpose: str, n: int) -> tuple[list[EpisodeKey], list[Task]]:
    keys = [EpisodeKey(purpose, 0, i, 0) for i in range(n)]
    return keys, [replace(TASK, seed=i) for i in range(n)]


def purposes(engine: GatedEngine) -> list[str]:
    return [session.partition("/")[0] for session in engine.started_sessions]


async def test_sets_run_concurrently_within_one_limit() -> None:
    engine, scheduler = GatedEngine(), EpisodeScheduler(6)
    async with open_host() as hosted:
        play = partial(scheduler.play, runner(engine, hosted.host), "free")
        parts = [partial(play, *episodes(name, n)) for name, n in (("a", 4), ("b", 9), ("c", 5))]
        playing = asyncio.create_task(scheduler.gather(parts))
        await until(lambda: len(engine.started_sessions) == 6)
        assert sorted(purposes(engine)) == [*"aaaabb"], "b does not wait for the end of a"
        engine.opened.set()
        played = await playing
    assert [len(set_) for set_ in played] == [4, 9, 5]
    assert [t.group for t in played[1]] == list(range(9)), "in the order of the keys"
    assert engine.max_active == 6


async def test_waiting_episodes_start_in_order_of_arrival() -> None:
    engine, scheduler = GatedEngine(), EpisodeScheduler(1)
    engine.opened.set()
    async with open_host() as hosted:
        play = partial(scheduler.play, runner(engine, hosted.host), "free")
        await scheduler.gather([partial(play, *episodes(name, 3)) for name in "abc"])
    assert engine.started_sessions == [
        key.session for name in "abc" for key in episodes(name, 3)[0]
    ]


async def test_urgent_episodes_start_first() -> None:
    engine, scheduler = GatedEngine(), EpisodeScheduler(2)
    async with open_host() as hosted:
        player = runner(engine, hosted.host)
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(scheduler.play(player, "free", *episodes("set", 4)))
            await until(lambda: len(engine.started_sessions) == 2)
            group.create_task(scheduler.play(player, "free", *episodes("visit", 2), urgent=True))
            await asyncio.sleep(0.01)
            engine.opened.set()
    assert purposes(engine) == ["set", "set", "visit", "visit", "set", "set"]


async def test_in_order_parts_run_one_after_the_other() -> None:
    engine, scheduler = GatedEngine(), EpisodeScheduler(3, in_order=True)
    engine.opened.set()
    async with open_host() as hosted, asyncio.timeout(30):
        play = partial(
            scheduler.play, runner(engine, hosted.host, sampler=LockstepSampler(engine)), "free"
        )
        await scheduler.gather([partial(play, *episodes(name, 4)) for name in "ab"])
    assert engine.started_sessions == [key.session for name in "ab" for key in episodes(name, 4)[0]]


async def test_slots_are_released_when_a_part_fails() -> None:
    """Check that playing and waiting episodes are cancelled.

    The next evaluation can use all slots.
    """
    engine, scheduler = GatedEngine(), EpisodeScheduler(2)

    async def fail() -> list[Trajectory]:
        await until(lambda: len(engine.started_sessions) == 2)
        raise EngineError("gone")

    async with open_host() as hosted, asyncio.timeout(30):
        play = partial(scheduler.play, runner(engine, hosted.host), "free")
        with pytest.raises(ExceptionGroup):
            await scheduler.gather([partial(play, *episodes("a", 5)), fail])
        engine.started_sessions.clear()
        engine.max_active = 0
        playing = asyncio.create_task(play(*episodes("b", 5)))
        await until(lambda: len(engine.started_sessions) == 2)
        engine.opened.set()
        assert len(await playing) == 5
        assert engine.max_active == 2


async def test_a_slot_granted_during_cancellation_is_passed_on() -> None:
    scheduler = EpisodeScheduler(1)
    async with asyncio.timeout(30):
        async with scheduler._slot(urgent=False):
            waiting = asyncio.create_task(scheduler._slot(urgent=True).__aenter__())
            await asyncio.sleep(0)
        waiting.cancel()  # the task owns the slot already but has not resumed yet
        await asyncio.wait([waiting])
        async with scheduler._slot(urgent=False):
            pass


# ── progress ──────────────────────────────────────────────────────────────────────────────────────


class TurnEngine(ScriptedEngine):
    """Engine whose episodes wait in every turn, until all of them have asked for it."""

    def __init__(self, episodes: int, on_turn: Callable[[], object]) -> None:
        super().__init__(renderer(), lambda messages: "wait")
        self._barrier, self._on_turn = asyncio.Barrier(episodes), on_turn

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None,
        rng: int | None = None,
    ) -> Completion:  # fmt: skip
        await self._barrier.wait()
        self._on_turn()
        return await super().generate(ids, sampling, session=session, rng=rng)


async def test_progress_of_episodes_that_all_end_together() -> None:
    """Ten episodes of three turns: each start and each turn is a fifth of an episode."""
    reports: list[tuple[int, int]] = []
    at_turns: list[int] = []
    scheduler = EpisodeScheduler(10, report=lambda *progress: reports.append(progress))
    async with open_host() as hosted, asyncio.timeout(30):
        engine = TurnEngine(10, lambda: at_turns.append(reports[-1][0]))
        player = runner(engine, hosted.host)
        for _ in range(2):
            with scheduler.expecting(10):
                played = await scheduler.play(player, "free", *episodes("set", 10))
            assert {t.turns for t in played} == {3}
            done = [done for done, _ in reports]
            assert (at_turns[0], at_turns[10], at_turns[20]) == (2, 4, 6), "none has finished"
            assert (done == sorted(done), done[-1]) == (True, 10)
            assert {total for _, total in reports} == {10}
            reports.clear()
            at_turns.clear()


async def test_progress_after_a_failed_evaluation_starts_at_zero() -> None:
    reports: list[int] = []
    scheduler = EpisodeScheduler(4, report=lambda done, total: reports.append(done))
    engine = GatedEngine()
    async with open_host() as hosted, asyncio.timeout(30):
        with scheduler.expecting(4):
            playing = asyncio.create_task(
                scheduler.play(runner(engine, hosted.host), "free", *episodes("set", 4))
            )
            await until(lambda: len(engine.started_sessions) == 4)
            playing.cancel()
            await asyncio.wait([playing])
        reports.clear()
        with scheduler.expecting(4):
            assert reports == [0]


# ── episodes that are not played twice ────────────────────────────────────────────────────────────


PairedEpisodes = tuple[list[Trajectory], list[Trajectory], int]


async def play_paired(player: EpisodeRunner, engine: ScriptedEngine) -> PairedEpisodes:
    """Return guided episodes, their free counterparts, and the number of episodes played again."""
    scheduler, (keys, tasks) = EpisodeScheduler(4), episodes("set", 5)
    guided = await scheduler.play(player, "guided", keys, tasks)
    engine.requests.clear()
    free = await scheduler.play_free(player, keys, guided)
    return guided, free, len({session for session, _ in engine.requests})


async def test_guided_episodes_without_experience_are_reused() -> None:
    engine = ScriptedEngine(renderer(), dice)
    async with open_host() as hosted:
        player = runner(engine, hosted.host, retriever=RecordingRetriever(None))
        guided, free, replayed = await play_paired(player, engine)
        alone = await EpisodeScheduler(4).play(player, "free", *episodes("set", 5))
    assert replayed == 0
    assert {t.condition for t in guided} == {"guided"}
    assert free == alone, "as if they had been played"


async def test_guided_episodes_with_experience_are_played_again() -> None:
    class HalfFilledShelf(RecordingRetriever):
        async def search(self, requests):
            return [HIT if request.group % 2 else None for request in requests]

    engine = ScriptedEngine(renderer(), dice)
    async with open_host() as hosted:
        player = runner(engine, hosted.host, retriever=HalfFilledShelf())
        guided, free, replayed = await play_paired(player, engine)
        alone = await EpisodeScheduler(4).play(player, "free", *episodes("set", 5))
    assert [bool(t.guidance.shown) for t in guided] == [False, True, False, True, False]
    assert replayed == 2
    assert free == alone


async def test_failed_episodes_are_played_again() -> None:
    engine = ScriptedEngine(renderer(), dice)
    async with open_host(broken={3}) as hosted:
        player = runner(engine, hosted.host, retriever=RecordingRetriever(None))
        guided, free, _ = await play_paired(player, engine)
        assert [bool(t.error) for t in guided] == [False, False, False, True, False]
        hosted.games[0].broken = ()
    assert [bool(t.error) for t in free] == [False, False, False, True, False]


async def test_episodes_whose_prompts_offer_the_tool_are_played_again() -> None:
    engine = ScriptedEngine(renderer(), dice)
    async with open_host() as hosted:
        plain = runner(engine, hosted.host, retriever=RecordingRetriever(None))
        keys, tasks = episodes("set", 5)
        guided = await EpisodeScheduler(4).play(plain, "guided", keys, tasks)
        engine.requests.clear()
        asking = replace(plain, limits={"doors": Limits(3, 32, max_questions=1)})
        await EpisodeScheduler(4).play_free(asking, keys, guided)
    assert len({session for session, _ in engine.requests}) == 5

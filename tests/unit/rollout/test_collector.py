"""Collector: the start of groups, the content and the end of a batch, and resuming."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from crl.engines.scripted import ScriptedEngine
from crl.envs.base import StreamSettings
from crl.envs.mixture import Mixture
from crl.envs.places import PlaceStream
from crl.errors import EngineError
from crl.methods.parts.rollouts import GuidedShare
from crl.protocols import Engine, State
from crl.rollout.collector import Collector
from crl.rollout.gate import StalenessGate
from crl.rollout.waves import DirectSampler, LockstepSampler
from crl.types import Completion, RolloutPlan, Sampling, Task, Trajectory
from support.doors import OpenHost, dice, open_host, renderer, runner, scripted, until

G, K, STEPS = 2, 3, 4


def stream() -> Mixture:
    return Mixture({"doors": PlaceStream("doors", "Find the {place}.", 7, StreamSettings())})


class BlockingEngine(ScriptedEngine):
    """Engine that answers a step's requests after `open` was called for the step.

    `waiting_requests` counts the waiting requests by step.
    """

    def __init__(self) -> None:
        super().__init__(renderer(), dice)
        self.waiting_requests: dict[int, int] = {}
        self._open: dict[int, asyncio.Event] = {}

    def open(self, step: int) -> None:
        self._open.setdefault(step, asyncio.Event()).set()

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        assert session is not None
        step = int(session.split("/")[1])
        self.waiting_requests[step] = self.waiting_requests.get(step, 0) + 1
        await self._open.setdefault(step, asyncio.Event()).wait()
        return await super().generate(ids, sampling, session=session, rng=rng)


class WaitingEngine(ScriptedEngine):
    """Engine whose episodes all take three turns, each after all others have asked for it."""

    def __init__(self, episodes: int) -> None:
        super().__init__(renderer(), lambda messages: "wait")
        self._barrier = asyncio.Barrier(episodes)

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        await self._barrier.wait()
        return await super().generate(ids, sampling, session=session, rng=rng)


class DyingEngine(ScriptedEngine):
    """Engine that dies at its n-th request (from 0). This request and all later ones fail."""

    def __init__(self, n: int) -> None:
        super().__init__(renderer(), dice)
        self._left = n

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        if self._left == 0:
            raise EngineError("the engine is gone")
        self._left -= 1
        return await super().generate(ids, sampling, session=session, rng=rng)


def make_collector(
    hosted: OpenHost,
    engine: Engine,
    source: Any = None,
    *,
    staleness: int = 0,
    completed: int = 0,
    **changes: Any,
) -> Collector:
    parts: dict[str, Any] = {
        "planner": GuidedShare(0.0),
        "group_size": K,
        "steps": STEPS,
        **changes,
    }
    gate = StalenessGate(G, staleness, completed)
    sampler = parts.pop("sampler", None)
    run = runner(engine, hosted.host, **({"sampler": sampler} if sampler else {}))
    return Collector(run, source or stream(), parts.pop("planner"), gate, **parts)


@asynccontextmanager
async def running(collector: Collector) -> AsyncIterator[asyncio.Task[None]]:
    """Run the collector in the background. Check that no task is left at the end."""
    task = asyncio.create_task(collector.run())
    try:
        async with asyncio.timeout(60):
            yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task is still running"


async def collected(collector: Collector, steps: int = STEPS) -> list[list[Trajectory]]:
    """Return all batches of a run. Complete each batch as soon as it is available.

    If the collector fails, the wait for its batches ends too.
    """
    batches = []
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(collector.run())
        while collector.completed_steps < steps:
            batches.append(await collector.batch(collector.completed_steps))
            await collector.complete(collector.completed_steps)
    return batches


# ── batches ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("staleness", [0, 1, 3])
async def test_batches_follow_the_stream(staleness: int) -> None:
    async with open_host() as hosted:
        batches = await collected(
            make_collector(hosted, ScriptedEngine(renderer(), dice), staleness=staleness)
        )
    tasks = stream().draw(G * STEPS)
    for step, batch in enumerate(batches):
        assert [(t.address.step, t.address.group, t.address.member) for t in batch] == [
            (step, group, member)
            for group in range(step * G, (step + 1) * G)
            for member in range(K)
        ]
        assert [t.task for t in batch] == [tasks[t.group] for t in batch], (
            "the members of a group share one task"
        )
    assert len({t.task.goal for batch in batches for t in batch}) > 1


async def test_the_order_does_not_depend_on_the_order_of_completion() -> None:
    """Check the order when the members of the first group take the longest."""

    class Slow(ScriptedEngine):
        async def generate(self, ids, sampling, *, session=None, rng=None) -> Completion:
            assert session is not None
            *_, group, member = session.split("/")
            await asyncio.sleep(0.02 * (5 - int(group) - int(member)))
            return await super().generate(ids, sampling, session=session, rng=rng)

    async with open_host() as hosted:
        (batch,) = await collected(make_collector(hosted, Slow(renderer(), dice), steps=1), steps=1)
    assert [(t.group, t.address.member) for t in batch] == [
        (g, m) for g in range(G) for m in range(K)
    ]


async def test_the_planner_determines_each_members_condition() -> None:
    class Half:
        def plan(self, task: Task, members: int, step: int) -> list[RolloutPlan]:
            return [RolloutPlan("guided" if member == 0 else "free") for member in range(members)]

    async with open_host() as hosted:
        (batch,) = await collected(
            make_collector(hosted, scripted("open"), planner=Half(), steps=1), steps=1
        )
    assert [t.condition for t in batch] == ["guided", "free", "free"] * G


# ── the gate ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_rollouts_run_exactly_as_far_ahead_as_the_gate_allows(staleness: int) -> None:
    engine, ahead = BlockingEngine(), staleness + 1
    async with (
        open_host() as hosted,
        running(collector := make_collector(hosted, engine, staleness=staleness)),
    ):
        await until(lambda: sum(engine.waiting_requests.values()) >= ahead * G * K)
        assert engine.waiting_requests == dict.fromkeys(range(ahead), G * K)
        for step in range(ahead):
            engine.open(step)
        await collector.batch(0)
        await until(lambda: True)
        assert max(engine.waiting_requests) == staleness, "a finished step is not completed yet"
        await collector.complete(0)
        await until(lambda: ahead in engine.waiting_requests)
        assert max(engine.waiting_requests) == ahead


async def test_a_batch_waits_for_all_its_groups() -> None:
    engine = BlockingEngine()
    async with (
        open_host() as hosted,
        running(collector := make_collector(hosted, engine, staleness=1)),
    ):
        engine.open(1)
        await until(lambda: len(engine.waiting_requests) == 2)
        waiting = asyncio.create_task(collector.batch(0))
        await until(lambda: True)
        assert not waiting.done(), "only the later step is finished"
        engine.open(0)
        assert {t.address.step for t in await waiting} == {0}


async def test_run_ends_when_every_group_has_finished() -> None:
    async with (
        open_host() as hosted,
        running(collector := make_collector(hosted, scripted("open"), steps=2)) as task,
    ):
        for step in range(2):
            await collector.batch(step)
            await collector.complete(step)
        await task
        assert collector.completed_steps == 2


async def test_a_resumed_collector_continues_with_its_step() -> None:
    source = stream()
    source.draw(2 * G)
    async with open_host() as hosted:
        batches = await collected(make_collector(hosted, scripted("open"), source, completed=2))
    assert [t.group for batch in batches for t in batch] == [
        group for group in range(2 * G, 4 * G) for _ in range(K)
    ]
    assert batches[0][0].task == stream().draw(2 * G + 1)[-1]


# ── failures ──────────────────────────────────────────────────────────────────────────────────────


async def test_errors_are_in_the_batch_and_the_run_continues() -> None:
    async with open_host(broken={stream().draw(G)[1].seed}) as hosted:
        batches = await collected(make_collector(hosted, scripted("open")))
    assert [bool(t.error) for t in batches[0]] == [False] * K + [True] * K
    assert [(t.group, t.address.member) for t in batches[0]][K:] == [
        (1, member) for member in range(K)
    ]
    assert not any(t.error for batch in batches[1:] for t in batch)


async def test_a_batch_may_contain_only_errors() -> None:
    async with open_host() as hosted:
        batches = await collected(make_collector(hosted, scripted("crash"), staleness=1))
    assert [len(batch) for batch in batches] == [G * K] * STEPS
    assert all(t.error for batch in batches for t in batch)


@pytest.mark.parametrize("requests", [0, 7, 20])
@pytest.mark.parametrize("in_waves", [False, True])
async def test_an_engine_error_ends_the_run(requests: int, in_waves: bool) -> None:
    engine = DyingEngine(requests)
    sampler = LockstepSampler(engine) if in_waves else None
    async with open_host() as hosted:
        collector = make_collector(hosted, engine, staleness=0 if in_waves else 1, sampler=sampler)
        with pytest.raises(ExceptionGroup) as raised:
            await collected(collector)
        causes = leaf_errors(raised.value)
        assert causes
        assert all(isinstance(cause, EngineError) for cause in causes)
        assert not hosted.host._acquired


def leaf_errors(group: BaseExceptionGroup) -> list[BaseException]:
    return [
        leaf
        for error in group.exceptions
        for leaf in (leaf_errors(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]


async def test_a_cancelled_collector_releases_every_environment() -> None:
    engine = BlockingEngine()
    async with open_host() as hosted:
        async with running(make_collector(hosted, engine, staleness=1)):
            await until(lambda: sum(engine.waiting_requests.values()) == 2 * G * K)
            assert len(hosted.host._acquired) == 2 * G * K
        assert not hosted.host._acquired


# ── resuming ──────────────────────────────────────────────────────────────────────────────────────


def drawn_tasks(state: State) -> int:
    return state["drawn"]


@pytest.mark.parametrize("staleness", [0, 1])
async def test_the_source_state_precedes_the_first_incomplete_step(
    staleness: int,
) -> None:
    engine, source = BlockingEngine(), stream()
    async with (
        open_host() as hosted,
        running(collector := make_collector(hosted, engine, source, staleness=staleness)),
    ):
        assert drawn_tasks(collector.source_state()) == 0
        for step in range(STEPS):
            ahead = min(step + staleness, STEPS - 1)
            await until(lambda ahead=ahead: engine.waiting_requests.get(ahead) == G * K)
            assert drawn_tasks(source.state()) == (ahead + 1) * G, (
                "the collector has drawn tasks of later steps"
            )
            assert drawn_tasks(collector.source_state()) == step * G
            resumed = stream()
            resumed.load_state(collector.source_state())
            engine.open(step)
            assert resumed.draw(G) == [t.task for t in (await collector.batch(step))[::K]], (
                "a resumed run draws the same tasks again"
            )
            assert drawn_tasks(collector.source_state()) == step * G, (
                "a batch that is not trained yet will be played again"
            )
            await collector.complete(step)
            assert drawn_tasks(collector.source_state()) == (step + 1) * G


async def test_observations_count_in_a_synchronous_run() -> None:
    """Check a source that learns from observations.

    Its state at a checkpoint must include every completed step.
    """

    class Observer(Mixture):
        seen = 0

        def observe(self, trajectories: Sequence[Trajectory]) -> None:
            self.seen += len(trajectories)

        def state(self) -> State:
            return {**super().state(), "seen": self.seen}

    source = Observer({"doors": PlaceStream("doors", "{place}", 0, StreamSettings())})
    async with (
        open_host() as hosted,
        running(collector := make_collector(hosted, scripted("open"), source)),
    ):
        for step in range(STEPS):
            source.observe(await collector.batch(step))
            await collector.complete(step)
            await until(lambda: True)
            assert collector.source_state()["seen"] == (step + 1) * G * K


async def test_groups_start_one_after_another_when_all_have_joined():
    """Check that other tasks run between the starts of two groups.

    Waves wait for all members that have joined. They must therefore know all members of a step
    before the step starts.
    """
    joined: list[str] = []
    turns = 0
    started: list[tuple[int, int]] = []

    class Joining(DirectSampler):
        def join(self, session: str) -> None:
            joined.append(session)

    class Watching(GuidedShare):
        def plan(self, task: Task, members: int, step: int) -> Sequence[RolloutPlan]:
            started.append((turns, len(joined)))
            return super().plan(task, members, step)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with open_host() as hosted:
        engine = scripted("open")
        collector = make_collector(
            hosted, engine, planner=Watching(0.0), sampler=Joining(engine), steps=1
        )
        async with running(collector) as task:
            other = asyncio.create_task(others())
            await task
            other.cancel()
    assert [known for _, known in started] == [G * K] * G
    assert len({turn for turn, _ in started}) == G


async def test_progress_of_groups_that_all_end_together() -> None:
    """Two groups of three members: starts and turns are a fifth of an episode."""
    reports: list[tuple[int, int]] = []
    async with open_host() as hosted:
        collector = make_collector(
            hosted, WaitingEngine(G * K), steps=1, report=lambda *p: reports.append(p)
        )
        async with running(collector):
            assert {t.turns for t in await collector.batch(0)} == {3}
    assert [done for done, _ in reports][:2] == [0, 1], "no group has finished"
    assert reports.index((1, 2)) < reports.index((2, 2))
    assert reports[-1] == (2, 2)

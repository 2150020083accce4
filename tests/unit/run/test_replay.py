"""Analysis of failures and retrieval of tasks overlap with rollouts and training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crl.embedders.cached import CachedEmbedder
from crl.envs.mixture import Mixture
from crl.envs.seeded import SeedStream
from crl.evaluation.diagnostics import Diagnostics
from crl.manager import BankFailures, ExperienceManager
from crl.manager.failure_notes import failure_modes, read_answer
from crl.methods.parts.distilling import FailedEpisodes
from crl.methods.parts.replay import FailureReplay, ReplaySettings
from crl.run.experience import ExperiencePipeline, PipelineSettings, Replay
from crl.types import Completion, Sampling, Segment, Task, Trajectory
from support.doors import until
from support.managers import PROMPTS, NoteEngine, RecordingMonitor, WordEmbedder, open_manager
from support.trajectories import build_trajectory

NOTE = "DOMINANT_TYPE: navigation_loop\nCORE_LESSON: a b\nRETRIEVAL_QUERY: a b"


class BlockedEngine(NoteEngine):
    """Engine that answers after `open` is set."""

    def __init__(self) -> None:
        super().__init__({"east": NOTE})
        self.open = asyncio.Event()

    async def generate(self, ids: Sequence[int], sampling: Sampling, **options: Any) -> Completion:
        await self.open.wait()
        return await super().generate(ids, sampling, **options)


@asynccontextmanager
async def pipeline(
    path: Path, engine: BlockedEngine, *, background: bool
) -> AsyncIterator[tuple[ExperiencePipeline, FailureReplay, ExperienceManager, RecordingMonitor]]:
    prompts = replace(
        PROMPTS, notes=True, read_note=lambda _, text: read_answer(text, failure_modes("room"))
    )
    manager = await open_manager(
        path / "bank.sqlite", engine, prompts=prompts,
        on_distilled=lambda distilled: library.add(distilled),
    )  # fmt: skip
    library, monitor = BankFailures(manager, "run"), RecordingMonitor()
    tasks = FailureReplay(
        Mixture({"room": SeedStream("room", "Go.", 0)}), ReplaySettings(1.0, 3, 100, 6, 0.0), 0
    )
    replay = Replay(tasks, library, manager.calls)
    experience = ExperiencePipeline(
        manager, engine, FailedEpisodes(), None, Diagnostics({}),
        CachedEmbedder(WordEmbedder(), 8), monitor,
        PipelineSettings("run", background=background, replay=replay),
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            yield experience, tasks, manager, monitor
    finally:
        await manager.aclose()


def batch(step: int, tasks: Sequence[Task]) -> list[Trajectory]:
    """Return a failed episode of each task of a step."""
    segments = (Segment("user", "at 2 3", "env"), Segment("assistant", "east", "policy"))
    return [
        build_trajectory(task, step, step * len(tasks) + i, segments=segments)
        for i, task in enumerate(tasks)
    ]


async def test_no_rollout_waits_for_the_analysis(tmp_path: Path) -> None:
    engine = BlockedEngine()
    async with pipeline(tmp_path, engine, background=True) as (experience, tasks, manager, monitor):
        running = asyncio.create_task(experience.run())
        first = tasks.draw(2)
        await experience.observe(batch(0, first))
        await experience.complete(1, [])
        second = tasks.draw(2)
        assert not {task.seed for task in first} & {task.seed for task in second}, (
            "the step is completed and the next one is drawn before any analysis has ended"
        )
        (line,) = monitor.of_kind("bank")
        assert line["perf/distil_calls"] == 2
        assert line["perf/distil_s"] > 0
        assert line["replay/patterns"] == 0
        engine.open.set()
        await manager.drain()
        await experience.complete(2, [])
        await until(lambda: bool(tasks.take_metrics(_empty())["replay/waiting"]))
        assert {task.seed for task in tasks.draw(2)} == {task.seed for task in first}
        running.cancel()


async def test_a_deterministic_run_retrieves_at_the_step_boundary(tmp_path: Path) -> None:
    engine = BlockedEngine()
    engine.open.set()
    async with pipeline(tmp_path, engine, background=False) as (experience, tasks, _, monitor):
        first = tasks.draw(2)
        await experience.observe(batch(0, first))
        await experience.complete(1, [])
        assert {task.seed for task in tasks.draw(2)} == {task.seed for task in first}
        (line,) = monitor.of_kind("bank")
        assert (line["replay/patterns"], line["replay/retrieved"]) == (2, 2)
        assert line["failures/navigation_loop"] == 2


async def test_the_last_failures_of_a_run_are_retrieved(tmp_path: Path) -> None:
    engine = BlockedEngine()
    async with pipeline(tmp_path, engine, background=True) as (experience, tasks, _, monitor):
        first = tasks.draw(2)
        await experience.observe(batch(0, first))
        await experience.complete(1, [])
        engine.open.set()
        await experience.finish()
        assert monitor.of_kind("bank")[-1]["replay/patterns"] == 2
        assert {task.seed for task in tasks.draw(2)} == {task.seed for task in first}


@pytest.mark.parametrize("began", [False, True], ids=["waiting", "in progress"])
async def test_failures_that_are_not_retrieved_yet_survive_a_resumption(
    tmp_path: Path, began: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = BlockedEngine()
    engine.open.set()
    async with pipeline(tmp_path, engine, background=True) as (experience, tasks, manager, _):
        first = tasks.draw(2)
        await experience.observe(batch(0, first))
        await experience.complete(1, [])
        await manager.drain()
        retrieval = None
        if began:
            embeds = asyncio.Event()
            monkeypatch.setattr(manager, "similar", lambda *args: embeds.wait())  # never ends
            retrieval = asyncio.create_task(_replay(experience).retrieve())
            await asyncio.sleep(0)
        state = json.loads(json.dumps(await experience.state([]) | {"source": tasks.state()}))
        if retrieval:
            retrieval.cancel()
    async with pipeline(tmp_path, engine, background=False) as (experience, tasks, _, monitor):
        tasks.load_state(state["source"])
        await experience.restore(tmp_path, state)
        await experience.complete(2, [])
        (line,) = monitor.of_kind("bank")
        assert (line["replay/patterns"], line["failures/navigation_loop"]) == (2, 2)
        assert {task.seed for task in tasks.draw(2)} == {task.seed for task in first}


async def test_a_snapshot_holds_only_known_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure in the snapshot is new or retrieved, even if it was written at the same time."""
    engine = BlockedEngine()
    engine.open.set()
    async with pipeline(tmp_path, engine, background=True) as (experience, tasks, manager, _):
        await experience.observe(batch(0, tasks.draw(1)))
        change, stored, free = manager._searcher.change, asyncio.Event(), asyncio.Event()

        async def slow_change(*args: Any) -> None:
            stored.set()
            await free.wait()
            await change(*args)

        monkeypatch.setattr(manager._searcher, "change", slow_change)
        draining = asyncio.create_task(manager.drain())
        await stored.wait()
        saving = asyncio.create_task(experience.state([]))
        await asyncio.sleep(0.1)
        free.set()
        state = await saving
        await draining
        assert state["replay"]["library"]["new"] == ["run/0/0/0#0"]


def _replay(experience: ExperiencePipeline) -> Replay:
    replay = experience._settings.replay
    assert replay
    return replay


def _empty() -> Any:
    """Return a library without failures."""
    return type("Empty", (), {"modes": staticmethod(dict)})()

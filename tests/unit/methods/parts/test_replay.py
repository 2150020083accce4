"""Agent-in-World: failures are analysed, and training tasks with similar failures return."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crl.config import load
from crl.config.schema import BankSection, ExtractorSection, RetrievalSection
from crl.envs.mixture import Mixture
from crl.errors import RolloutError
from crl.manager import BankFailures, EpisodeId, ExperienceManager, ManagerSettings, failure_library
from crl.manager.failure_notes import FailureNote, failure_modes, read_answer, read_note
from crl.manager.retrieval import searching
from crl.methods.parts.replay import MAX_LISTED, FailureReplay, ReplaySettings
from crl.prompts import prompt
from crl.protocols import Failure, State
from crl.types import Completion, Sampling, Split, Task, Trajectory
from support.doors import renderer
from support.managers import PROMPTS, NoteEngine, open_manager, request
from support.trajectories import build_trajectory

MODES = ("navigation_loop", "missing_precondition", "entity_confusion", "premature_give_up")


def drawn_task(k: int, split: Split = "train") -> Task:
    """Return task k of the stream. Its kind, which decides how agents fail, is k modulo 4."""
    return Task("room", k, split, f"Goal {k}.", {"kind": k % 4})


class Stream:
    """`TurnSource` of numbered tasks."""

    def __init__(self, splits: Sequence[Split] = ("train",)) -> None:
        self.drawn, self.splits = 0, splits
        self.observed: list[Trajectory] = []

    def draw(self, n: int) -> list[Task]:
        numbers = range(self.drawn, self.drawn + n)
        self.drawn += n
        return [drawn_task(k, self.splits[k % len(self.splits)]) for k in numbers]

    def next_name(self) -> str:
        return "room"

    def skip(self) -> None:
        """Do nothing: the next turn is that of the same task."""

    def observe(self, trajectories: Sequence[Trajectory]) -> None:
        self.observed += trajectories

    def state(self) -> State:
        return {"drawn": self.drawn}

    def load_state(self, state: State) -> None:
        self.drawn = state["drawn"]


def note(mode: str) -> str:
    words = mode.replace("_", " ")
    return (
        f"<reflection>\nDOMINANT_TYPE: {mode}\nDETAIL: d\nCRITICAL_STEP: 1\n"
        f"CORE_LESSON: avoid {words}\nRETRIEVAL_QUERY: {words} {words} {words}\n</reflection>"
    )


SETTINGS = ReplaySettings(0.5, matches=3, history=1000, waiting=24, min_similarity=0.1)
ENGINE_ANSWERS = {mode: note(mode) for mode in MODES} | {"nothing": "I do not know."}


@asynccontextmanager
async def library(
    path: Path, settings: ManagerSettings | None = None, engine: Any = None
) -> AsyncIterator[tuple[ExperienceManager, BankFailures]]:
    prompts = replace(
        PROMPTS, notes=True, read_note=lambda _, text: read_answer(text, failure_modes("room"))
    )
    manager = await open_manager(
        path / "bank.sqlite", engine or NoteEngine(ENGINE_ANSWERS), settings or ManagerSettings(),
        prompts=prompts, on_distilled=lambda distilled: failures.add(distilled),
    )  # fmt: skip
    failures = BankFailures(manager, "run")
    try:
        yield manager, failures
    finally:
        await manager.aclose()


async def fail(
    manager: ExperienceManager, step: int, group: int, task: Task, mode: str, run: str = "run"
) -> None:
    """Distil a failed episode, whose writer names this mode."""
    failed = request(step, group, 0, note=mode, of=task, success=False)
    await manager.submit(replace(failed, episode=EpisodeId(run, step, group, 0)))
    await manager.drain()


Fails = Callable[[Task], str | None]
"""Function that returns the mode in which the agent fails at a task, None if it succeeds."""


async def play(manager: ExperienceManager, step: int, tasks: Sequence[Task], fails: Fails) -> None:
    """Distil the failures of a step."""
    for group, task in enumerate(tasks, start=step * len(tasks)):
        if mode := fails(task):
            await fail(manager, step, group, task, mode)


async def test_the_drawn_tasks_move_towards_the_failure_modes(tmp_path: Path):
    """The agent fails at tasks of kind 1 for one reason, and at half of kind 2 for another.

    From step 10 on it has learned kind 2. Replay of random failed tasks would still draw them.
    Retrieved tasks of earlier steps may wait until step 13.
    """
    early, late = Counter[Any](), Counter[Any]()
    async with library(tmp_path) as (manager, failures):
        replay, drawn = FailureReplay(Stream(), SETTINGS, seed=0), set[int]()
        for step in range(20):
            tasks = replay.draw(8)
            assert step or [task.seed for task in tasks] == list(range(8)), "nothing is known"
            again = [task.params["kind"] for task in tasks if task.seed in drawn]
            (early if step <= 13 else late).update(again)
            drawn |= {task.seed for task in tasks}

            def fails(task: Task, learned: bool = step >= 10) -> str | None:
                second = task.seed % 8 == 2 and not learned
                return {1: MODES[1], 2: MODES[2] if second else None}.get(int(task.params["kind"]))

            await play(manager, step, tasks, fails)
            await replay.retrieve(failures)
    assert set(early) == {1, 2}, "tasks with both modes return"
    assert set(late) == {1}, "only tasks with the current mode return"
    assert late[1] > 6 * 8 / 4, "the other tasks are drawn at half the draws, or more"


async def test_no_task_of_the_stream_is_lost(tmp_path: Path):
    async with library(tmp_path) as (manager, failures):
        replay = FailureReplay(Stream(), SETTINGS, seed=0)
        tasks = list(replay.draw(8))
        await play(manager, 0, tasks, lambda task: MODES[0])
        await replay.retrieve(failures)
        later = replay.draw(8)
    new = [task.seed for task in later if task.seed >= 8]
    assert new == list(range(8, 8 + len(new)))
    assert 0 < len(new) < 8
    again = [task for task in later if task.seed < 8]
    assert all(task in tasks for task in again), "the same seed, goal and params"
    assert len({task.seed for task in again}) == len(again), "each once"


async def test_retrieved_tasks_failed_in_the_same_way(tmp_path: Path):
    async with library(tmp_path) as (manager, failures):
        replay = FailureReplay(Stream(), replace(SETTINGS, matches=2, ratio=1.0), seed=0)
        tasks = replay.draw(8)
        await play(manager, 0, tasks, lambda task: MODES[int(task.params["kind"])])
        failures.mark_retrieved(failures.new())
        (task,) = replay.draw(1)
        await fail(manager, 1, 1, task, MODES[3])
        await replay.retrieve(failures)
        assert {task.seed for task in replay.draw(2)} == {3, 7}
        assert replay.draw(1)[0].seed == 9, "no retrieved task is left"
        metrics = dict(replay.take_metrics(failures))
    assert metrics == {
        "replay/share": 2 / 12,
        "replay/patterns": 1,
        "replay/retrieved": 2,
        "replay/waiting": 0,
        **{f"failures/{mode}": 2 for mode in MODES},
        f"failures/{MODES[3]}": 3,
    }


@pytest.mark.parametrize(("least", "found"), [(0.999, set()), (-1.0, {1})])
async def test_failures_that_are_not_similar_enough_return_nothing(
    least: float, found: set[int], tmp_path: Path
):
    async with library(tmp_path) as (manager, failures):
        settings = replace(SETTINGS, ratio=1.0, min_similarity=least)
        replay = FailureReplay(Stream(), settings, seed=0)
        await play(manager, 0, replay.draw(2), lambda task: MODES[task.seed])
        failures.mark_retrieved(
            [failure for failure in failures.new() if failure.goal != "Goal 0."]
        )
        await replay.retrieve(failures)
        assert {task.seed for task in replay.draw(1)} == (found or {2})


async def test_the_newest_of_equally_similar_failures_return(tmp_path: Path):
    async with library(tmp_path) as (manager, failures):
        replay = FailureReplay(Stream(), replace(SETTINGS, ratio=1.0, matches=2), seed=0)
        await play(manager, 0, replay.draw(8), lambda task: MODES[0])
        failures.mark_retrieved(
            [failure for failure in failures.new() if failure.goal != "Goal 7."]
        )
        await replay.retrieve(failures)
        assert {task.seed for task in replay.draw(2)} == {5, 6}


async def test_a_failure_of_another_task_does_not_bring_back_the_drawn_one(tmp_path: Path):
    """The bank holds a failure on another task under the address of a group that won."""
    async with library(tmp_path) as (manager, failures):
        replay = FailureReplay(Stream(), replace(SETTINGS, ratio=1.0), seed=0)
        lost, _ = replay.draw(2)
        await fail(manager, 0, 0, lost, MODES[0])
        other = replace(drawn_task(9), split="unseen")
        await fail(manager, 0, 1, other, MODES[0])
        failures.mark_retrieved(
            [failure for failure in failures.new() if failure.goal == other.goal]
        )
        await replay.retrieve(failures)
        assert [task.seed for task in replay.draw(2)] == [2, 3], "nothing was retrieved"


async def test_the_tasks_of_earlier_patterns_wait(tmp_path: Path):
    """A new retrieval adds to the waiting tasks, as in lines 23 and 24 of Algorithm 1."""
    async with library(tmp_path) as (manager, failures):
        replay = FailureReplay(Stream(), replace(SETTINGS, ratio=1.0, matches=1), seed=0)
        tasks = replay.draw(8)
        await play(manager, 0, tasks, lambda task: MODES[int(task.params["kind"])])
        await replay.retrieve(failures)
        assert replay.take_metrics(failures)["replay/waiting"] == 8
        first, second = replay.draw(2)
        await fail(manager, 1, 2, first, MODES[int(first.params["kind"])])
        await replay.retrieve(failures)
        later = {replay.draw(1)[0].seed for _ in range(7)}
    assert later >= set(range(8)) - {first.seed, second.seed}


@pytest.mark.parametrize(("bound", "waiting"), [(1, {6, 7}), (3, {4, 6, 7}), (8, {4, 5, 6, 7})])
async def test_the_oldest_waiting_tasks_are_dropped(tmp_path: Path, bound: int, waiting: set[int]):
    """Tasks 4 and 5 fail in one way, then 6 and 7 in another. Each failure finds the other task."""
    async with library(tmp_path) as (manager, failures):
        settings = replace(SETTINGS, ratio=1.0, matches=1, waiting=bound)
        replay = FailureReplay(Stream(), settings, seed=0)
        tasks = replay.draw(8)
        for group in (4, 5):
            await fail(manager, 0, group, tasks[group], MODES[0])
        await replay.retrieve(failures)
        for group in (6, 7):
            await fail(manager, 0, group, tasks[group], MODES[1])
        await replay.retrieve(failures)
        assert replay.take_metrics(failures)["replay/waiting"] == len(waiting)
        assert {replay.draw(1)[0].seed for _ in waiting} == waiting
        assert replay.draw(1)[0].seed == 8


async def test_a_retrieved_task_takes_the_turn_of_its_own_name(tmp_path: Path):
    """Tasks of one name fail. Both names keep equal shares."""

    def mixture() -> Mixture:
        return Mixture({"room": Stream(), "maze": Stream()})

    async with library(tmp_path) as (manager, failures):
        replay = FailureReplay(mixture(), replace(SETTINGS, ratio=1.0), seed=0)
        tasks = replay.draw(9)
        assert [task.name for task in tasks] == ["room", "maze"] * 4 + ["room"]
        await play(manager, 0, tasks, lambda task: MODES[0] if task.name == "room" else None)
        await replay.retrieve(failures)
        resumed = FailureReplay(mixture(), replace(SETTINGS, ratio=1.0), seed=0)
        resumed.load_state(json.loads(json.dumps(replay.state())))
        later = replay.draw(9)
        assert resumed.draw(9) == later
    assert [task.name for task in later] == ["maze", "room"] * 4 + ["maze"]
    assert [task.seed for task in later[::2]] == [4, 5, 6, 7, 8], "new tasks of the stream"
    assert {task.seed for task in later[1::2]} < {0, 1, 2, 3, 4}, "retrieved tasks"


async def test_the_failures_of_a_group_with_one_mode_are_one_pattern(tmp_path: Path):
    async with library(tmp_path) as (manager, failures):
        replay = FailureReplay(Stream(), SETTINGS, seed=0)
        tasks = replay.draw(2)
        for member, mode in enumerate((MODES[0], MODES[0], MODES[1])):
            failed = request(0, 0, member, note=mode, of=tasks[0], success=False)
            await manager.submit(failed)
        await manager.drain()
        await replay.retrieve(failures)
        metrics = replay.take_metrics(failures)
    assert metrics["replay/patterns"] == 2
    assert metrics["replay/retrieved"] == 0, "a task is not similar to itself"


async def test_a_pattern_that_is_analysed_in_two_parts_counts_once(tmp_path: Path):
    async with library(tmp_path) as (manager, failures):
        replay = FailureReplay(Stream(), SETTINGS, seed=0)
        tasks = replay.draw(2)
        await play(manager, 0, tasks, lambda task: MODES[0])
        await replay.retrieve(failures)
        for member, mode in ((1, MODES[0]), (2, MODES[1])):
            failed = request(0, 0, member, note=mode, of=tasks[0], success=False)
            await manager.submit(failed)
        await manager.drain()
        resumed = FailureReplay(Stream(), SETTINGS, seed=0)
        resumed.load_state(json.loads(json.dumps(replay.state())))
        resumed.load_retrieval(json.loads(json.dumps(replay.retrieval())))
        await resumed.retrieve(failures)
        assert resumed.take_metrics(failures)["replay/patterns"] == 1, "that of the second mode"
        assert failures.new() == []


async def test_tasks_of_evaluations_never_return(tmp_path: Path):
    """Failures on them are forced into the bank under all addresses that the bank may hold."""
    async with library(tmp_path) as (manager, failures):
        stream = Stream(splits=("train", "unseen", "seen"))
        replay = FailureReplay(stream, replace(SETTINGS, ratio=1.0, matches=100), seed=0)
        tasks = replay.draw(12)
        held_out = [replace(drawn_task(k), split="unseen", goal=f"Unseen {k}.") for k in range(12)]
        for group, task in enumerate(tasks):
            await fail(manager, 0, group, task, MODES[0])
        for group, task in enumerate(held_out):
            await fail(manager, 0, group, task, MODES[0], run="eval")  # another run in the bank
            await fail(manager, 0, 100 + group, task, MODES[0])  # a group that was not drawn
            await fail(manager, 7, group, task, MODES[0])  # a step that was not drawn
            failed = request(0, group, 5, note=MODES[0], of=task, success=False)
            await manager.submit(failed)  # the address of a training group
        await manager.drain()
        await replay.retrieve(failures)
        again = [replay.draw(1)[0] for _ in range(4)]
        trained = [task for task in tasks if task.split == "train"]
        assert len(trained) == 4
        assert all(task in trained for task in again)
        assert {task.seed for task in again} == {0, 3, 6, 9}
        assert replay.draw(1)[0].seed == 12, "all retrieved tasks were drawn"
        assert failures.modes() == {MODES[0]: 12 + 3 * 12}, "without those of the other run"


async def test_a_resumed_stream_draws_the_same_tasks(tmp_path: Path):
    async with library(tmp_path) as (manager, failures):
        replay = FailureReplay(Stream(), SETTINGS, seed=3)
        await play(manager, 0, replay.draw(8), lambda task: MODES[task.seed % 2])
        await replay.retrieve(failures)
        replay.draw(3)
        saved = json.loads(json.dumps(replay.state()))
        expected = [replay.draw(4)]
        await play(manager, 2, expected[0], lambda task: MODES[1])
        new = failures.new()
        for resumed in (replay, FailureReplay(Stream(), SETTINGS, seed=3)):
            resumed.load_state(saved)
            drawn = [resumed.draw(4)]
            await resumed.retrieve(_Library(failures, new))
            drawn.append(resumed.draw(8))
            if len(expected) == 1:
                expected = drawn
            assert drawn == expected
        other = FailureReplay(Stream(), SETTINGS, seed=4)
        other.load_state(saved)
        assert other.draw(4) != expected[0], "the draws depend on the seed"


async def test_a_retrieval_after_the_saved_draw_is_not_lost(tmp_path: Path):
    """Step 2 is drawn before the failures of step 0 are retrieved, as with max_staleness=1."""
    async with library(tmp_path) as (manager, failures):
        replay = FailureReplay(Stream(), replace(SETTINGS, ratio=1.0), seed=0)
        tasks = replay.draw(4)
        await play(manager, 0, tasks, lambda task: MODES[0])
        source = json.loads(json.dumps(replay.state()))
        assert {task.seed for task in replay.draw(4)} == {4, 5, 6, 7}
        await replay.retrieve(failures)
        replay.draw(3)  # of a later step, which the resumed run draws again
        retrieval = json.loads(json.dumps(replay.retrieval()))

        resumed = FailureReplay(Stream(), replace(SETTINGS, ratio=1.0), seed=0)
        resumed.load_state(source)
        resumed.load_retrieval(retrieval)
        assert {task.seed for task in resumed.draw(4)} == {0, 1, 2, 3}

        source = json.loads(json.dumps(replay.state()))
        resumed.load_state(source)
        resumed.load_retrieval(retrieval)
        assert len({task.seed for task in resumed.draw(4)} & {0, 1, 2, 3}) == 1, "three were drawn"


async def test_several_retrievals_after_the_saved_draw_are_not_lost(tmp_path: Path):
    async with library(tmp_path) as (manager, failures):
        settings = replace(SETTINGS, ratio=1.0, matches=1)
        replay = FailureReplay(Stream(), settings, seed=0)
        tasks = replay.draw(8)
        for group in (0, 1):
            await fail(manager, 0, group, tasks[group], MODES[0])
        await replay.retrieve(failures)
        source = json.loads(json.dumps(replay.state()))
        for group in (2, 3, 4, 5):
            await fail(manager, 0, group, tasks[group], MODES[group // 2])
            if group % 2:
                await replay.retrieve(failures)
                replay.draw(2)  # of later steps, which the resumed run draws again
        retrieval = json.loads(json.dumps(replay.retrieval()))
        resumed = FailureReplay(Stream(), settings, seed=0)
        resumed.load_state(source)
        resumed.load_retrieval(retrieval)
        assert {task.seed for task in resumed.draw(6)} == {0, 1, 2, 3, 4, 5}


class _Library:
    """`FailureLibrary` with given new failures."""

    def __init__(self, failures: BankFailures, new: Sequence[Failure]) -> None:
        self._failures, self._new = failures, new
        self.modes, self.similar, self.ask = failures.modes, failures.similar, failures.ask

        self.mark_retrieved = failures.mark_retrieved
        self.tokens = failures.tokens
        self.state, self.load_state = failures.state, failures.load_state

    def new(self) -> Sequence[Failure]:
        return self._new


async def test_only_the_last_drawn_tasks_are_remembered(tmp_path: Path):
    async with library(tmp_path) as (manager, failures):
        settings = replace(SETTINGS, ratio=1.0, history=4, matches=100)
        replay = FailureReplay(Stream(), settings, seed=0)
        await play(manager, 0, replay.draw(8), lambda task: MODES[0])
        await replay.retrieve(failures)
        assert {replay.draw(1)[0].seed for _ in range(4)} == {4, 5, 6, 7}


@pytest.mark.parametrize("threads_from", [searching.THREADS_FROM, 0])
async def test_notes_that_cannot_return_do_not_crowd_out_others(
    tmp_path: Path, threads_from: int, monkeypatch: pytest.MonkeyPatch
):
    """Notes of another run, and of tasks before the history, are as near to the query."""
    monkeypatch.setattr(searching, "THREADS_FROM", threads_from)
    found = RetrievalSection(candidates=2)
    async with library(tmp_path, ManagerSettings(retrieval=found)) as (manager, failures):
        replay = FailureReplay(Stream(), replace(SETTINGS, ratio=1.0, history=4), seed=0)
        tasks = replay.draw(8)
        for group in range(4):
            await fail(manager, 0, group, tasks[group], MODES[0])  # before the history
            await fail(manager, 0, group, tasks[group], MODES[0], run="other")
        await fail(manager, 0, 4, tasks[4], MODES[0])
        await fail(manager, 0, 5, tasks[5], MODES[0])
        failures.mark_retrieved(failures.new())
        await fail(manager, 0, 6, tasks[6], MODES[0])
        await replay.retrieve(failures)
        assert replay.take_metrics(failures)["replay/retrieved"] == 2
        assert {replay.draw(1)[0].seed for _ in range(2)} == {4, 5}


async def test_the_metrics_parse_each_note_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    parsed = list[str]()

    def read(text: str) -> FailureNote:
        parsed.append(text)
        return read_note(text)

    monkeypatch.setattr(failure_library, "read_note", read)
    bounds = ManagerSettings(bank=BankSection(max_entries=4))
    async with library(tmp_path, bounds) as (manager, failures):
        for group in range(4):
            await fail(manager, 0, group, drawn_task(group), MODES[group % 2])
            failures.modes()
        assert len(parsed) == 4
        assert failures.modes() == {MODES[0]: 2, MODES[1]: 2}
        await fail(manager, 0, 4, drawn_task(4), MODES[2])  # evicts the oldest
        assert failures.modes() == {MODES[0]: 1, MODES[1]: 2, MODES[2]: 1}
        assert len(parsed) == 5


def test_the_library_has_a_bound():
    config = load(["room"], options={"method": "role_agent"})
    settings = config.method_settings
    assert config.bank.max_entries == 8 * settings.history
    assert config.retrieval.candidates >= 8 * MAX_LISTED


async def test_unusable_analyses_are_counted_and_dropped(tmp_path: Path):
    async with library(tmp_path) as (manager, failures):
        await fail(manager, 0, 0, drawn_task(0), "nothing")
        stats = await manager.stats()
        assert stats["dropped/no failure mode"] == 1
        assert stats["bank/size"] == 0
        assert failures.new() == []
        assert manager.calls.take_metrics()["perf/distil_calls"] == 1


class ChoosingEngine(NoteEngine):
    """Engine that also answers the request to choose tasks."""

    def __init__(self, choice: str) -> None:
        super().__init__(ENGINE_ANSWERS)
        self.choice, self.prompts = choice, []

    def _reply(self, prompt: str) -> str:
        if "You choose the tasks" in prompt:
            self.prompts.append(prompt)
            return self.choice
        return super()._reply(prompt)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("INDEX: 2\nREASON: a\nINDEX: [1]\nREASON: b\nINDEX: 2\nINDEX: 9", 2),
        ("none of them", 0),
        ("INDEX: " + 5000 * "1", 0),
    ],
)
async def test_the_model_may_choose_the_tasks(tmp_path: Path, choice: str, expected: int):
    engine = ChoosingEngine(choice)
    settings = ManagerSettings(extractor=ExtractorSection(max_response_tokens=6000))
    async with library(tmp_path, settings, engine) as (manager, failures):
        by_model = replace(SETTINGS, ratio=1.0, template=prompt("retrieve"))
        replay = FailureReplay(Stream(), by_model, seed=0)
        tasks = replay.draw(4)
        await play(manager, 0, tasks[:3], lambda task: MODES[0])
        failures.mark_retrieved(failures.new())
        manager.calls.take_metrics()
        await fail(manager, 0, 3, tasks[3], MODES[0])
        await replay.retrieve(failures)
        metrics = replay.take_metrics(failures)
        assert manager.calls.take_metrics()["perf/distil_calls"] == 2, "analysis and choice"
    (asked,) = engine.prompts
    assert asked.count("Lesson: avoid navigation loop") == 4
    assert all(f"[{n}]" in asked for n in (1, 2, 3))
    assert "Goal 3." in asked.partition("Earlier tasks")[0]
    assert metrics["replay/retrieved"] == expected
    assert metrics["replay/unanswered"] == (not expected)


class TogetherEngine(ChoosingEngine):
    """Engine that answers requests to choose tasks only when `expected` of them are in progress."""

    def __init__(self, expected: int) -> None:
        super().__init__("INDEX: 1")
        self.together = asyncio.Barrier(expected)

    async def generate(self, ids: Sequence[int], sampling: Sampling, **options: Any) -> Completion:
        if "You choose the tasks" in renderer().decode(ids):
            await self.together.wait()
        return await super().generate(ids, sampling, **options)


async def test_the_model_chooses_for_all_patterns_at_the_same_time(tmp_path: Path):
    async with asyncio.timeout(30), library(tmp_path, None, TogetherEngine(3)) as opened:
        manager, failures = opened
        replay = FailureReplay(Stream(), replace(SETTINGS, template=prompt("retrieve")), seed=0)
        await play(manager, 0, replay.draw(3), lambda task: MODES[0])
        await replay.retrieve(failures)
        assert replay.take_metrics(failures)["replay/retrieved"] == 3


@pytest.mark.parametrize(("spare", "listed"), [(10_000, 3), (0, 2), (-10_000, 0)])
async def test_the_list_of_tasks_is_cut_to_the_context(tmp_path: Path, spare: int, listed: int):
    """`spare`: tokens of the context beyond a list of two tasks."""
    engine = ChoosingEngine("INDEX: 1")
    async with library(tmp_path, None, engine) as (manager, failures):
        template = replace(SETTINGS, template=prompt("retrieve"))
        replay = FailureReplay(Stream(), template, seed=0)
        tasks = replay.draw(4)
        await play(manager, 0, tasks, lambda task: MODES[0])
        notes = failures.new()
        two = [(tasks[0], notes[0]), (tasks[1], notes[1])]
        limit = await failures.tokens(replay._prompt(notes[3], two)) + spare
        failures.mark_retrieved(notes[:3])
        cut = FailureReplay(Stream(), replace(template, max_tokens=limit), seed=0)
        cut.load_state(replay.state())
        await cut.retrieve(failures)
        metrics = cut.take_metrics(failures)
    assert [asked.count("Failure mode: ") - 1 for asked in engine.prompts] == [listed] * bool(
        listed
    )
    assert (metrics["replay/retrieved"], metrics["replay/unanswered"]) == (
        (1, 0) if listed else (0, 1)
    )


class RefusingEngine(ChoosingEngine):
    """Engine that cannot serve the request to choose tasks."""

    def _reply(self, prompt: str) -> str:
        if "You choose the tasks" in prompt:
            raise RolloutError("engine", self.choice)
        return super()._reply(prompt)


async def test_a_failed_choice_does_not_end_the_run(tmp_path: Path):
    async with library(tmp_path, None, RefusingEngine("too long")) as (manager, failures):
        replay = FailureReplay(Stream(), replace(SETTINGS, template=prompt("retrieve")), seed=0)
        await play(manager, 0, replay.draw(2), lambda task: MODES[0])
        await replay.retrieve(failures)
        assert replay.take_metrics(failures)["replay/unanswered"] == 2


def test_observations_reach_the_stream():
    stream, trajectory = Stream(), build_trajectory(drawn_task(0))
    FailureReplay(stream, SETTINGS, 0).observe([trajectory])
    assert stream.observed == [trajectory]

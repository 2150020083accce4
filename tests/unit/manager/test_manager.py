"""Public interface of the ExperienceManager: distillation, search, credit and training.

Distillation is tested both in the background and at step boundaries.
"""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crl.config.schema import BankSection, ExtractorSection, RetrievalSection
from crl.embedders.cached import CachedEmbedder
from crl.engines.scripted import ScriptedEngine
from crl.errors import EngineError, RolloutError, StoreError, TransientError
from crl.manager import (
    DistilRequest,
    ExperienceManager,
    ManagerSettings,
    Prompts,
    QueueSettings,
)
from crl.manager.storage.store import Store
from crl.protocols import Hit
from crl.types import Completion, Sampling, Segment, TokenTrace, TrackRecord
from support.doors import renderer, until
from support.managers import (
    GOAL,
    PROMPTS,
    RETURN,
    NoteEngine,
    WordEmbedder,
    add,
    answering,
    hit,
    open_manager,
    request,
    search,
    task,
    update,
    write_merge,
)
from support.trajectories import build_trajectory

ANY = RetrievalSection(margin=2.0, min_similarity=0.0)
NEAREST = RetrievalSection(margin=0.0, min_similarity=0.0)
SETTINGS = ManagerSettings(retrieval=ANY)


def bank_path(tmp_path: Path) -> Path:
    return tmp_path / "bank.sqlite"


def by_note(**answers: str) -> ScriptedEngine:
    """Return an engine that chooses its answer by the last word of the episode."""
    return answering(lambda prompt: answers[prompt.split("<|im_end|>")[-2].split()[-1]])


async def filled_manager(
    tmp_path: Path, *requests: DistilRequest, settings: ManagerSettings = SETTINGS, **answers: str
) -> ExperienceManager:
    manager = await open_manager(bank_path(tmp_path), by_note(**answers), settings)
    for distil_request in requests:
        await manager.submit(distil_request)
    await manager.drain()
    return manager


async def search_one(manager: ExperienceManager, **where) -> Hit:
    (found,) = await manager.search([search(**where)])
    assert found is not None
    return found


async def wait_for_metric(manager: ExperienceManager, metric: str, least: int) -> None:
    """Wait until the metric `metric` is at least `least`."""
    while (await manager.stats())[metric] < least:  # noqa: ASYNC110  (no event exists for this)
        await asyncio.sleep(0.005)


def texts(manager: ExperienceManager) -> dict[str, str]:
    return {f"{entry.uid}@{entry.version}": entry.text for entry in manager._bank.entries.values()}


def trained_text(trace: TokenTrace) -> str:
    return renderer().decode(
        [token for token, mask in zip(trace.ids, trace.mask, strict=True) if mask]
    )


# ── distillation ──────────────────────────────────────────────────────────────────────────────────


async def test_an_experience_is_distilled_retrieved_credited_and_trained_on(tmp_path):
    manager = await filled_manager(
        tmp_path, request(note="seen"), seen="The exit is west.</think>\n" + add("Go west.")
    )
    guide = await search_one(manager)
    assert (guide.text, guide.use.uid, guide.use.version, guide.use.how) == (
        "Go west.",
        "run/0/0/0#0",
        1,
        "start",
    )
    await manager.credit([guide.use], True, episode="run/1/0/0")
    samples = await manager.take_batch(1, 1)
    assert samples is not None
    op, head = samples
    assert (op.id, head.id, op.reward, op.weight, op.advantage) == (
        "run/0/0/0#0@1",
        "run/0/0/0@head",
        1.0,
        1.0,
        0.0,
    )
    assert '{"op": "add", "text": "Go west."}' in "[" + trained_text(op.trace) + "]"
    assert (
        trained_text(head.trace) + trained_text(op.trace)
        == "The exit is west.</think>\n" + add("Go west.") + "<|im_end|>"
    )
    assert GOAL in renderer().decode(op.trace.ids)
    assert set(op.trace.logprobs) == {0.0, -1.0}
    await manager.mark_trained([sample.id for sample in samples], 1)
    assert await manager.take_batch(1, 99) is None
    await manager.aclose()


@pytest.mark.parametrize(
    ("answer", "stats", "stored"),
    [
        (f"Okay, the agent went west.\n</think>\n\nBased on the trace:\n"
         f"```json\n{add('Go west.')}\n```", {"ops/add": 1}, ["Go west."]),
        (f"<think>Nothing new.</think>{RETURN}", {"ops/return": 1}, []),
        ("I think the agent should go west next time.", {"dropped/no op in the answer": 1}, []),
        ("<think>Hmm, the agent went west, and then", {"dropped/the thinking did not end": 1}, []),
        ('[{"op": "add", "text": "Go west."}, {"op": "update", "target": 1, "text": "x"}]',
         {"ops/add": 1, "dropped/target out of range": 1}, ["Go west."]),
        ('[{"op": "add", "text": "Go west."}, {"op": "add", "text": "Go',
         {"ops/add": 1, "dropped/not JSON": 1}, ["Go west."]),
    ],
)  # fmt: skip
async def test_answers_in_the_forms_of_language_models(tmp_path, answer, stats, stored):
    manager = await filled_manager(tmp_path, request(note="seen"), seen=answer)
    assert list(texts(manager).values()) == stored
    metrics = await manager.stats()
    assert (
        metrics.items()
        >= {"bank/size": len(stored), "queue/done": 1, "queue/pending": 0, **stats}.items()
    )
    assert metrics["generations"] == len(stored)  # not stored if no reward is possible
    await manager.aclose()


async def test_a_prompt_that_starts_the_thinking_requires_its_end(tmp_path):
    from crl.types import Segment

    def thinking(request: DistilRequest) -> list[Segment]:
        return [Segment("user", "distil", "task")]

    class Opening(type(renderer())):
        def text(self, segments) -> str:
            return super().text(segments) + "<think>\n"

    tokenizer = renderer()
    opening = Opening(tokenizer.tokenizer, tokenizer.stop_ids)
    for answer, size in ((add("Go west."), 0), ("West?</think>" + add("Go west."), 1)):
        path = tmp_path / f"{size}.sqlite"
        engine = ScriptedEngine(opening, lambda prompt, answer=answer: answer)
        manager = await ExperienceManager.open(
            path, engine, WordEmbedder(), opening, Prompts(thinking, write_merge), SETTINGS, seed=0
        )
        await manager.submit(request())
        await manager.drain()
        assert len(texts(manager)) == size
        await manager.aclose()


async def test_an_update_makes_the_next_version_with_fresh_counters(tmp_path):
    manager = await filled_manager(
        tmp_path, request(note="first"), first=add("Go west."), better=update("Go southwest.")
    )
    guide = await search_one(manager)
    await manager.credit([guide.use], True, episode="run/1/0/0")
    await manager.submit(request(1, note="better", shown=(guide,)))
    await manager.drain()
    (entry,) = manager._bank.entries.values()
    assert (entry.uid, entry.version, entry.text, entry.provenance.parents) == (
        "run/0/0/0#0",
        2,
        "Go southwest.",
        ("run/0/0/0#0@1",),
    )
    assert (
        entry.provenance.generation,
        entry.counters.retrieved,
        entry.counters.credited,
        entry.counters.credit,
    ) == (
        "run/1/0/0",
        0,
        0,
        0.0,
    )
    assert (await search_one(manager, group=9)).use.version == 2
    assert entry.experience.counters.retrieved == 1
    await manager.aclose()


async def test_the_newest_entries_come_first_with_their_counters(tmp_path):
    manager = await filled_manager(
        tmp_path,
        request(note="a"),
        a=add("Go west.", "Go east."),
        b=add("Go north."),
        better=update("Go southwest."),
    )
    guide = hit("run/0/0/0#0")
    await manager.submit(request(1, note="b"))
    await manager.submit(request(2, note="better", shown=(guide,)))
    await manager.drain()
    (guide,) = await manager.search([search("Go southwest.")])
    for expected in (["Go southwest.", "Go north.", "Go east."], ["Go southwest."]):
        assert [one.text for one in manager.latest(len(expected))] == expected
    assert guide is not None
    assert {one.uid: one.counters.retrieved for one in manager.latest(9)} == {
        e.uid: int(e.uid == guide.use.uid) for e in manager._bank.entries.values()
    }
    before = manager.latest(9)
    await manager.aclose()
    again = await open_manager(bank_path(tmp_path), by_note(), SETTINGS)
    assert again.latest(9) == before
    assert again.latest(0) == []
    await again.aclose()


async def test_on_distilled_is_called_after_the_write(tmp_path):
    results = []
    manager = await open_manager(
        bank_path(tmp_path),
        by_note(a=add("Go west."), none=RETURN, bad="Go!"),
        SETTINGS,
        on_distilled=lambda distilled: results.append((distilled, len(manager._bank.entries))),
    )
    for member, note in enumerate(["a", "none", "bad"]):
        await manager.submit(request(member=member, note=note))
    await manager.drain()
    assert [
        (one.request.episode.member, size, one.returns, dict(one.dropped), one.malformed)
        for one, size in results
    ] == [
        (0, 1, 0, {}, False), (1, 1, 1, {}, False), (2, 1, 0, {"no op in the answer": 1}, True),
    ]  # fmt: skip
    assert [write.text for write in results[0][0].writes] == ["Go west."]
    await manager.aclose()


async def test_without_guidance_the_prompt_has_no_experiences_and_none_can_be_updated(tmp_path):
    shown: list[int] = []

    def write(request: DistilRequest) -> Sequence[Segment]:
        shown.append(len(request.shown))
        return PROMPTS.distil(request)

    engine = NoteEngine({"first": add("Go west."), "better": update("Go southwest.")})
    prompts = replace(PROMPTS, distil=write, guidance=False)
    manager = await open_manager(bank_path(tmp_path), engine, SETTINGS, prompts=prompts)
    await manager.submit(request(note="first"))
    await manager.drain()
    guide = await search_one(manager)
    await manager.submit(request(1, note="better", shown=(guide,)))
    await manager.drain()
    assert [entry.text for entry in manager._bank.entries.values()] == ["Go west."]
    assert shown == [0, 0]
    await manager.aclose()


async def test_a_stale_update_becomes_an_add_with_that_version_as_its_parent(tmp_path):
    manager = await filled_manager(
        tmp_path,
        request(note="first"),
        first=add("Go west."),
        south=update("Go south."),
        north=update("Go north."),
    )
    guide = await search_one(manager)
    for member, note in enumerate(["south", "north"]):
        await manager.submit(request(1, member=member, note=note, shown=(guide,)))
    await manager.drain()
    assert texts(manager) == {"run/0/0/0#0@2": "Go south.", "run/1/0/1#0@1": "Go north."}
    assert manager._bank.entries["run/1/0/1#0"].provenance.parents == ("run/0/0/0#0@1",)
    await manager.aclose()


async def test_a_request_that_the_engine_cannot_serve_is_dead(tmp_path):
    class Refusing(ScriptedEngine):
        async def generate(self, ids: Sequence[int], sampling: Sampling, **options) -> Completion:
            raise RolloutError("engine", "too long")

    manager = await open_manager(bank_path(tmp_path), Refusing(renderer(), str))
    await manager.submit(request())
    await manager.drain()
    assert (await manager.stats()).items() >= {"queue/dead": 1, "queue/pending": 0}.items()
    await manager.aclose()


class FlakyEngine(ScriptedEngine):
    """Engine that fails a given number of times for each note of a request.

    `failures` maps a note to the number of failures and the error. With the error None the engine
    does not answer. `tried` holds the notes in the order of the attempts.
    """

    def __init__(self, failures: Mapping[str, tuple[int, Exception | None]]) -> None:
        super().__init__(renderer(), lambda prompt: add(f"Lesson of {prompt.splitlines()[1]}."))
        self.failures = {note: [error] * times for note, (times, error) in failures.items()}
        self.tried: list[str] = []

    async def generate(self, ids: Sequence[int], sampling: Sampling, **options) -> Completion:
        note = renderer().decode(ids).split("<|im_end|>")[-2].split()[-1]
        self.tried.append(note)
        if self.failures.get(note):
            if error := self.failures[note].pop():
                raise error
            await asyncio.Event().wait()  # never returns
        return await super().generate(ids, sampling, **options)


BUSY = TransientError("engine", "busy")


@pytest.mark.parametrize("background", [True, False])
async def test_transient_errors_are_retried_and_answers_applied_in_request_order(
    tmp_path, background
):
    engine = FlakyEngine(
        {
            "a": (2, BUSY),
            "b": (1, EngineError("restarted")),
            "c": (1, None),
            "e": (1, RolloutError("engine", "too long")),
        }
    )
    manager = await open_manager(
        bank_path(tmp_path),
        engine,
        ManagerSettings(
            extractor=ExtractorSection(answer_timeout=0.5), queue=QueueSettings(backoff=0.001)
        ),
    )
    for member, note in enumerate("abcde"):
        await manager.submit(request(member=member, note=note))
    consumer = asyncio.create_task(manager.run()) if background else None
    await manager.drain()
    assert {note: engine.tried.count(note) for note in "abcde"} == {
        "a": 3,
        "b": 2,
        "c": 2,
        "d": 1,
        "e": 1,
    }
    metrics = {
        "queue/done": 4,
        "queue/dead": 1,
        "queue/pending": 0,
        "queue/leased": 0,
        "queue/retried": 4,
        "bank/size": 4,
    }
    assert (await manager.stats()).items() >= metrics.items()
    if consumer:
        consumer.cancel()
        await asyncio.gather(consumer, return_exceptions=True)
    else:
        assert list(manager._bank.entries) == [f"run/0/0/{member}#0" for member in range(4)], (
            "in request order"
        )
    await manager.aclose()
    with sqlite3.connect(bank_path(tmp_path)) as db:
        assert db.execute(
            "SELECT id, attempts, reason FROM requests WHERE attempts ORDER BY id"
        ).fetchall() == [
            ("run/0/0/0", 2, None), ("run/0/0/1", 1, None), ("run/0/0/2", 1, None),
            ("run/0/0/4", 1, "engine: too long"),
        ]  # fmt: skip


async def test_invalid_unicode_in_an_error_is_replaced(tmp_path):
    manager = await open_manager(
        bank_path(tmp_path), FlakyEngine({"a": (1, RolloutError("engine", "no \ud800"))})
    )
    await manager.submit(request(note="a"))
    await manager.drain()
    assert (await manager._store._database.rows("SELECT state, reason FROM requests"))[0][:] == (
        "dead",
        "engine: no ?",
    )
    await manager.aclose()


@pytest.mark.parametrize(
    "bad",
    [{"of": task(goal="no \ud800")}, {"note": "\ud800"}, {"shown": (hit("b#0", text="\udfff"),)}],
)
async def test_an_episode_with_invalid_unicode_is_refused(tmp_path, bad):
    manager = await open_manager(bank_path(tmp_path), by_note(a=add("Go west.")))
    await manager.submit(request(note="a"))
    with pytest.raises(UnicodeEncodeError):
        await manager.submit(request(1, **bad))
    await manager.drain()
    assert (await manager.stats()).items() >= {
        "bank/size": 1,
        "queue/done": 1,
        "queue/pending": 0,
    }.items()
    await manager.aclose()


@pytest.mark.parametrize("deterministic", [True, False])
async def test_a_timeout_of_the_engine_is_retried(tmp_path, deterministic):
    engine = FlakyEngine({"a": (1, TimeoutError("no route"))})
    manager = await open_manager(
        bank_path(tmp_path),
        engine,
        ManagerSettings(queue=QueueSettings(backoff=0.0), deterministic=deterministic),
    )
    await manager.submit(request(note="a"))
    await manager.drain()
    assert (engine.tried, list(texts(manager).values())) == (["a", "a"], ["Lesson of run/0/0/0."])
    await manager.aclose()


async def test_a_request_that_always_fails_is_dead_and_can_be_retried(tmp_path):
    settings = ManagerSettings(queue=QueueSettings(attempts=3, backoff=0.0))
    manager = await open_manager(bank_path(tmp_path), FlakyEngine({"a": (99, BUSY)}), settings)
    await manager.submit(request(note="a"))
    await manager.drain()
    await manager.aclose()
    again = await open_manager(bank_path(tmp_path), engine := FlakyEngine({}), settings)
    assert (await again._store._database.rows("SELECT attempts, reason FROM requests"))[0][:] == (
        3,
        "engine: busy",
    )
    await again.drain()
    assert engine.tried == [], "dead"
    assert await again._store.retry_dead() == ["run/0/0/0"]
    await again.drain()
    assert (await again.stats()).items() >= {
        "bank/size": 1,
        "queue/dead": 0,
        "queue/done": 1,
    }.items()
    await again.aclose()


async def test_attempts_of_an_earlier_process_count(tmp_path):
    manager = await open_manager(
        bank_path(tmp_path),
        FlakyEngine({"a": (99, BUSY)}),
        ManagerSettings(queue=QueueSettings(backoff=99.0)),
    )
    await manager.submit(request(note="a"))
    consumer = asyncio.create_task(manager.run())
    await wait_for_metric(manager, "queue/retried", 1)
    consumer.cancel()  # during its pause before the retry
    await asyncio.gather(consumer, return_exceptions=True)
    await manager.aclose()
    again = await open_manager(
        bank_path(tmp_path),
        engine := FlakyEngine({"a": (99, BUSY)}),
        ManagerSettings(queue=QueueSettings(attempts=3, backoff=0.0)),
    )
    await again.drain()
    assert len(engine.tried) == 2
    await again.aclose()


async def test_the_pause_between_attempts_doubles_and_holds_no_slot(tmp_path, monkeypatch):
    pauses = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    manager = await open_manager(
        bank_path(tmp_path),
        engine := FlakyEngine({"a": (99, BUSY)}),
        ManagerSettings(extractor=ExtractorSection(concurrency=1)),
    )
    await manager.submit(request(note="a"))
    await manager.submit(request(member=1, note="b"))
    monkeypatch.setattr("crl.manager.manager.asyncio.sleep", noted)
    await manager.drain()
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    assert sorted(engine.tried[:2]) == ["a", "b"], "one slot"
    await manager.aclose()


async def test_a_dead_engine_ends_the_drain_and_the_request_stays_pending(tmp_path):
    class Dead(ScriptedEngine):
        async def generate(self, ids: Sequence[int], sampling: Sampling, **options) -> Completion:
            raise EngineError("gone")

        async def health(self) -> None:
            raise EngineError("gone")

    manager = await open_manager(bank_path(tmp_path), Dead(renderer(), str))
    await manager.submit(request())
    with pytest.raises(ExceptionGroup) as caught:
        await manager.drain()
    assert caught.group_contains(EngineError, match="gone")
    with pytest.raises(ExceptionGroup):
        await manager.run()
    assert (await manager.stats())["queue/pending"] == 1
    await manager.aclose()


async def test_at_step_boundaries_the_bank_does_not_depend_on_timing(tmp_path):
    rng = random.Random()

    class JitteryEngine(ScriptedEngine):
        async def generate(self, ids: Sequence[int], sampling: Sampling, **options) -> Completion:
            await asyncio.sleep(rng.random() / 100)
            return await super().generate(ids, sampling, **options)

    banks = []
    for seed in range(3):
        engine = JitteryEngine(
            renderer(),
            lambda prompt: (
                update(f"Go {prompt.splitlines()[1]}.") if "1. " in prompt else add("Go west.")
            ),
        )
        rng.seed(seed)
        manager = await open_manager(tmp_path / f"{seed}.sqlite", engine, SETTINGS)
        requests = [request(0, group, member) for group in range(3) for member in range(3)]
        requests += [request(1, 0, member, shown=(hit("run/0/0/0#0"),)) for member in range(3)]
        rng.shuffle(requests)
        for distil_request in requests:
            await manager.submit(distil_request)
        await manager.drain()
        banks.append(
            [
                (uid, text, manager._bank.entries[uid.split("@")[0]].provenance.parents)
                for uid, text in texts(manager).items()
            ]
        )
        await manager.aclose()
    assert banks[0] == banks[1] == banks[2]
    assert len(banks[0]) == 11


# ── in the background ─────────────────────────────────────────────────────────────────────────────


class GatedEngine(ScriptedEngine):
    """Engine that answers when its gate is open and counts the waiting calls."""

    def __init__(self) -> None:
        super().__init__(renderer(), lambda prompt: add("Go west."))
        self.gate, self.waiting, self.most = asyncio.Event(), 0, 0

    async def generate(self, ids: Sequence[int], sampling: Sampling, **options) -> Completion:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await self.gate.wait()
        self.waiting -= 1
        return await super().generate(ids, sampling, **options)


async def test_run_distils_arriving_requests_with_bounded_concurrency(tmp_path):
    engine = GatedEngine()
    manager = await open_manager(
        bank_path(tmp_path), engine, ManagerSettings(extractor=ExtractorSection(concurrency=2))
    )
    consumer = asyncio.create_task(manager.run())
    for member in range(5):
        await manager.submit(request(member=member))
    await until(lambda: engine.waiting == 2)
    drained = asyncio.create_task(manager.drain())
    await asyncio.sleep(0.05)
    assert await manager.search([search()]) == [None]  # does not wait for the extractor
    engine.gate.set()
    await drained
    assert engine.most == 2
    assert (await manager.stats()).items() >= {
        "bank/size": 5,
        "bank/size/room": 5,
        "queue/done": 5,
    }.items()
    consumer.cancel()
    await asyncio.gather(consumer, return_exceptions=True)
    await manager.aclose()


async def test_run_leases_one_request_per_free_slot(tmp_path):
    """Check that one lease fills all free slots.

    The leased requests are the requests in progress.
    """

    class StepwiseEngine(ScriptedEngine):
        """Engine that answers one request for each release of the semaphore `let`."""

        def __init__(self) -> None:
            super().__init__(renderer(), lambda prompt: add("Go west."))
            self.let, self.waiting = asyncio.Semaphore(0), 0

        async def generate(self, ids: Sequence[int], sampling: Sampling, **options) -> Completion:
            self.waiting += 1
            await self.let.acquire()
            self.waiting -= 1
            return await super().generate(ids, sampling, **options)

    engine, limits = StepwiseEngine(), []
    manager = await open_manager(
        bank_path(tmp_path), engine, ManagerSettings(extractor=ExtractorSection(concurrency=3))
    )
    lease = manager._store.lease

    async def noted(limit: int | None = None) -> list[DistilRequest]:
        limits.append(limit)
        return await lease(limit)

    manager._store.lease = noted
    for member in range(8):
        await manager.submit(request(member=member))
    consumer = asyncio.create_task(manager.run())
    for done in range(8):
        held = min(3, 8 - done)
        await wait_for_metric(manager, "queue/done", done)
        await until(lambda held=held: engine.waiting == held)
        metrics = await manager.stats()
        assert (metrics["queue/leased"], metrics["queue/pending"], metrics["queue/done"]) == (
            held,
            8 - done - held,
            done,
        )
        engine.let.release()
    await until(lambda: engine.waiting == 0)
    assert limits[0] == 3, "one lease fills all free slots"
    assert max(limits) == 3
    await manager.submit(request(member=9))
    await manager.submit(request(member=10))
    await until(lambda: engine.waiting == 2)
    consumer.cancel()
    await asyncio.gather(consumer, return_exceptions=True)
    assert (await manager.stats())["queue/pending"] == 2, "its requests are released"
    await manager.aclose()


async def test_a_cancelled_run_releases_its_requests(tmp_path):
    engine = GatedEngine()
    manager = await open_manager(bank_path(tmp_path), engine, SETTINGS)
    consumer = asyncio.create_task(manager.run())
    await manager.submit(request())
    await until(lambda: engine.waiting == 1)
    consumer.cancel()
    await asyncio.gather(consumer, return_exceptions=True)
    engine.gate.set()
    await manager.drain()
    assert texts(manager) == {"run/0/0/0#0@1": "Go west."}
    await manager.aclose()


async def test_a_request_waits_for_space_in_a_full_queue(tmp_path):
    manager = await open_manager(
        bank_path(tmp_path),
        engine := GatedEngine(),
        ManagerSettings(bank=BankSection(queue_size=1), queue=QueueSettings(bounded=True)),
    )
    engine.gate.set()
    await manager.submit(request())
    await manager.submit(request())  # a repeated id needs no space
    second = asyncio.create_task(manager.submit(request(member=1)))
    await asyncio.sleep(0.05)
    assert not second.done()
    assert (await manager.stats())["queue/pending"] == 1
    await manager.drain()
    await second
    assert (await manager.stats())["queue/pending"] == 1
    await manager.aclose()


async def test_submitting_a_distilled_episode_again_changes_nothing(tmp_path):
    manager = await filled_manager(tmp_path, request(note="seen"), seen=add("Go west."))
    await manager.submit(request(note="seen"))
    await manager.drain()
    assert len(texts(manager)) == 1
    await manager.aclose()


# ── retrieval ─────────────────────────────────────────────────────────────────────────────────────


async def test_search_never_returns_an_entry_of_another_task(tmp_path):
    manager = await filled_manager(
        tmp_path,
        request(note="a", of=task("maze")),
        request(1, note="b"),
        a=add("Find the exit."),
        b=add("Go west."),
    )
    hits = await manager.search(
        [
            search("Find the exit.", name=name, group=i)
            for i, name in enumerate(["room", "maze", "attic"])
        ]
    )
    assert [hit and hit.text for hit in hits] == ["Go west.", "Find the exit.", None]
    await manager.aclose()


async def test_the_key_is_the_text_or_the_goal_with_some_of_the_text(tmp_path):
    for weight, expected in ((None, "Go west."), (0.5, "Go east.")):
        settings = ManagerSettings(retrieval=NEAREST, bank=BankSection(key_text_weight=weight))
        manager = await open_manager(
            tmp_path / str(weight), by_note(a=add("Go west."), b=add("Go east.")), settings
        )
        await manager.submit(request(note="a", of=task(goal="the crimson attic far away")))
        await manager.submit(request(1, note="b", of=task(goal="azure cellar")))
        await manager.drain()
        guide = await search_one(manager, query="azure cellar west.")
        assert (guide.text, guide.goal) == (
            expected,
            "azure cellar" if weight is not None else "the crimson attic far away",
        )
        await manager.aclose()


async def test_identical_queries_are_embedded_once(tmp_path):
    embedder = WordEmbedder()
    manager = await open_manager(bank_path(tmp_path), by_note(), embedder=embedder)
    await manager.search([search(member=m) for m in range(4)] + [search("another", group=1)])
    assert embedder.calls == [[GOAL, "another"]]
    assert await manager.search([]) == []
    await manager.aclose()


@pytest.mark.parametrize("bad", [np.nan, np.inf, None], ids=["nan", "infinity", "another dim"])
async def test_invalid_vectors_are_rejected(bad: float | None, tmp_path: Path):
    class Failing(WordEmbedder):
        async def embed(self, texts: Sequence[str]) -> np.ndarray:
            vectors = await super().embed(texts)
            if "bad" not in " ".join(texts):
                return vectors
            return np.full_like(vectors, bad) if bad is not None else vectors[:, :32]

    embedder = CachedEmbedder(Failing(), 99)
    settings = ManagerSettings(retrieval=ANY, queue=QueueSettings(attempts=2, backoff=0.0))
    manager = await open_manager(
        bank_path(tmp_path),
        by_note(a=add("Go west."), b=add("Go bad.")),
        settings,
        embedder=embedder,
    )
    for member, note in enumerate("ab"):
        await manager.submit(request(member=member, note=note))
    await manager.drain()
    with pytest.raises(EngineError, match=r"embedder words: .* 64 finite numbers"):
        await manager.search([search("a bad query")])
    assert (await search_one(manager)).text == "Go west."
    assert (await manager.stats()).items() >= {
        "bank/size": 1,
        "queue/done": 1,
        "queue/dead": 1,
    }.items()
    await manager.aclose()
    again = await open_manager(bank_path(tmp_path), by_note(), settings, embedder=embedder)
    assert list(texts(again).values()) == ["Go west."]
    await again.aclose()


async def test_search_times_are_recorded_until_taken(tmp_path):
    class Slow(WordEmbedder):
        async def embed(self, texts):
            await asyncio.sleep(0.01)
            return await super().embed(texts)

    manager = await open_manager(bank_path(tmp_path), by_note(), embedder=Slow())
    await manager.search([search(member=m) for m in range(4)])
    await manager.search([search(group=1)])
    await manager.search([search()], counted=False)  # a search of an evaluation
    times = manager.take_search_times()
    assert len(times) == 2
    assert min(times) >= 0.01
    assert manager.take_search_times() == []
    await manager.aclose()


async def test_flush_writes_counts_without_waiting_for_distillation(tmp_path):
    settings = ManagerSettings(retrieval=ANY, credit_window_steps=0)
    manager = await filled_manager(
        tmp_path,
        request(note="a"),
        settings=settings,
        a=add("Go west."),
        better=update("Go southwest."),
    )
    guide = await search_one(manager)
    await manager.submit(request(1, note="better", shown=(guide,)))
    await manager.drain()
    await manager.submit(request(2, note="a"))
    await search_one(manager, group=1)
    manager.advance(1)
    await manager.flush()
    assert (await manager.stats()).items() >= {
        "ops/retrieve": 2,
        "generations": 1,
        "queue/pending": 1,
    }.items()
    await manager.aclose()


@pytest.mark.parametrize("indexed_late", [False, True])
async def test_an_entry_retrieved_and_updated_during_flush_can_earn_credit(
    tmp_path, monkeypatch, indexed_late
):
    """Check that an entry that is retrieved and updated during `flush` can still earn credit.

    Without `indexed_late` the entry is retrieved and updated after the counts were taken and before
    `delete_generations` deletes the spent generations. With `indexed_late` the update is on disk,
    and the search still finds the old version because the index in memory is not updated yet.
    """
    settings = ManagerSettings(
        retrieval=ANY, credit_window_steps=0, extractor=ExtractorSection(cooldown=0)
    )
    manager = await filled_manager(
        tmp_path,
        request(note="a"),
        settings=settings,
        a=add("Go west."),
        better=update("Go southwest."),
    )
    manager.advance(5)
    update_of = request(5, note="better", shown=(hit("run/0/0/0#0"),))
    await manager.submit(update_of)
    if indexed_late:
        update_index, released = manager._update_index, asyncio.Event()

        async def wait_and_update(applied):
            await released.wait()
            await update_index(applied)

        monkeypatch.setattr(manager, "_update_index", wait_and_update)
        draining = asyncio.create_task(manager._queue.drain())
        while (await manager._store.counts())["ops/update"] == 0:
            pass
        flushing = asyncio.create_task(manager.flush())
        for _ in range(50):
            await manager._store.counts()
        guide = await search_one(manager)
        released.set()
        await asyncio.gather(draining, flushing)
    else:
        guides, delete = [], manager._store.delete_generations

        async def find_update_and_delete(*args):
            guides.append(await search_one(manager))
            await manager._queue.drain()
            await delete(*args)

        monkeypatch.setattr(manager._store, "delete_generations", find_update_and_delete)
        await manager.flush()
        (guide,) = guides
    assert guide.use.version == 1
    await manager.credit([guide.use], True, episode="run/5/1/0")
    assert (await manager.stats())["buffer/ready"] == 1
    await manager.aclose()


async def test_a_copy_of_a_bank_starts_another_run(tmp_path):
    manager = await filled_manager(
        tmp_path, request(note="a"), a=add("Go west."), b=add("Go north.")
    )
    manager.advance(90)
    guide = await search_one(manager)
    await manager.credit([guide.use], True, episode="run/90/0/0")
    await manager.export_copy(tmp_path / "copy.sqlite")
    await manager.credit(
        [guide.use], True, episode="run/90/0/1"
    )  # after the copy, so the copy lacks it
    await manager.aclose()

    other = await open_manager(tmp_path / "copy.sqlite", by_note(b=add("Go north.")), SETTINGS)
    (entry,) = other._bank.entries.values()
    assert (entry.counters.retrieved, entry.counters.last_returned_step) == (1, None), (
        "the count is kept, the step of the other run is not"
    )
    assert (await other.stats()).items() >= {"queue/done": 0, "log/seq": 4}.items()
    assert "ops/submit" not in await other.stats(), "operations of the other run are not counted"
    again = await search_one(other, group=3)
    assert again == replace(guide, record=TrackRecord(1, 1))
    await other.credit([again.use], False, episode="other/0/3/0")
    (entry,) = other._bank.entries.values()
    assert (entry.counters.retrieved, entry.counters.credited, entry.counters.credit) == (2, 2, 0.0)
    # Entries of another extractor are not used for training.
    assert await other.take_batch(1, 99) is None
    await other.submit(
        DistilRequest.from_trajectory(
            "other", build_trajectory(task(), 0, 0, 0, "free", segments=request(note="b").segments)
        )
    )
    await other.drain()
    # Both episodes have the same address (step, group, member), but in different runs.
    assert texts(other) == {
        "run/0/0/0#0@1": "Go west.",
        "other/0/0/0#0@1": "Go north.",
    }
    assert set(await other._store.generations(["run/0/0/0", "other/0/0/0"])) == {"other/0/0/0"}
    await other.aclose()


async def test_a_reopened_bank_is_unchanged(tmp_path):
    manager = await filled_manager(
        tmp_path,
        request(note="a"),
        request(1, note="b"),
        a=add("Go west.", "Go east."),
        b=add("Go north."),
    )
    manager.advance(5)
    guide = await search_one(manager)
    await manager.credit([guide.use], False, episode="run/5/0/0")
    before = {
        uid: (entry.experience, entry.counters.last_returned_step)
        for uid, entry in manager._bank.entries.items()
    }
    await manager.aclose()
    embedder = WordEmbedder()
    again = await open_manager(bank_path(tmp_path), by_note(), SETTINGS, embedder=embedder)
    assert {
        uid: (entry.experience, entry.counters.last_returned_step)
        for uid, entry in again._bank.entries.items()
    } == before
    assert embedder.calls == []
    retrieved = before[guide.use.uid][0]
    assert (
        retrieved.counters.retrieved,
        retrieved.counters.credited,
        retrieved.counters.credit,
    ) == (1, 1, -1.0)
    assert (await again.stats())["buffer/ready"] == 1
    await again.aclose()


@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancelled_close_completes(times: int, tmp_path: Path):
    """Cancel the close while it waits for a change. The change waits for the disk."""
    manager = await filled_manager(tmp_path, request(note="a"), a=add("Go west."))
    guide, disk, threads = await search_one(manager), threading.Event(), threading.active_count()
    manager._store._database._on_thread(disk.wait)
    crediting = asyncio.create_task(manager.credit([guide.use], True, episode="run/0/0/1"))
    await until(lambda: bool(manager._changes))
    closing = asyncio.create_task(manager.aclose())
    for _ in range(times):
        await asyncio.sleep(0)
        closing.cancel()
    await asyncio.wait({closing}, timeout=0.05)
    assert closing.done() == (times == 2), "a second cancellation ends the wait"
    disk.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await crediting
    await manager.aclose()
    await until(lambda: threading.active_count() < threads)
    again = await open_manager(bank_path(tmp_path), by_note(), SETTINGS)
    assert [
        (entry.counters.retrieved, entry.counters.credited)
        for entry in again._bank.entries.values()
    ] == [(1, 1)]
    await again.aclose()


async def test_another_embedder_or_key_makes_new_vectors(tmp_path):
    manager = await filled_manager(tmp_path, request(note="a"), a=add("Go west."))
    await manager.aclose()
    embedder = WordEmbedder()
    embedder.name = "other words"
    with_goal = ManagerSettings(retrieval=ANY, bank=BankSection(key_text_weight=0.5))
    for settings, expected in (
        (SETTINGS, [["Go west."]]),
        (SETTINGS, []),
        (with_goal, [["Go west."], [GOAL]]),
        (with_goal, []),
    ):
        embedder.calls.clear()
        again = await open_manager(bank_path(tmp_path), by_note(), settings, embedder=embedder)
        assert embedder.calls == expected
        await again.aclose()


async def test_the_step_cannot_decrease(tmp_path):
    manager = await open_manager(bank_path(tmp_path), by_note())
    manager.advance(3)
    manager.advance(3)
    with pytest.raises(ValueError, match="cannot decrease from 3 to 2"):
        manager.advance(2)
    assert manager.step == 3
    await manager.aclose()


# ── credit ────────────────────────────────────────────────────────────────────────────────────────


async def batch_rewards(
    manager: ExperienceManager, n: int, step: int
) -> dict[str, tuple[float, float]]:
    """Return the mean reward r̄ and the weight w of each sample of the next batch, by id."""
    return {
        sample.id: (sample.reward, sample.weight)
        for sample in await manager.take_batch(n, step) or ()
    }


async def test_an_entry_evicted_over_the_cap_is_not_retrieved_and_can_earn_credit(tmp_path):
    settings = ManagerSettings(
        retrieval=RetrievalSection(choice="credit", margin=2.0, min_similarity=0.0),
        credit_window_steps=2,
        bank=BankSection(max_per_goal=2, evict="credit"),
    )
    other = request(9, note="c", of=task(goal="another room"))
    answers = {
        "a": add("Go west.", "Go east."),
        "b": add("Go north."),
        "c": add("Go up."),
        "d": update("Go far west."),
    }
    manager = await filled_manager(tmp_path, request(note="a"), other, settings=settings, **answers)
    guide = hit("run/0/0/0#0", text="Go west.")
    await manager.credit([guide.use], False, episode="e1")
    await manager.submit(request(1, note="b"))
    await manager.drain()
    assert sorted(texts(manager).values()) == ["Go east.", "Go north.", "Go up."]
    assert (await manager.stats()).items() >= {"ops/evict": 1, "bank/size": 3}.items()
    assert "Go west." not in {(await search_one(manager, group=group)).text for group in range(20)}
    assert (await batch_rewards(manager, 1, 5))["run/0/0/0#0@1"] == (-1.0, 1.0)
    # An update of an evicted entry becomes an add.
    await manager.submit(request(2, note="d", shown=(guide,)))
    await manager.drain()
    assert manager._bank.entries["run/2/0/0#0"].provenance.parents == ("run/0/0/0#0@1",)
    before = texts(manager)
    await manager.aclose()
    again = await open_manager(bank_path(tmp_path), by_note(), settings)
    assert texts(again) == before
    await again.aclose()


@pytest.mark.parametrize("seed", range(3))
async def test_every_reward_is_pending_or_trained_on_once_and_the_log_explains_the_tables(
    tmp_path, seed
):
    rng = random.Random(seed)
    settings = ManagerSettings(
        retrieval=ANY, extractor=ExtractorSection(cooldown=2, malformed_reward=-1.0)
    )
    answers = {
        "one": add("Go west."),
        "two": add("Go west.", "Go east."),
        "better": update("Go north."),
        "bad": "Go!",
        "none": RETURN,
    }
    manager = await open_manager(bank_path(tmp_path), by_note(**answers), settings)
    for step in range(12):
        manager.advance(step)
        for group in range(3):
            (guide,) = await manager.search([search(group=3 * step + group)])
            shown = (guide,) if guide else ()
            note = rng.choice(list(answers) if guide else ["one", "two"])
            episode = request(step, 3 * step + group, note=note, shown=shown)
            await manager.submit(episode)
            for _ in range(rng.randrange(3)):
                await manager.credit(
                    [hit.use for hit in shown], rng.random() < 0.5, episode=episode.id
                )
        while samples := await manager.take_batch(2, step):
            if rng.random() < 0.8:
                await manager.mark_trained([sample.id for sample in samples], step)
            else:
                break
        await manager.drain()
    await manager.aclose()

    entries, rewards = {}, {}
    with sqlite3.connect(bank_path(tmp_path)) as db:
        for kind, origin, op, text in db.execute(
            "SELECT kind, origin, op, data FROM log ORDER BY seq"
        ):
            data = json.loads(text)
            if kind in ("add", "update"):
                entries[data["uid"]] = (data["version"], data["text"])
            elif kind == "credit":
                assert data["reward"] in (-1.0, 1.0)
                rewards.setdefault((data["uid"], data["version"]), []).append(data["reward"])
            elif kind == "malformed":
                rewards.setdefault((origin, 0), []).append(data["reward"])
            elif kind == "drop" and data["reason"] == "too many malformed":
                del rewards[origin, 0]
            elif kind == "train" and data:
                pending = rewards[origin, op]
                assert (data["count"], data["total"]) == (
                    len(pending[: data["count"]]),
                    sum(pending[: data["count"]]),
                )
                del pending[: data["count"]]
        assert {
            uid: rest for uid, *rest in db.execute("SELECT uid, version, text FROM entries")
        } == {u: list(e) for u, e in entries.items()}
        left = {
            (uid, version): rest
            for uid, version, *rest in db.execute(
                "SELECT uid, version, pending_count, pending_sum FROM units"
            )
        }
    assert {unit: [len(rewards.get(unit, [])), sum(rewards.get(unit, []))] for unit in left} == left
    assert any(count for count, _ in left.values())
    assert len(entries) > 12


# ── rollback ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_manager_can_be_rolled_back_and_continue(tmp_path):
    settings = ManagerSettings(retrieval=ANY, extractor=ExtractorSection(cooldown=0))
    answers = {"a": add("Go west."), "b": add("Go north."), "better": update("Go southwest.")}
    manager = await filled_manager(tmp_path, request(note="a"), settings=settings, **answers)
    manager.advance(3)
    guide = await search_one(manager)
    await manager.credit([guide.use], True, episode="run/3/0/0")
    await manager.submit(request(3, note="b"))
    seq = await manager.snapshot()

    async def go_on() -> tuple:
        assert texts(manager) == {"run/0/0/0#0@1": "Go west."}
        assert (await manager.stats()).items() >= {
            "queue/pending": 1,
            "buffer/ready": 1,
            "bank/size": 1,
            "log/seq": seq,
        }.items()
        assert manager.step == 3
        samples = await manager.take_batch(1, 3)
        assert samples
        await manager.mark_trained([sample.id for sample in samples], 3)
        manager.advance(5)
        await manager.submit(request(4, note="better", shown=(guide,)))
        await manager.drain()
        hit = await search_one(manager, group=7)
        return texts(manager), hit, manager.latest(9)

    first = await go_on()
    done = await manager.rollback(seq)
    assert done.archive
    assert (done.step, done.archive.name.startswith("bank-before-rollback-")) == (3, True)
    assert await go_on() == first
    await manager.aclose()
    archived = await open_manager(done.archive, by_note(), settings)
    assert texts(archived) == first[0], "the archive holds the later changes"
    await archived.aclose()
    again = await open_manager(bank_path(tmp_path), by_note(**answers), settings)
    await again.rollback(seq)
    assert (again.step, texts(again)) == (3, {"run/0/0/0#0@1": "Go west."})
    await again.aclose()


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancelled_rollback_completes(turns: int, tmp_path: Path):
    manager = await filled_manager(
        tmp_path, request(note="a"), a=add("Go west."), b=add("Go north.")
    )
    manager.advance(1)
    seq = await manager.snapshot()
    manager.advance(3)
    await manager.submit(request(3, note="b"))
    await manager.drain()
    going_back = asyncio.create_task(manager.rollback(seq))
    for _ in range(turns):
        await asyncio.sleep(0)
    going_back.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going_back
    assert (manager.step, texts(manager)) == (
        (1, {"run/0/0/0#0@1": "Go west."}) if turns else (3, texts(manager))
    )
    assert texts(manager) == {
        str(entry.unit): entry.text for entry, _ in await manager._store.entries()
    }
    await manager.aclose()


async def test_a_rollback_completes_after_a_failed_index_build(tmp_path: Path):
    manager = await filled_manager(
        tmp_path, request(note="a"), a=add("Go west."), b=add("Go north.")
    )
    seq = await manager.snapshot()
    await manager.submit(request(3, note="b"))
    await manager.drain()

    async def failing() -> None:
        raise MemoryError

    manager._searcher._builds.add(asyncio.create_task(failing()))
    with pytest.raises(MemoryError):
        await manager.rollback(seq)
    assert texts(manager) == {"run/0/0/0#0@1": "Go west."}
    assert (await search_one(manager)).text == "Go west."
    await manager.aclose()


async def test_a_rollback_during_distillation_is_refused(tmp_path):
    engine = GatedEngine()
    manager = await open_manager(bank_path(tmp_path), engine, SETTINGS)
    seq = await manager.snapshot()
    consumer = asyncio.create_task(manager.run())
    await manager.submit(request())
    await until(lambda: engine.waiting == 1)
    with pytest.raises(RuntimeError, match="cannot be rolled back while requests"):
        await manager.rollback(seq)
    consumer.cancel()
    await asyncio.gather(consumer, return_exceptions=True)
    await manager.rollback(seq)
    assert (await manager.stats()).items() >= {"queue/pending": 0, "log/seq": seq}.items()
    await manager.aclose()


# ── requests from trajectories ────────────────────────────────────────────────────────────────────


def test_a_request_is_made_from_a_trajectory():
    guide = hit("run/0/0/0#0")
    trajectory = build_trajectory(
        task(), 4, 9, 2, "guided", success=True, used=(guide.use,), shown=(guide.text,)
    )
    distil_request = DistilRequest.from_trajectory("run", trajectory)
    assert (distil_request.id, distil_request.task) == ("run/4/9/2", task())
    assert (distil_request.success, distil_request.shown) == (True, (guide,))
    with pytest.raises(ValueError, match="cannot be distilled: env: lost"):
        DistilRequest.from_trajectory(
            "run", build_trajectory(task(), 4, 9, 2, "free", error="env: lost")
        )
    with pytest.raises(ValueError, match="must not be empty or contain a slash"):
        DistilRequest.from_trajectory("a/b", build_trajectory(task(), 4, 9, 2, "free"))


@pytest.mark.parametrize(
    "bad",
    [
        lambda: ManagerSettings(credit_window_steps=-1),
        lambda: QueueSettings(attempts=0),
        lambda: QueueSettings(backoff=-1.0),
    ],
)
def test_invalid_settings_are_refused(bad):
    with pytest.raises(ValueError, match=r"at least|must not be negative"):
        bad()


async def test_a_copy_that_cannot_be_reset_is_removed(tmp_path, monkeypatch):
    manager = await filled_manager(tmp_path, request(note="a"), a=add("Go west."))

    async def failing(store: Store) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(Store, "reset_for_new_run", failing)
    with pytest.raises(StoreError, match="the disk is full"):
        await manager.export_copy(tmp_path / "copy.sqlite")
    assert not (tmp_path / "copy.sqlite").exists()
    await manager.aclose()


async def test_equal_requests_get_different_experiences(tmp_path):
    settings = ManagerSettings(retrieval=RetrievalSection(per="rollout", margin=2.0))
    manager = await open_manager(
        bank_path(tmp_path), by_note(a=add("Go west.", "Go east.")), settings
    )
    await manager.submit(request(note="a"))
    await manager.drain()
    one, other = search("Go west."), search("Go west.", member=1)
    found = await manager.search([one, one, one, other])
    texts = [hit.text if hit else None for hit in found]
    assert sorted(filter(None, texts[:2])) == ["Go east.", "Go west."]
    assert texts[2] is None
    assert texts[3] in ("Go east.", "Go west.")
    await manager.aclose()


@pytest.mark.parametrize("background", [False, True])
async def test_an_episode_is_distilled_at_once(tmp_path, background):
    engine = by_note(a=add("Go west.", "Go east."), b=RETURN)
    manager = await open_manager(bank_path(tmp_path), engine)
    running = asyncio.create_task(manager.run()) if background else None
    hits = await manager.distil(request(note="a"), background=background)
    assert [(hit.text, hit.use.uid, hit.use.version) for hit in hits] == [
        ("Go west.", "run/0/0/0#0", 1),
        ("Go east.", "run/0/0/0#1", 1),
    ]
    assert await manager.distil(request(1, note="b"), background=background) == []
    if running:
        running.cancel()
        await asyncio.wait([running])
    await manager.aclose()


async def test_notes_are_the_texts_of_the_answers(tmp_path):
    engine = by_note(a="Go west.\nThen south.", b=" ")
    prompts = replace(PROMPTS, notes=True)
    manager = await open_manager(bank_path(tmp_path), engine, prompts=prompts)
    for number, note in enumerate("ab"):
        await manager.submit(request(number, note=note))
    await manager.drain()
    assert [one.text for one in manager.latest(9)] == ["Go west.\nThen south."]
    assert (await manager.stats())["dropped/empty text"] == 1
    await manager.aclose()

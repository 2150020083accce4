"""The ExperienceManager as its callers see it: distil, search, credit, train; in the background and at step boundaries."""

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
from doors import renderer, until
from extractors import GOAL, RETURN, WordEmbedder, add, answering, hit, manager, request, search, task, update, write_merge

from crl.engines.scripted import ScriptedEngine
from crl.errors import EngineError, RolloutError, StoreError, TransientError
from crl.manager import (
    CachedEmbedder,
    CreditSettings,
    DistilRequest,
    DistilSettings,
    ExperienceManager,
    ManagerSettings,
    Prompts,
    RetrievalSettings,
)
from crl.manager.store import Store
from crl.protocols import Hit
from crl.types import Completion, Sampling, TokenTrace, TrackRecord, Trajectory

ANY = RetrievalSettings(margin=2.0, min_similarity=0.0)
NEAREST = RetrievalSettings(margin=0.0, min_similarity=0.0)
SETTINGS = ManagerSettings(retrieval=ANY)


def bank(tmp_path: Path) -> Path:
    return tmp_path / "bank.sqlite"


def by_note(**answers: str) -> ScriptedEngine:
    """Answers by the last word of the episode."""
    return answering(lambda prompt: answers[prompt.split("<|im_end|>")[-2].split()[-1]])


async def filled(tmp_path: Path, *requests: DistilRequest, settings: ManagerSettings = SETTINGS, **answers: str) -> ExperienceManager:
    made = await manager(bank(tmp_path), by_note(**answers), settings)
    for one in requests:
        assert await made.submit(one)
    await made.drain()
    return made


async def found(made: ExperienceManager, **where) -> Hit:
    (one,) = await made.search([search(**where)])
    assert one is not None
    return one


async def counted(made: ExperienceManager, figure: str, least: int) -> None:
    """Returns when the figure has come so far."""
    while (await made.stats())[figure] < least:  # noqa: ASYNC110  (nobody would set an event)
        await asyncio.sleep(0.005)


def texts(made: ExperienceManager) -> dict[str, str]:
    return {f"{entry.uid}@{entry.version}": entry.text for entry in made._bank.entries.values()}


def trained_text(trace: TokenTrace) -> str:
    return renderer().decode([token for token, mask in zip(trace.ids, trace.mask, strict=True) if mask])


# ── distillation ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_episode_becomes_an_experience_that_guides_is_credited_and_trains(tmp_path):
    made = await filled(tmp_path, request(note="seen"), seen="The exit is west.</think>\n" + add("Go west."))
    guide = await found(made)
    assert (guide.text, guide.use.uid, guide.use.version, guide.use.how) == ("Go west.", "run/0/0/0#0", 1, "start")
    await made.credit([guide.use], True, episode="run/1/0/0")
    samples = await made.take_batch(1, 1)
    assert samples is not None
    op, head = samples
    assert (op.id, head.id, op.reward, op.weight, op.advantage) == ("run/0/0/0#0@1", "run/0/0/0@head", 1.0, 1.0, 0.0)
    assert '{"op": "add", "text": "Go west."}' in "[" + trained_text(op.trace) + "]"
    assert trained_text(head.trace) + trained_text(op.trace) == "The exit is west.</think>\n" + add("Go west.") + "<|im_end|>"
    assert GOAL in renderer().decode(op.trace.ids)
    assert set(op.trace.logprobs) == {0.0, -1.0}
    await made.mark_trained([sample.id for sample in samples], 1)
    assert await made.take_batch(1, 99) is None
    await made.aclose()


@pytest.mark.parametrize(
    ("answer", "stats", "stored"),
    [
        (f"Okay, the agent went west.\n</think>\n\nBased on the trace:\n```json\n{add('Go west.')}\n```", {"ops/add": 1}, ["Go west."]),
        (f"<think>Nothing new.</think>{RETURN}", {"ops/return": 1}, []),
        ("I think the agent should go west next time.", {"dropped/no op in the answer": 1}, []),
        ("<think>Hmm, the agent went west, and then", {"dropped/the thinking did not end": 1}, []),
        ('[{"op": "add", "text": "Go west."}, {"op": "update", "target": 1, "text": "x"}]',
         {"ops/add": 1, "dropped/target out of range": 1}, ["Go west."]),
        ('[{"op": "add", "text": "Go west."}, {"op": "add", "text": "Go', {"ops/add": 1, "dropped/not JSON": 1}, ["Go west."]),
    ],
)  # fmt: skip
async def test_answers_as_language_models_give_them(tmp_path, answer, stats, stored):
    made = await filled(tmp_path, request(note="seen"), seen=answer)
    assert list(texts(made).values()) == stored
    figures = await made.stats()
    assert figures.items() >= {"bank/size": len(stored), "queue/done": 1, "queue/pending": 0, **stats}.items()
    assert figures["generations"] == len(stored)  # what can earn nothing is not kept
    await made.aclose()


async def test_a_prompt_that_opens_the_thinking_makes_its_end_necessary(tmp_path):
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
        made = await ExperienceManager.open(path, engine, WordEmbedder(), opening, Prompts(thinking, write_merge), SETTINGS, seed=0)
        await made.submit(request())
        await made.drain()
        assert len(texts(made)) == size
        await made.aclose()


async def test_an_update_makes_the_next_version_with_fresh_counters(tmp_path):
    made = await filled(tmp_path, request(note="first"), first=add("Go west."), better=update("Go southwest."))
    guide = await found(made)
    await made.credit([guide.use], True, episode="run/1/0/0")
    await made.submit(request(1, note="better", shown=(guide,)))
    await made.drain()
    (entry,) = made._bank.entries.values()
    assert (entry.uid, entry.version, entry.text, entry.parents) == ("run/0/0/0#0", 2, "Go southwest.", ("run/0/0/0#0@1",))
    assert (entry.generation, entry.retrieved, entry.credited, entry.credit) == ("run/1/0/0", 0, 0, 0.0)
    assert (await found(made, group=9)).use.version == 2
    assert entry.experience.retrieved == 1
    await made.aclose()


async def test_the_newest_entries_come_first_with_their_counters(tmp_path):
    made = await filled(tmp_path, request(note="a"), a=add("Go west.", "Go east."), b=add("Go north."), better=update("Go southwest."))
    guide = hit("run/0/0/0#0")
    await made.submit(request(1, note="b"))
    await made.submit(request(2, note="better", shown=(guide,)))
    await made.drain()
    (guide,) = await made.search([search("Go southwest.")])
    for expected in (["Go southwest.", "Go north.", "Go east."], ["Go southwest."]):
        assert [one.text for one in made.latest(len(expected))] == expected
    assert guide is not None
    assert {one.uid: one.retrieved for one in made.latest(9)} == {e.uid: int(e.uid == guide.use.uid) for e in made._bank.entries.values()}
    before = made.latest(9)
    await made.aclose()
    again = await manager(bank(tmp_path), by_note(), SETTINGS)
    assert again.latest(9) == before
    assert again.latest(0) == []
    await again.aclose()


async def test_whoever_asks_is_told_what_was_distilled_once_it_is_in_the_bank(tmp_path):
    told = []
    made = await manager(
        bank(tmp_path),
        by_note(a=add("Go west."), none=RETURN, bad="Go!"),
        SETTINGS,
        on_distilled=lambda distilled: told.append((distilled, len(made._bank.entries))),
    )
    for member, note in enumerate(["a", "none", "bad"]):
        await made.submit(request(member=member, note=note))
    await made.drain()
    assert [(one.request.member, size, one.returned, dict(one.dropped), one.malformed) for one, size in told] == [
        (0, 1, 0, {}, False), (1, 1, 1, {}, False), (2, 1, 0, {"no op in the answer": 1}, True),
    ]  # fmt: skip
    assert [write.text for write in told[0][0].writes] == ["Go west."]
    await made.aclose()


async def test_a_stale_update_becomes_an_add_with_that_version_as_its_parent(tmp_path):
    made = await filled(tmp_path, request(note="first"), first=add("Go west."), south=update("Go south."), north=update("Go north."))
    guide = await found(made)
    for member, note in enumerate(["south", "north"]):
        await made.submit(request(1, member=member, note=note, shown=(guide,)))
    await made.drain()
    assert texts(made) == {"run/0/0/0#0@2": "Go south.", "run/1/0/1#0@1": "Go north."}
    assert made._bank.entries["run/1/0/1#0"].parents == ("run/0/0/0#0@1",)
    await made.aclose()


async def test_a_request_that_the_engine_cannot_serve_is_dead_with_its_reason(tmp_path):
    class Refusing(ScriptedEngine):
        async def generate(self, ids: Sequence[int], sampling: Sampling, **options) -> Completion:
            raise RolloutError("engine", "too long")

    made = await manager(bank(tmp_path), Refusing(renderer(), str))
    await made.submit(request())
    await made.drain()
    assert (await made.stats()).items() >= {"queue/dead": 1, "queue/pending": 0}.items()
    await made.aclose()


class Faltering(ScriptedEngine):
    """Fails as often as `failures` says for the note of the request; `tried` are the notes in the order of the attempts."""

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
            await asyncio.Event().wait()  # hangs
        return await super().generate(ids, sampling, **options)


BUSY = TransientError("engine", "busy")


@pytest.mark.parametrize("background", [True, False])
async def test_what_may_go_well_another_time_is_tried_again_and_applied_in_request_order(tmp_path, background):
    engine = Faltering({"a": (2, BUSY), "b": (1, EngineError("restarted")), "c": (1, None), "e": (1, RolloutError("engine", "too long"))})
    made = await manager(bank(tmp_path), engine, ManagerSettings(lease=0.5, backoff=0.001))
    for member, note in enumerate("abcde"):
        await made.submit(request(member=member, note=note))
    consumer = asyncio.create_task(made.run()) if background else None
    await made.drain()
    assert {note: engine.tried.count(note) for note in "abcde"} == {"a": 3, "b": 2, "c": 2, "d": 1, "e": 1}
    figures = {"queue/done": 4, "queue/dead": 1, "queue/pending": 0, "queue/leased": 0, "queue/retried": 4, "bank/size": 4}
    assert (await made.stats()).items() >= figures.items()
    if consumer:
        consumer.cancel()
        await asyncio.gather(consumer, return_exceptions=True)
    else:
        assert list(made._bank.entries) == [f"run/0/0/{member}#0" for member in range(4)], "in request order, not in that of success"
    await made.aclose()
    with sqlite3.connect(bank(tmp_path)) as db:
        assert db.execute("SELECT id, attempts, reason FROM requests WHERE attempts ORDER BY id").fetchall() == [
            ("run/0/0/0", 2, None), ("run/0/0/1", 1, None), ("run/0/0/2", 1, None), ("run/0/0/4", 1, "engine: too long"),
        ]  # fmt: skip


async def test_what_an_engine_says_is_kept_as_far_as_it_is_unicode(tmp_path):
    made = await manager(bank(tmp_path), Faltering({"a": (1, RolloutError("engine", "no \ud800"))}))
    await made.submit(request(note="a"))
    await made.drain()
    assert (await made._store._database.rows("SELECT state, reason FROM requests"))[0][:] == ("dead", "engine: no ?")
    await made.aclose()


@pytest.mark.parametrize("bad", [{"of": task(goal="no \ud800")}, {"note": "\ud800"}, {"shown": (hit("b#0", text="\udfff"),)}])
async def test_an_episode_whose_texts_are_no_unicode_is_not_acknowledged(tmp_path, bad):
    made = await manager(bank(tmp_path), by_note(a=add("Go west.")))
    await made.submit(request(note="a"))
    with pytest.raises(UnicodeEncodeError):
        await made.submit(request(1, **bad))
    await made.drain()
    assert (await made.stats()).items() >= {"bank/size": 1, "queue/done": 1, "queue/pending": 0}.items()
    await made.aclose()


@pytest.mark.parametrize("lease", [None, 60.0])
async def test_an_engine_that_times_out_by_itself_is_tried_again(tmp_path, lease):
    engine = Faltering({"a": (1, TimeoutError("no route"))})
    made = await manager(bank(tmp_path), engine, ManagerSettings(backoff=0.0, lease=lease))
    await made.submit(request(note="a"))
    await made.drain()
    assert (engine.tried, list(texts(made).values())) == (["a", "a"], ["Lesson of run/0/0/0."])
    await made.aclose()


async def test_a_request_that_never_goes_well_is_dead_and_can_be_revived(tmp_path):
    settings = ManagerSettings(attempts=3, backoff=0.0)
    made = await manager(bank(tmp_path), Faltering({"a": (99, BUSY)}), settings)
    await made.submit(request(note="a"))
    await made.drain()
    await made.aclose()
    again = await manager(bank(tmp_path), engine := Faltering({}), settings)
    assert (await again._store._database.rows("SELECT attempts, reason FROM requests"))[0][:] == (3, "engine: busy")
    await again.drain()
    assert engine.tried == [], "dead"
    assert await again._store.retry_dead() == ["run/0/0/0"]
    await again.drain()
    assert (await again.stats()).items() >= {"bank/size": 1, "queue/dead": 0, "queue/done": 1}.items()
    await again.aclose()


async def test_attempts_of_an_earlier_process_count(tmp_path):
    made = await manager(bank(tmp_path), Faltering({"a": (99, BUSY)}), ManagerSettings(backoff=99.0))
    await made.submit(request(note="a"))
    consumer = asyncio.create_task(made.run())
    await counted(made, "queue/retried", 1)
    consumer.cancel()  # while it pauses
    await asyncio.gather(consumer, return_exceptions=True)
    await made.aclose()
    again = await manager(bank(tmp_path), engine := Faltering({"a": (99, BUSY)}), ManagerSettings(attempts=3, backoff=0.0))
    await again.drain()
    assert len(engine.tried) == 2
    await again.aclose()


async def test_pauses_grow_and_leave_the_engine_to_others(tmp_path, monkeypatch):
    pauses = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    made = await manager(bank(tmp_path), engine := Faltering({"a": (99, BUSY)}), ManagerSettings(concurrency=1))
    await made.submit(request(note="a"))
    await made.submit(request(member=1, note="b"))
    monkeypatch.setattr("crl.manager.manager.asyncio.sleep", noted)
    await made.drain()
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    assert sorted(engine.tried[:2]) == ["a", "b"], "one place"
    await made.aclose()


async def test_a_dead_engine_ends_the_drain_and_the_request_is_pending_still(tmp_path):
    class Dead(ScriptedEngine):
        async def generate(self, ids: Sequence[int], sampling: Sampling, **options) -> Completion:
            raise EngineError("gone")

        async def health(self) -> None:
            raise EngineError("gone")

    made = await manager(bank(tmp_path), Dead(renderer(), str))
    await made.submit(request())
    with pytest.raises(ExceptionGroup) as caught:
        await made.drain()
    assert caught.group_contains(EngineError, match="gone")
    with pytest.raises(ExceptionGroup):
        await made.run()
    assert (await made.stats())["queue/pending"] == 1
    await made.aclose()


async def test_at_step_boundaries_the_bank_does_not_depend_on_timing(tmp_path):
    rng = random.Random()

    class Jittery(ScriptedEngine):
        async def generate(self, ids: Sequence[int], sampling: Sampling, **options) -> Completion:
            await asyncio.sleep(rng.random() / 100)
            return await super().generate(ids, sampling, **options)

    banks = []
    for seed in range(3):
        engine = Jittery(renderer(), lambda prompt: update(f"Go {prompt.splitlines()[1]}.") if "1. " in prompt else add("Go west."))
        rng.seed(seed)
        made = await manager(tmp_path / f"{seed}.sqlite", engine, SETTINGS)
        requests = [request(0, group, member) for group in range(3) for member in range(3)]
        requests += [request(1, 0, member, shown=(hit("run/0/0/0#0"),)) for member in range(3)]
        rng.shuffle(requests)
        for one in requests:
            await made.submit(one)
        await made.drain()
        banks.append([(uid, text, made._bank.entries[uid.split("@")[0]].parents) for uid, text in texts(made).items()])
        await made.aclose()
    assert banks[0] == banks[1] == banks[2]
    assert len(banks[0]) == 11


# ── in the background ───────────────────────────────────────────────────────────────────────────────────────────────


class Gated(ScriptedEngine):
    """Answers when the gate is open; counts who waits."""

    def __init__(self) -> None:
        super().__init__(renderer(), lambda prompt: add("Go west."))
        self.gate, self.waiting, self.most = asyncio.Event(), 0, 0

    async def generate(self, ids: Sequence[int], sampling: Sampling, **options) -> Completion:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await self.gate.wait()
        self.waiting -= 1
        return await super().generate(ids, sampling, **options)


async def test_the_consumer_distils_as_they_come_with_bounded_concurrency(tmp_path):
    engine = Gated()
    made = await manager(bank(tmp_path), engine, ManagerSettings(concurrency=2))
    consumer = asyncio.create_task(made.run())
    for member in range(5):
        await made.submit(request(member=member))
    await until(lambda: engine.waiting == 2)
    drained = asyncio.create_task(made.drain())
    await asyncio.sleep(0.05)
    assert await made.search([search()]) == [None]  # does not wait for the extractor
    engine.gate.set()
    await drained
    assert engine.most == 2
    assert (await made.stats()).items() >= {"bank/size": 5, "bank/size/room": 5, "queue/done": 5}.items()
    consumer.cancel()
    await asyncio.gather(consumer, return_exceptions=True)
    await made.aclose()


async def test_the_consumer_takes_as_many_as_there_is_room_for_and_never_more(tmp_path):
    """Free places are filled with one lease; what is in its hands is what is leased."""

    class Stepwise(ScriptedEngine):
        """Answers one request for each `let` that is released."""

        def __init__(self) -> None:
            super().__init__(renderer(), lambda prompt: add("Go west."))
            self.let, self.waiting = asyncio.Semaphore(0), 0

        async def generate(self, ids: Sequence[int], sampling: Sampling, **options) -> Completion:
            self.waiting += 1
            await self.let.acquire()
            self.waiting -= 1
            return await super().generate(ids, sampling, **options)

    engine, limits = Stepwise(), []
    made = await manager(bank(tmp_path), engine, ManagerSettings(concurrency=3))
    lease = made._store.lease

    async def noted(limit: int | None = None) -> list[DistilRequest]:
        limits.append(limit)
        return await lease(limit)

    made._store.lease = noted
    for member in range(8):
        await made.submit(request(member=member))
    consumer = asyncio.create_task(made.run())
    for done in range(8):
        held = min(3, 8 - done)
        await counted(made, "queue/done", done)
        await until(lambda held=held: engine.waiting == held)
        figures = await made.stats()
        assert (figures["queue/leased"], figures["queue/pending"], figures["queue/done"]) == (held, 8 - done - held, done)
        engine.let.release()
    await until(lambda: engine.waiting == 0)
    assert limits[0] == 3, "all of them at once, where there is room"
    assert max(limits) == 3
    await made.submit(request(member=9))
    await made.submit(request(member=10))
    await until(lambda: engine.waiting == 2)
    consumer.cancel()
    await asyncio.gather(consumer, return_exceptions=True)
    assert (await made.stats())["queue/pending"] == 2, "what it had in work is given back"
    await made.aclose()


async def test_a_consumer_that_is_cancelled_gives_back_what_it_had(tmp_path):
    engine = Gated()
    made = await manager(bank(tmp_path), engine, SETTINGS)
    consumer = asyncio.create_task(made.run())
    await made.submit(request())
    await until(lambda: engine.waiting == 1)
    consumer.cancel()
    await asyncio.gather(consumer, return_exceptions=True)
    engine.gate.set()
    await made.drain()
    assert texts(made) == {"run/0/0/0#0@1": "Go west."}
    await made.aclose()


async def test_a_full_queue_refuses_and_counts_or_waits(tmp_path):
    for overflow in ("refuse", "wait"):
        made = await manager(tmp_path / overflow, Gated(), ManagerSettings(queue_size=1, overflow=overflow))
        made._engine.gate.set()  # pyright: ignore[reportAttributeAccessIssue]
        assert await made.submit(request())
        assert await made.submit(request())
        second = asyncio.create_task(made.submit(request(member=1)))
        if overflow == "refuse":
            assert not await second
            assert (await made.stats()).items() >= {"queue/refused": 1, "queue/pending": 1}.items()
        else:
            await asyncio.sleep(0.05)
            assert not second.done()
            await made.drain()
            assert await second
        await made.aclose()


async def test_submitting_a_distilled_episode_again_changes_nothing(tmp_path):
    made = await filled(tmp_path, request(note="seen"), seen=add("Go west."))
    await made.submit(request(note="seen"))
    await made.drain()
    assert len(texts(made)) == 1
    await made.aclose()


# ── retrieval ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_search_never_returns_an_entry_of_another_task(tmp_path):
    made = await filled(tmp_path, request(note="a", of=task("maze")), request(1, note="b"), a=add("Find the exit."), b=add("Go west."))
    hits = await made.search([search("Find the exit.", name=name, group=i) for i, name in enumerate(["room", "maze", "attic"])])
    assert [hit and hit.text for hit in hits] == ["Go west.", "Find the exit.", None]
    await made.aclose()


async def test_the_key_is_the_text_or_the_goal_with_some_of_the_text(tmp_path):
    for weight, expected in ((None, "Go west."), (0.5, "Go east."), (0.0, "Go east.")):
        settings = ManagerSettings(distil=DistilSettings(key_text_weight=weight), retrieval=NEAREST)
        made = await manager(tmp_path / str(weight), by_note(a=add("Go west."), b=add("Go east.")), settings)
        await made.submit(request(note="a", of=task(goal="the crimson attic far away")))
        await made.submit(request(1, note="b", of=task(goal="azure cellar")))
        await made.drain()
        guide = await found(made, query="azure cellar west.")
        assert (guide.text, guide.goal) == (expected, "azure cellar" if weight is not None else "the crimson attic far away")
        await made.aclose()


async def test_identical_queries_are_embedded_once(tmp_path):
    embedder = WordEmbedder()
    made = await manager(bank(tmp_path), by_note(), embedder=embedder)
    await made.search([search(member=m) for m in range(4)] + [search("another", group=1)])
    assert embedder.calls == [[GOAL, "another"]]
    assert await made.search([]) == []
    await made.aclose()


@pytest.mark.parametrize("bad", [np.nan, np.inf, None], ids=["nan", "infinity", "another dim"])
async def test_vectors_that_cannot_be_compared_never_reach_the_bank(bad: float | None, tmp_path: Path):
    class Failing(WordEmbedder):
        async def embed(self, texts: Sequence[str]) -> np.ndarray:
            vectors = await super().embed(texts)
            if "bad" not in " ".join(texts):
                return vectors
            return np.full_like(vectors, bad) if bad is not None else vectors[:, :32]

    embedder = CachedEmbedder(Failing(), 99)
    settings = ManagerSettings(attempts=2, backoff=0.0, retrieval=ANY)
    made = await manager(bank(tmp_path), by_note(a=add("Go west."), b=add("Go bad.")), settings, embedder=embedder)
    for member, note in enumerate("ab"):
        await made.submit(request(member=member, note=note))
    await made.drain()
    with pytest.raises(EngineError, match=r"embedder words: .* 64 finite numbers"):
        await made.search([search("a bad query")])
    assert (await found(made)).text == "Go west."
    assert (await made.stats()).items() >= {"bank/size": 1, "queue/done": 1, "queue/dead": 1}.items()
    await made.aclose()
    again = await manager(bank(tmp_path), by_note(), settings, embedder=embedder)
    assert list(texts(again).values()) == ["Go west."]
    await again.aclose()


async def test_the_time_of_every_search_is_kept_until_it_is_taken(tmp_path):
    class Slow(WordEmbedder):
        async def embed(self, texts):
            await asyncio.sleep(0.01)
            return await super().embed(texts)

    made = await manager(bank(tmp_path), by_note(), embedder=Slow())
    await made.search([search(member=m) for m in range(4)])
    await made.search([search(group=1)])
    await made.search([search()], counted=False)  # an evaluation's
    times = made.take_search_times()
    assert len(times) == 2
    assert min(times) >= 0.01
    assert made.take_search_times() == []
    await made.aclose()


async def test_a_flush_writes_counts_down_and_waits_for_no_distillation(tmp_path):
    settings = ManagerSettings(retrieval=ANY, keep_steps=0)
    made = await filled(tmp_path, request(note="a"), settings=settings, a=add("Go west."), better=update("Go southwest."))
    guide = await found(made)
    await made.submit(request(1, note="better", shown=(guide,)))
    await made.drain()
    await made.submit(request(2, note="a"))
    await found(made, group=1)
    made.advance(1)
    await made.flush()
    assert (await made.stats()).items() >= {"ops/retrieve": 2, "generations": 1, "queue/pending": 1}.items()
    await made.aclose()


@pytest.mark.parametrize("shown_late", [False, True])
async def test_what_is_found_and_replaced_while_counts_are_written_can_earn_credit_still(tmp_path, monkeypatch, shown_late):
    """Found when the counts were taken already, then updated, before the generations that are spent go; or updated on disk, and found
    before memory knows."""
    settings = ManagerSettings(retrieval=ANY, keep_steps=0, credit=CreditSettings(cooldown=0))
    made = await filled(tmp_path, request(note="a"), settings=settings, a=add("Go west."), better=update("Go southwest."))
    made.advance(5)
    update_of = request(5, note="better", shown=(hit("run/0/0/0#0"),))
    await made.submit(update_of)
    if shown_late:
        show, held = made._show, asyncio.Event()

        async def wait_and_show(applied):
            await held.wait()
            await show(applied)

        monkeypatch.setattr(made, "_show", wait_and_show)
        draining = asyncio.create_task(made._queue.drain())
        while (await made._store.counts())["ops/update"] == 0:
            pass
        flushing = asyncio.create_task(made.flush())
        for _ in range(50):
            await made._store.counts()
        guide = await found(made)
        held.set()
        await asyncio.gather(draining, flushing)
    else:
        guides, prune = [], made._store.prune

        async def find_update_and_prune(*args):
            guides.append(await found(made))
            await made._queue.drain()
            await prune(*args)

        monkeypatch.setattr(made._store, "prune", find_update_and_prune)
        await made.flush()
        (guide,) = guides
    assert guide.use.version == 1
    await made.credit([guide.use], True, episode="run/5/1/0")
    assert (await made.stats())["buffer/ready"] == 1
    await made.aclose()


async def test_a_copy_of_a_bank_serves_another_run(tmp_path):
    made = await filled(tmp_path, request(note="a"), a=add("Go west."), b=add("Go north."))
    made.advance(90)
    guide = await found(made)
    await made.credit([guide.use], True, episode="run/90/0/0")
    await made.export_copy(tmp_path / "copy.sqlite")
    await made.credit([guide.use], True, episode="run/90/0/1")  # after the copy: not in it
    await made.aclose()

    other = await manager(tmp_path / "copy.sqlite", by_note(b=add("Go north.")), SETTINGS)
    (entry,) = other._bank.entries.values()
    assert (entry.retrieved, entry.last_returned_step) == (1, None), "how often it was returned stays, the other run's clock does not"
    assert (await other.stats()).items() >= {"queue/done": 0, "log/seq": 4}.items()
    assert "ops/submit" not in await other.stats(), "operations of the other run are not this one's"
    again = await found(other, group=3)
    assert again == replace(guide, record=TrackRecord(1, 1))
    await other.credit([again.use], False, episode="other/0/3/0")
    (entry,) = other._bank.entries.values()
    assert (entry.retrieved, entry.credited, entry.credit) == (2, 2, 0.0)
    assert await other.take_batch(1, 99) is None  # what another extractor wrote is not trained on
    await other.submit(DistilRequest.of("other", Trajectory(task(), 0, 0, 0, "free", segments=request(note="b").segments)))
    await other.drain()
    assert texts(other) == {"run/0/0/0#0@1": "Go west.", "other/0/0/0#0@1": "Go north."}  # the same address in another run
    assert set(await other._store.generations(["run/0/0/0", "other/0/0/0"])) == {"other/0/0/0"}
    await other.aclose()


async def test_a_bank_comes_back_as_it_was(tmp_path):
    made = await filled(tmp_path, request(note="a"), request(1, note="b"), a=add("Go west.", "Go east."), b=add("Go north."))
    made.advance(5)
    guide = await found(made)
    await made.credit([guide.use], False, episode="run/5/0/0")
    before = {uid: (entry.experience, entry.last_returned_step) for uid, entry in made._bank.entries.items()}
    await made.aclose()
    embedder = WordEmbedder()
    again = await manager(bank(tmp_path), by_note(), SETTINGS, embedder=embedder)
    assert {uid: (entry.experience, entry.last_returned_step) for uid, entry in again._bank.entries.items()} == before
    assert embedder.calls == []
    retrieved = before[guide.use.uid][0]
    assert (retrieved.retrieved, retrieved.credited, retrieved.credit) == (1, 1, -1.0)
    assert (await again.stats())["buffer/ready"] == 1
    await again.aclose()


@pytest.mark.parametrize("times", [1, 2])
async def test_a_close_that_is_cancelled_closes_all_the_same(times: int, tmp_path: Path):
    """While it waits for a change that waits for the disk."""
    made = await filled(tmp_path, request(note="a"), a=add("Go west."))
    guide, disk, threads = await found(made), threading.Event(), threading.active_count()
    made._store._database._on_thread(disk.wait)
    crediting = asyncio.create_task(made.credit([guide.use], True, episode="run/0/0/1"))
    await until(lambda: bool(made._changes))
    closing = asyncio.create_task(made.aclose())
    for _ in range(times):
        await asyncio.sleep(0)
        closing.cancel()
    await asyncio.wait({closing}, timeout=0.05)
    assert closing.done() == (times == 2), "one that is cancelled again does not wait"
    disk.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await crediting
    await made.aclose()
    await until(lambda: threading.active_count() < threads)
    again = await manager(bank(tmp_path), by_note(), SETTINGS)
    assert [(entry.retrieved, entry.credited) for entry in again._bank.entries.values()] == [(1, 1)]
    await again.aclose()


async def test_another_embedder_or_another_key_embeds_the_bank_again(tmp_path):
    made = await filled(tmp_path, request(note="a"), a=add("Go west."))
    await made.aclose()
    embedder = WordEmbedder()
    embedder.name = "other words"
    with_goal = ManagerSettings(retrieval=ANY, distil=DistilSettings(key_text_weight=0.5))
    for settings, expected in ((SETTINGS, [["Go west."]]), (SETTINGS, []), (with_goal, [["Go west."], [GOAL]]), (with_goal, [])):
        embedder.calls.clear()
        again = await manager(bank(tmp_path), by_note(), settings, embedder=embedder)
        assert embedder.calls == expected
        await again.aclose()


async def test_time_does_not_run_backwards(tmp_path):
    made = await manager(bank(tmp_path), by_note())
    made.advance(3)
    made.advance(3)
    with pytest.raises(ValueError, match="3 steps were completed already, not 2"):
        made.advance(2)
    assert made.step == 3
    await made.aclose()


# ── credit ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def taken(made: ExperienceManager, n: int, step: int) -> dict[str, tuple[float, float]]:
    """id → (r̄, w) of the next batch."""
    return {sample.id: (sample.reward, sample.weight) for sample in await made.take_batch(n, step) or ()}


async def test_over_the_cap_an_entry_is_evicted_guides_nobody_and_may_still_earn(tmp_path):
    settings = ManagerSettings(retrieval=RetrievalSettings("credit", margin=2.0, min_similarity=0.0), cap=2, evict="credit", keep_steps=2)
    other = request(9, note="c", of=task(goal="another room"))
    answers = {"a": add("Go west.", "Go east."), "b": add("Go north."), "c": add("Go up."), "d": update("Go far west.")}
    made = await filled(tmp_path, request(note="a"), other, settings=settings, **answers)
    guide = hit("run/0/0/0#0", text="Go west.")
    await made.credit([guide.use], False, episode="e1")
    await made.submit(request(1, note="b"))
    await made.drain()
    assert sorted(texts(made).values()) == ["Go east.", "Go north.", "Go up."]
    assert (await made.stats()).items() >= {"ops/evict": 1, "bank/size": 3}.items()
    assert "Go west." not in {(await found(made, group=group)).text for group in range(20)}
    assert (await taken(made, 1, 5))["run/0/0/0#0@1"] == (-1.0, 1.0)
    await made.submit(request(2, note="d", shown=(guide,)))  # an update of an evicted entry is an add
    await made.drain()
    assert made._bank.entries["run/2/0/0#0"].parents == ("run/0/0/0#0@1",)
    before = texts(made)
    await made.aclose()
    again = await manager(bank(tmp_path), by_note(), settings)
    assert texts(again) == before
    await again.aclose()


@pytest.mark.parametrize("seed", range(3))
async def test_every_reward_is_trained_on_once_or_is_pending_and_the_tables_follow_from_the_log(tmp_path, seed):
    rng = random.Random(seed)
    settings = ManagerSettings(retrieval=ANY, credit=CreditSettings(cooldown=2, malformed_reward=-1.0))
    answers = {"one": add("Go west."), "two": add("Go west.", "Go east."), "better": update("Go north."), "bad": "Go!", "none": RETURN}
    made = await manager(bank(tmp_path), by_note(**answers), settings)
    for step in range(12):
        made.advance(step)
        for group in range(3):
            (guide,) = await made.search([search(group=3 * step + group)])
            shown = (guide,) if guide else ()
            note = rng.choice(list(answers) if guide else ["one", "two"])
            episode = request(step, 3 * step + group, note=note, shown=shown)
            await made.submit(episode)
            for _ in range(rng.randrange(3)):
                await made.credit([hit.use for hit in shown], rng.random() < 0.5, episode=episode.id)
        while samples := await made.take_batch(2, step):
            if rng.random() < 0.8:
                await made.mark_trained([sample.id for sample in samples], step)
            else:
                break
        await made.drain()
    await made.aclose()

    entries, rewards = {}, {}
    with sqlite3.connect(bank(tmp_path)) as db:
        for kind, origin, op, text in db.execute("SELECT kind, origin, op, data FROM log ORDER BY seq"):
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
                assert (data["count"], data["total"]) == (len(pending[: data["count"]]), sum(pending[: data["count"]]))
                del pending[: data["count"]]
        assert {uid: rest for uid, *rest in db.execute("SELECT uid, version, text FROM entries")} == {
            u: list(e) for u, e in entries.items()
        }
        left = {(uid, version): rest for uid, version, *rest in db.execute("SELECT uid, version, pending_count, pending_sum FROM units")}
    assert {unit: [len(rewards.get(unit, [])), sum(rewards.get(unit, []))] for unit in left} == left
    assert any(count for count, _ in left.values())
    assert len(entries) > 12


# ── going back ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_manager_goes_back_to_a_snapshot_and_on_from_there(tmp_path):
    settings = ManagerSettings(retrieval=ANY, credit=CreditSettings(cooldown=0))
    answers = {"a": add("Go west."), "b": add("Go north."), "better": update("Go southwest.")}
    made = await filled(tmp_path, request(note="a"), settings=settings, **answers)
    made.advance(3)
    guide = await found(made)
    await made.credit([guide.use], True, episode="run/3/0/0")
    await made.submit(request(3, note="b"))
    seq = await made.snapshot()

    async def go_on() -> tuple:
        assert texts(made) == {"run/0/0/0#0@1": "Go west."}
        assert (await made.stats()).items() >= {"queue/pending": 1, "buffer/ready": 1, "bank/size": 1, "log/seq": seq}.items()
        assert made.step == 3
        samples = await made.take_batch(1, 3)
        assert samples
        await made.mark_trained([sample.id for sample in samples], 3)
        made.advance(5)
        await made.submit(request(4, note="better", shown=(guide,)))
        await made.drain()
        hit = await found(made, group=7)
        return texts(made), hit, made.latest(9)

    first = await go_on()
    done = await made.rollback(seq)
    assert done.archive
    assert (done.step, done.archive.name.startswith("bank-before-rollback-")) == (3, True)
    assert await go_on() == first
    await made.aclose()
    archived = await manager(done.archive, by_note(), settings)
    assert texts(archived) == first[0], "the tail is a bank of its own"
    await archived.aclose()
    again = await manager(bank(tmp_path), by_note(**answers), settings)
    await again.rollback(seq)
    assert (again.step, texts(again)) == (3, {"run/0/0/0#0@1": "Go west."})
    await again.aclose()


@pytest.mark.parametrize("turns", range(6))
async def test_a_rollback_that_is_cancelled_goes_to_its_end(turns: int, tmp_path: Path):
    made = await filled(tmp_path, request(note="a"), a=add("Go west."), b=add("Go north."))
    made.advance(1)
    seq = await made.snapshot()
    made.advance(3)
    await made.submit(request(3, note="b"))
    await made.drain()
    going_back = asyncio.create_task(made.rollback(seq))
    for _ in range(turns):
        await asyncio.sleep(0)
    going_back.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going_back
    assert (made.step, texts(made)) == ((1, {"run/0/0/0#0@1": "Go west."}) if turns else (3, texts(made)))
    assert texts(made) == {str(entry.unit): entry.text for entry, _ in await made._store.entries()}
    await made.aclose()


async def test_a_rollback_is_whole_also_where_an_index_could_not_be_built(tmp_path: Path):
    made = await filled(tmp_path, request(note="a"), a=add("Go west."), b=add("Go north."))
    seq = await made.snapshot()
    await made.submit(request(3, note="b"))
    await made.drain()

    async def failing() -> None:
        raise MemoryError

    made._searcher._builds.add(asyncio.create_task(failing()))
    with pytest.raises(MemoryError):
        await made.rollback(seq)
    assert texts(made) == {"run/0/0/0#0@1": "Go west."}
    assert (await found(made)).text == "Go west."
    await made.aclose()


async def test_a_bank_is_not_rolled_back_under_a_distillation(tmp_path):
    engine = Gated()
    made = await manager(bank(tmp_path), engine, SETTINGS)
    seq = await made.snapshot()
    consumer = asyncio.create_task(made.run())
    await made.submit(request())
    await until(lambda: engine.waiting == 1)
    with pytest.raises(RuntimeError, match="not rolled back while requests or a merge are in work"):
        await made.rollback(seq)
    consumer.cancel()
    await asyncio.gather(consumer, return_exceptions=True)
    await made.rollback(seq)
    assert (await made.stats()).items() >= {"queue/pending": 0, "log/seq": seq}.items()
    await made.aclose()


# ── requests from trajectories ──────────────────────────────────────────────────────────────────────────────────────


def test_a_request_is_made_of_a_trajectory_and_what_it_was_shown():
    guide = hit("run/0/0/0#0")
    trajectory = Trajectory(task(), 4, 9, 2, "guided", success=True, used=(guide.use,), shown=(guide.text,))
    made = DistilRequest.of("run", trajectory)
    assert (made.id, made.task, made.success, made.shown) == ("run/4/9/2", task(), True, (guide,))
    with pytest.raises(ValueError, match="not distilled: env: lost"):
        DistilRequest.of("run", Trajectory(task(), 4, 9, 2, "free", error="env: lost"))
    with pytest.raises(ValueError, match="must not be empty nor hold a slash"):
        DistilRequest.of("a/b", Trajectory(task(), 4, 9, 2, "free"))


@pytest.mark.parametrize(
    "bad", [{"concurrency": 0}, {"keep_steps": -1}, {"queue_size": 0}, {"cap": 0}, {"attempts": 0}, {"lease": 0.0}, {"backoff": -1.0}]
)
def test_settings_are_checked(bad):
    with pytest.raises(ValueError, match="bad manager settings"):
        ManagerSettings(**bad)


async def test_a_copy_that_could_not_begin_anew_is_no_copy(tmp_path, monkeypatch):
    made = await filled(tmp_path, request(note="a"), a=add("Go west."))

    async def failing(store: Store) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(Store, "begin_anew", failing)
    with pytest.raises(StoreError, match="the disk is full"):
        await made.export_copy(tmp_path / "copy.sqlite")
    assert not (tmp_path / "copy.sqlite").exists()
    await made.aclose()

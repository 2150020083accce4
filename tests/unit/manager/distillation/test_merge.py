"""Periodic merge: chunks of the bank, applying an answer, and changes during a merge."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crl.config.schema import BankSection, ExtractorSection, RetrievalSection, Scope
from crl.engines.scripted import ScriptedEngine
from crl.errors import EngineError, RolloutError, TransientError
from crl.manager import ExperienceManager, ManagerSettings
from crl.manager.distillation.merge import Chunker
from crl.manager.records import Applied, Entry
from crl.types import Completion, Place, Provenance, Sampling
from support.doors import renderer
from support.managers import (
    GOAL,
    PROMPTS,
    add,
    dump,
    hit,
    logged,
    open_manager,
    request,
    search,
    task,
    update,
)

ANY = RetrievalSection(margin=2.0, min_similarity=-1.0)


def entry(name: str) -> Entry:
    return Entry(name, 1, name, Place("room", GOAL), Provenance("g", (0, 1)))


# ── chunks ────────────────────────────────────────────────────────────────────────────────────────


def chunks(
    costs: Sequence[int], budget: int, carry: Callable[[list[Entry]], list[Entry]] = list
) -> list[list[str]]:
    """Return the chunks of entries with the given costs.

    `carry` chooses the entries of a chunk that are carried over to the next chunk.
    """
    entries = [entry(f"{number}") for number in range(len(costs))]
    chunker, carried, found = Chunker(entries, budget, lambda e: costs[int(e.uid)]), [], []
    while chunk := chunker.next(carried):
        found.append([e.uid for e in chunk])
        carried = carry(chunk)
    return found


def test_a_chunk_fills_its_budget_and_carries_over_at_most_half():
    assert chunks([2, 2, 2, 2, 2], 6, carry=lambda _: []) == [["0", "1", "2"], ["3", "4"]]
    assert chunks([2, 2, 2, 2, 2], 8) == [["0", "1", "2", "3"], ["0", "1", "4"]]
    assert chunks([9, 1, 1], 4) == [["0"], ["1", "2"]], "an entry over the budget has its own chunk"
    assert chunks([], 4) == []


@given(costs=st.lists(st.integers(1, 9), max_size=30), budget=st.integers(1, 30))
def test_every_entry_is_new_in_one_chunk_and_no_chunk_exceeds_the_budget(costs, budget):
    seen: list[str] = []
    for chunk in chunks(costs, budget):
        new = [uid for uid in chunk if uid not in seen]
        old = [uid for uid in chunk if uid in seen]
        assert chunk == old + new
        assert sum(costs[int(uid)] for uid in old) <= budget // 2
        assert sum(costs[int(uid)] for uid in chunk) <= budget or len(new) == 1
        assert new
        seen += new
    assert seen == [str(number) for number in range(len(costs))]


# ── applying an answer ────────────────────────────────────────────────────────────────────────────


def merge(text: str, *targets: int) -> dict[str, Any]:
    return {"op": "merge", "targets": list(targets), "text": text}


def discard(target: int) -> dict[str, Any]:
    return {"op": "discard", "target": target}


def is_merge(ids: Sequence[int]) -> bool:
    return "user\nmerge\n" in renderer().decode(ids)


class MergeEngine(ScriptedEngine):
    """Engine that distils the note of an episode and answers a merge with `answer_merge`.

    `answer_merge` receives the texts of the chunk. `chunks` holds the texts of every chunk so far.
    """

    def __init__(self, answer_merge: Callable[[list[str]], Any]) -> None:
        super().__init__(renderer(), self._reply)
        self.answer_merge, self.chunks = answer_merge, list[list[str]]()

    def _reply(self, prompt: str) -> str:
        _, message = prompt.split("user\n")
        lines = message.split("<|im_end|>")[0].splitlines()
        if lines[0] != "merge":
            return add(lines[-1].removeprefix("east "))
        self.chunks.append([line.split(". ", 1)[1] for line in lines[1:]])
        answer = self.answer_merge(self.chunks[-1])
        return answer if isinstance(answer, str) else json.dumps(answer)


async def filled_manager(
    path: Path, engine: ScriptedEngine, *texts: str, **settings: Any
) -> ExperienceManager:
    manager = await open_manager(
        path / "bank.sqlite", engine, ManagerSettings(**{"retrieval": ANY, **settings})
    )
    for member, text in enumerate(texts):
        await manager.submit(request(member=member, note=text))
    await manager.drain()
    return manager


def texts(manager: ExperienceManager) -> list[str]:
    return [e.text for e in manager._bank.entries.values()]


async def test_entries_are_merged_discarded_and_kept(tmp_path):
    engine = MergeEngine(lambda _: [merge("Go west or south.", 1, 3), discard(2)])
    manager = await filled_manager(
        tmp_path, engine, "Go west.", "Be careful.", "Go south.", "Look around."
    )
    await manager.merge()
    assert len(engine.chunks) == 1
    assert sorted(texts(manager)) == ["Go west or south.", "Look around."]
    made_entry = next(e for e in manager._bank.entries.values() if e.text == "Go west or south.")
    assert made_entry.provenance.parents == ("run/0/0/0#0@1", "run/0/0/2#0@1")
    assert (made_entry.task, made_entry.goal, made_entry.version) == ("room", GOAL, 1)
    assert (await manager.stats()).items() >= {
        "ops/merge": 1,
        "ops/discard": 1,
        "bank/size": 2,
        "merge/skipped": 0,
    }.items()
    await manager.aclose()
    again = await open_manager(tmp_path / "bank.sqlite", engine, ManagerSettings(retrieval=ANY))
    assert sorted(texts(again)) == ["Go west or south.", "Look around."], "the result is stored"
    history = {
        uid: status
        for uid, status in await again._store._database.rows("SELECT uid, status FROM entries")
    }
    assert history == {
        "run/0/0/0#0": "merged", "run/0/0/1#0": "evicted", "run/0/0/2#0": "merged",
        "run/0/0/3#0": "active", made_entry.uid: "active",
    }  # fmt: skip
    await again.aclose()


async def test_a_repeated_merge_changes_nothing(tmp_path):
    manager = await filled_manager(
        tmp_path,
        MergeEngine(lambda chunk: [merge("Go west or south.", 1, 2), discard(3)]),
        "Go west.",
        "Go south.",
        "Go.",
    )
    merged = await manager._merger.merge("merge/0", list(manager._bank.entries.values()))
    first = await manager._store.merge(merged, manager._stamp(), manager._rules)
    assert (len(first.changed), len(first.evicted)) == (1, 3)
    before = await manager.stats()
    assert await manager._store.merge(merged, manager._stamp(), manager._rules) == Applied()
    assert await manager.stats() == before
    await manager.aclose()


async def test_a_merge_earns_credit_like_other_generations(tmp_path):
    extractor = ExtractorSection(cooldown=0)
    engine = MergeEngine(lambda _: [merge("Go west or south.", 1, 2)])
    manager = await filled_manager(tmp_path, engine, "Go west.", "Go south.", extractor=extractor)
    await manager.merge()
    (found,) = await manager.search([search()])
    assert found is not None
    await manager.credit([found.use], True, episode="run/1/0/0")
    samples = await manager.take_batch(1, 1)
    assert samples is not None
    assert samples[0].reward == 1.0
    assert (
        renderer()
        .decode([i for i, m in zip(samples[0].trace.ids, samples[0].trace.mask, strict=True) if m])
        .startswith('{"op": "merge"')
    )
    await manager.aclose()


async def test_a_merged_entry_can_earn_credit_of_a_running_episode(tmp_path):
    manager = await filled_manager(
        tmp_path, MergeEngine(lambda _: [merge("Go west or south.", 1, 2)]), "Go west.", "Go south."
    )
    (found,) = await manager.search([search()])
    await manager.merge()
    await manager.flush()
    assert found is not None
    await manager.credit([found.use], True, episode="run/1/0/0")
    assert (await manager.stats())["buffer/ready"] == 1
    await manager.aclose()


async def test_an_answer_that_cannot_be_used_changes_nothing(tmp_path):
    for number, answer in enumerate(["They are all fine.", [merge("x", 1)], [discard(7)]]):
        folder = tmp_path / str(number)
        folder.mkdir()
        engine = MergeEngine(lambda _, answer=answer: answer)
        manager = await filled_manager(folder, engine, "Go west.", "Go south.")
        await manager.merge()
        assert len(engine.chunks) == 1
        assert texts(manager) == ["Go west.", "Go south."]
        await manager.aclose()


async def test_a_malformed_merge_gets_the_malformed_reward(tmp_path):
    extractor = ExtractorSection(cooldown=0, malformed_reward=-1.0)
    manager = await filled_manager(
        tmp_path, MergeEngine(lambda _: "Fine."), "Go west.", "Go south.", extractor=extractor
    )
    await manager.merge()
    ready = await manager._store.ready_units()
    assert [unit.pending.reward for unit in ready] == [-1.0]
    await manager.aclose()


ERRORS = [
    RolloutError("engine", "too long"),
    TransientError("engine", "busy"),
    EngineError("restarted, and serves again"),
    None,
]


@pytest.mark.parametrize("error", ERRORS, ids=["cannot", "busy", "restarted", "hangs"])
async def test_a_chunk_that_the_engine_cannot_serve_is_skipped(tmp_path, error):
    class Refusing(MergeEngine):
        async def generate(
            self, ids: Sequence[int], sampling: Sampling, **options: Any
        ) -> Completion:
            if is_merge(ids) and "Go west." in renderer().decode(ids):
                if error:
                    raise error
                await asyncio.Event().wait()
            return await super().generate(ids, sampling, **options)

    engine = Refusing(lambda _: [discard(1)])
    manager = await filled_manager(tmp_path, engine, "Go west.", "Go south.", "Go east.", "Go up.")
    manager._merger.cost = lambda entry: 1  # two entries fit into a chunk
    manager._settings = ManagerSettings(
        retrieval=ANY, extractor=ExtractorSection(merge_tokens=2, answer_timeout=0.2)
    )
    await manager.merge()
    assert engine.chunks == [["Go east.", "Go up."]]
    assert texts(manager) == ["Go west.", "Go south.", "Go up."]
    await manager.aclose()


async def test_a_dead_engine_ends_the_merge(tmp_path):
    class Dead(MergeEngine):
        async def generate(
            self, ids: Sequence[int], sampling: Sampling, **options: Any
        ) -> Completion:
            if is_merge(ids):
                await self.health()
            return await super().generate(ids, sampling, **options)

        async def health(self) -> None:
            raise EngineError("gone")

    manager = await filled_manager(tmp_path, Dead(lambda _: []), "Go west.", "Go south.")
    with pytest.raises(EngineError, match="gone"):
        await manager.merge()
    with pytest.raises(EngineError, match="gone"):
        await manager.merge()  # the failed merge does not count as running
    await manager.aclose()


async def test_remaining_entries_are_carried_over_to_the_next_chunk(tmp_path):
    def answer_merge(chunk: list[str]) -> Any:
        return [merge(f"{chunk[0]} + {chunk[1]}", 1, 2)]

    engine = MergeEngine(answer_merge)
    manager = await filled_manager(tmp_path, engine, "a", "b", "c", "d", "e")
    manager._merger.cost = lambda entry: 1
    manager._settings = ManagerSettings(retrieval=ANY, extractor=ExtractorSection(merge_tokens=3))
    await manager.merge()
    assert engine.chunks == [["a", "b", "c"], ["a + b", "d", "e"]]
    assert sorted(texts(manager)) == ["a + b + d", "c", "e"]
    await manager.aclose()


async def test_only_entries_that_one_query_can_find_are_merged(tmp_path):
    cases: list[tuple[Scope, float | None, list[list[str]]]] = [
        ("task", None, [["a", "b", "c"], ["d", "e"]]),
        ("task", 0.5, [["a", "b"], ["d", "e"]]),
        ("shared", None, [["a", "b", "c", "d", "e"]]),
        ("shared", 0.5, [["a", "b", "d", "e"]]),
    ]
    for scope, weight, expected in cases:
        folder = tmp_path / f"{scope} {weight}"
        folder.mkdir()
        engine = MergeEngine(lambda _: [])
        settings = ManagerSettings(
            retrieval=ANY, bank=BankSection(scope=scope, key_text_weight=weight)
        )
        manager = await open_manager(folder / "bank.sqlite", engine, settings)
        places = [task(), task(), task(goal="Another room."), task("shop"), task("shop")]
        for member, (of, note) in enumerate(zip(places, "abcde", strict=True)):
            await manager.submit(request(member=member, note=note, of=of))
        await manager.drain()
        await manager.merge()
        assert engine.chunks == expected, "no chunk has a single entry"
        await manager.aclose()


async def test_a_shared_bank_is_merged_across_tasks(tmp_path):
    engine = MergeEngine(lambda _: [merge("Look before you go.", 1, 2)])
    manager = await open_manager(
        tmp_path / "bank.sqlite",
        engine,
        ManagerSettings(retrieval=ANY, bank=BankSection(scope="shared")),
    )
    for member, of in enumerate((task(), task("shop"))):
        await manager.submit(request(member=member, note=f"note {member}", of=of))
    await manager.drain()
    await manager.merge()
    (merged,) = manager._bank.entries.values()
    assert (merged.text, merged.task, merged.goal) == ("Look before you go.", "room", GOAL), (
        "of the first source"
    )
    found = await manager.search([search(), search(name="shop", group=1)])
    assert [one and one.text for one in found] == ["Look before you go."] * 2
    await manager.aclose()


async def test_sampled_tokens_are_counted(tmp_path):
    engine = MergeEngine(lambda _: [])
    manager = await filled_manager(tmp_path, engine, "Go west.", "Go south.")
    before = (await manager.stats())["total/sampled_tokens/extractor"]
    generations = await manager._store.generations(["run/0/0/0", "run/0/0/1"])
    assert before == sum(len(one.completion.ids) for one in generations.values())
    await manager.merge()
    assert (await manager.stats())["total/sampled_tokens/extractor"] == before + len(
        renderer().encode("[]<|im_end|>")
    )
    await manager.aclose()


async def test_a_single_entry_is_not_merged(tmp_path):
    manager = await filled_manager(tmp_path, MergeEngine(lambda _: []), "Go west.")
    manager._merger.cost = lambda entry: pytest.fail("nothing is to be merged")
    await manager.merge()
    await manager.aclose()


# ── changes during a merge ────────────────────────────────────────────────────────────────────────


class GatedMergeEngine(MergeEngine):
    """Engine that answers a merge only when its gate is open."""

    def __init__(self, answer_merge: Callable[[list[str]], Any]) -> None:
        super().__init__(answer_merge)
        self.asked, self.gate = asyncio.Event(), asyncio.Event()

    async def generate(self, ids: Sequence[int], sampling: Sampling, **options: Any) -> Completion:
        if is_merge(ids):
            self.asked.set()
            await self.gate.wait()
        return await super().generate(ids, sampling, **options)


async def test_the_bank_stays_usable_during_a_merge_and_stale_ops_are_dropped(tmp_path):
    engine = GatedMergeEngine(lambda _: [merge("Go west or south.", 1, 2), discard(3)])
    manager = await filled_manager(tmp_path, engine, "Go west.", "Go south.", "Go east.")
    merging = asyncio.create_task(manager.merge())
    await engine.asked.wait()
    (found,) = await manager.search([search("Go west.")])
    assert found is not None
    await manager.credit([found.use], True, episode="run/1/0/0")
    engine._answer = lambda prompt: (
        update("Go west twice.") if "run/1" in prompt else engine._reply(prompt)
    )
    await manager.submit(request(1, shown=(hit("run/0/0/0#0"),)))
    await manager.drain()
    assert not merging.done()
    engine.gate.set()
    await merging
    assert sorted(texts(manager)) == ["Go south.", "Go west twice."]
    assert (await manager.stats())["dropped/stale target"] == 1
    await manager.aclose()


async def test_a_merge_during_another_merge_is_skipped_and_counted(tmp_path):
    engine = GatedMergeEngine(lambda _: [discard(1)])
    manager = await filled_manager(tmp_path, engine, "Go west.", "Go south.")
    merging = asyncio.create_task(manager.merge())
    await engine.asked.wait()
    await manager.merge()
    assert not merging.done()
    engine.gate.set()
    await merging
    assert (await manager.stats())["merge/skipped"] == 1
    assert texts(manager) == ["Go south."]
    await manager.merge()
    assert len(engine.chunks) == 1, "a single entry cannot be merged"
    await manager.aclose()


async def test_a_cancelled_merge_writes_whole_chunks(tmp_path):
    engine = GatedMergeEngine(lambda _: [discard(1)])
    manager = await filled_manager(tmp_path, engine, "Go west.", "Go south.")
    before = dump(tmp_path / "bank.sqlite")
    merging = asyncio.create_task(manager.merge())
    await engine.asked.wait()
    merging.cancel()
    await asyncio.gather(merging, return_exceptions=True)
    assert dump(tmp_path / "bank.sqlite") == before
    engine.gate.set()
    await manager.merge()  # starts again
    assert [data["targets"] for _, data in logged(tmp_path / "bank.sqlite", "discard")] == [
        ["run/0/0/0#0@1"]
    ]
    await manager.aclose()


def test_merge_prompts_number_entries_from_one():
    (message,) = PROMPTS.merge([entry("a"), entry("b")])
    assert message.text == "merge\n1. a\n2. b"

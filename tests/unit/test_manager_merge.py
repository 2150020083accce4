"""The periodic merge: chunks of the bank, applying an answer, and changes during a merge."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from doors import renderer
from extractors import GOAL, PROMPTS, add, dump, hit, logged, manager, request, search, task, update
from hypothesis import given
from hypothesis import strategies as st

from crl.engines.scripted import ScriptedEngine
from crl.errors import EngineError, RolloutError, TransientError
from crl.manager import (
    CreditSettings,
    DistilSettings,
    ExperienceManager,
    ManagerSettings,
    MergeStats,
    RetrievalSettings,
)
from crl.manager.bank import Scope
from crl.manager.merge import Chunker
from crl.manager.records import Applied, Entry
from crl.types import Completion, Sampling

ANY = RetrievalSettings(margin=2.0, min_similarity=-1.0)


def entry(name: str) -> Entry:
    return Entry(name, 1, name, "room", GOAL, "g", (0, 1))


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


def test_a_chunk_holds_what_it_has_tokens_for_and_half_of_it_at_most_is_carried_over():
    assert chunks([2, 2, 2, 2, 2], 6, carry=lambda _: []) == [["0", "1", "2"], ["3", "4"]]
    assert chunks([2, 2, 2, 2, 2], 8) == [["0", "1", "2", "3"], ["0", "1", "4"]]
    assert chunks([9, 1, 1], 4) == [["0"], ["1", "2"]], "what is too long for any chunk comes alone"
    assert chunks([], 4) == []


@given(costs=st.lists(st.integers(1, 9), max_size=30), budget=st.integers(1, 30))
def test_every_entry_is_seen_once_as_new_and_no_chunk_is_too_long(costs, budget):
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


class Tidier(ScriptedEngine):
    """Engine that distils the note of an episode and answers a merge with `tidy`.

    `tidy` receives the texts of the chunk. `chunks` holds the texts of every chunk so far.
    """

    def __init__(self, tidy: Callable[[list[str]], Any]) -> None:
        super().__init__(renderer(), self._reply)
        self.tidy, self.chunks = tidy, list[list[str]]()

    def _reply(self, prompt: str) -> str:
        _, message = prompt.split("user\n")
        lines = message.split("<|im_end|>")[0].splitlines()
        if lines[0] != "merge":
            return add(lines[-1].removeprefix("east "))
        self.chunks.append([line.split(". ", 1)[1] for line in lines[1:]])
        answer = self.tidy(self.chunks[-1])
        return answer if isinstance(answer, str) else json.dumps(answer)


async def filled(
    path: Path, engine: ScriptedEngine, *texts: str, **settings: Any
) -> ExperienceManager:
    made = await manager(
        path / "bank.sqlite", engine, ManagerSettings(**{"retrieval": ANY, **settings})
    )
    for member, text in enumerate(texts):
        await made.submit(request(member=member, note=text))
    await made.drain()
    return made


def texts(made: ExperienceManager) -> list[str]:
    return [e.text for e in made._bank.entries.values()]


async def test_entries_are_merged_discarded_and_kept(tmp_path):
    engine = Tidier(lambda _: [merge("Go west or south.", 1, 3), discard(2)])
    made = await filled(tmp_path, engine, "Go west.", "Be careful.", "Go south.", "Look around.")
    assert await made.merge() == MergeStats(chunks=1, failed=0, made=1, removed=3)
    assert sorted(texts(made)) == ["Go west or south.", "Look around."]
    made_entry = next(e for e in made._bank.entries.values() if e.text == "Go west or south.")
    assert made_entry.parents == ("run/0/0/0#0@1", "run/0/0/2#0@1")
    assert (made_entry.task, made_entry.goal, made_entry.version) == ("room", GOAL, 1)
    assert (await made.stats()).items() >= {
        "ops/merge": 1,
        "ops/discard": 1,
        "bank/size": 2,
        "merge/skipped": 0,
    }.items()
    await made.aclose()
    again = await manager(tmp_path / "bank.sqlite", engine, ManagerSettings(retrieval=ANY))
    assert sorted(texts(again)) == ["Go west or south.", "Look around."], "it is on disk"
    history = {
        uid: status
        for uid, status in await again._store._database.rows("SELECT uid, status FROM entries")
    }
    assert history == {
        "run/0/0/0#0": "merged", "run/0/0/1#0": "evicted", "run/0/0/2#0": "merged",
        "run/0/0/3#0": "active", made_entry.uid: "active",
    }  # fmt: skip
    await again.aclose()


async def test_what_is_written_twice_is_written_once(tmp_path):
    made = await filled(
        tmp_path,
        Tidier(lambda chunk: [merge("Go west or south.", 1, 2), discard(3)]),
        "Go west.",
        "Go south.",
        "Go.",
    )
    merged = await made._merger.merge("merge/0", list(made._bank.entries.values()))
    first = await made._store.merge(merged, made._stamp(), made._rules)
    assert (len(first.changed), len(first.evicted)) == (1, 3)
    before = await made.stats()
    assert await made._store.merge(merged, made._stamp(), made._rules) == Applied()
    assert await made.stats() == before
    await made.aclose()


async def test_a_merge_earns_credit_like_other_generations(tmp_path):
    credit = CreditSettings(cooldown=0)
    engine = Tidier(lambda _: [merge("Go west or south.", 1, 2)])
    made = await filled(tmp_path, engine, "Go west.", "Go south.", credit=credit)
    await made.merge()
    (found,) = await made.search([search()])
    assert found is not None
    await made.credit([found.use], True, episode="run/1/0/0")
    samples = await made.take_batch(1, 1)
    assert samples is not None
    assert samples[0].reward == 1.0
    assert (
        renderer()
        .decode([i for i, m in zip(samples[0].trace.ids, samples[0].trace.mask, strict=True) if m])
        .startswith('{"op": "merge"')
    )
    await made.aclose()


async def test_what_guides_a_running_episode_earns_its_credit_after_it_was_merged(tmp_path):
    made = await filled(
        tmp_path, Tidier(lambda _: [merge("Go west or south.", 1, 2)]), "Go west.", "Go south."
    )
    (found,) = await made.search([search()])
    await made.merge()
    await made.flush()
    assert found is not None
    await made.credit([found.use], True, episode="run/1/0/0")
    assert (await made.stats())["buffer/ready"] == 1
    await made.aclose()


async def test_an_answer_that_cannot_be_used_changes_nothing(tmp_path):
    for number, answer in enumerate(["They are all fine.", [merge("x", 1)], [discard(7)]]):
        folder = tmp_path / str(number)
        folder.mkdir()
        made = await filled(
            folder, Tidier(lambda _, answer=answer: answer), "Go west.", "Go south."
        )
        assert await made.merge() == MergeStats(chunks=1, failed=1)
        assert texts(made) == ["Go west.", "Go south."]
        await made.aclose()


async def test_an_unusable_answer_earns_what_such_answers_earn(tmp_path):
    credit = CreditSettings(cooldown=0, malformed_reward=-1.0)
    made = await filled(tmp_path, Tidier(lambda _: "Fine."), "Go west.", "Go south.", credit=credit)
    await made.merge()
    ready = await made._store.ready()
    assert [unit.pending.reward for unit in ready] == [-1.0]
    await made.aclose()


ERRORS = [
    RolloutError("engine", "too long"),
    TransientError("engine", "busy"),
    EngineError("restarted, and serves again"),
    None,
]


@pytest.mark.parametrize("error", ERRORS, ids=["cannot", "busy", "restarted", "hangs"])
async def test_a_chunk_that_the_engine_does_not_serve_is_left_as_it_is_and_the_next_one_is_asked_about(
    tmp_path, error
):
    class Refusing(Tidier):
        async def generate(
            self, ids: Sequence[int], sampling: Sampling, **options: Any
        ) -> Completion:
            if is_merge(ids) and "Go west." in renderer().decode(ids):
                if error:
                    raise error
                await asyncio.Event().wait()
            return await super().generate(ids, sampling, **options)

    made = await filled(
        tmp_path, Refusing(lambda _: [discard(1)]), "Go west.", "Go south.", "Go east.", "Go up."
    )
    made._merger.cost = lambda entry: 1  # two entries fit into a chunk
    made._settings = ManagerSettings(retrieval=ANY, merge_tokens=2, lease=0.2)
    assert await made.merge() == MergeStats(chunks=2, failed=1, removed=1)
    assert texts(made) == ["Go west.", "Go south.", "Go up."]
    await made.aclose()


async def test_a_dead_engine_ends_it(tmp_path):
    class Dead(Tidier):
        async def generate(
            self, ids: Sequence[int], sampling: Sampling, **options: Any
        ) -> Completion:
            if is_merge(ids):
                await self.health()
            return await super().generate(ids, sampling, **options)

        async def health(self) -> None:
            raise EngineError("gone")

    made = await filled(tmp_path, Dead(lambda _: []), "Go west.", "Go south.")
    with pytest.raises(EngineError, match="gone"):
        await made.merge()
    with pytest.raises(EngineError, match="gone"):
        await made.merge()  # the failed merge does not count as running
    await made.aclose()


async def test_what_is_left_of_a_chunk_meets_the_next_one(tmp_path):
    def tidy(chunk: list[str]) -> Any:
        return [merge(f"{chunk[0]} + {chunk[1]}", 1, 2)]

    engine = Tidier(tidy)
    made = await filled(tmp_path, engine, "a", "b", "c", "d", "e")
    made._merger.cost = lambda entry: 1
    made._settings = ManagerSettings(retrieval=ANY, merge_tokens=3)
    await made.merge()
    assert engine.chunks == [["a", "b", "c"], ["a + b", "d", "e"]]
    assert sorted(texts(made)) == ["a + b + d", "c", "e"]
    await made.aclose()


async def test_entries_that_no_query_finds_together_are_merged_apart(tmp_path):
    cases: list[tuple[Scope, float | None, list[list[str]]]] = [
        ("task", None, [["a", "b", "c"], ["d", "e"]]),
        ("task", 0.5, [["a", "b"], ["d", "e"]]),
        ("shared", None, [["a", "b", "c", "d", "e"]]),
        ("shared", 0.5, [["a", "b", "d", "e"]]),
    ]
    for scope, weight, expected in cases:
        folder = tmp_path / f"{scope} {weight}"
        folder.mkdir()
        engine = Tidier(lambda _: [])
        settings = ManagerSettings(
            scope=scope, retrieval=ANY, distil=DistilSettings(key_text_weight=weight)
        )
        made = await manager(folder / "bank.sqlite", engine, settings)
        places = [task(), task(), task(goal="Another room."), task("shop"), task("shop")]
        for member, (of, note) in enumerate(zip(places, "abcde", strict=True)):
            await made.submit(request(member=member, note=note, of=of))
        await made.drain()
        await made.merge()
        assert engine.chunks == expected, "an entry alone is not asked about"
        await made.aclose()


async def test_a_shared_bank_is_merged_across_tasks_and_guides_all_of_them(tmp_path):
    engine = Tidier(lambda _: [merge("Look before you go.", 1, 2)])
    made = await manager(
        tmp_path / "bank.sqlite", engine, ManagerSettings(scope="shared", retrieval=ANY)
    )
    for member, of in enumerate((task(), task("shop"))):
        await made.submit(request(member=member, note=f"note {member}", of=of))
    await made.drain()
    assert await made.merge() == MergeStats(chunks=1, made=1, removed=2)
    (merged,) = made._bank.entries.values()
    assert (merged.text, merged.task, merged.goal) == ("Look before you go.", "room", GOAL), (
        "of the first source"
    )
    found = await made.search([search(), search(name="shop", group=1)])
    assert [one and one.text for one in found] == ["Look before you go."] * 2
    await made.aclose()


async def test_what_the_extractor_samples_is_counted(tmp_path):
    engine = Tidier(lambda _: [])
    made = await filled(tmp_path, engine, "Go west.", "Go south.")
    before = (await made.stats())["total/sampled_tokens/extractor"]
    generations = await made._store.generations(["run/0/0/0", "run/0/0/1"])
    assert before == sum(len(one.completion.ids) for one in generations.values())
    await made.merge()
    assert (await made.stats())["total/sampled_tokens/extractor"] == before + len(
        renderer().encode("[]<|im_end|>")
    )
    await made.aclose()


async def test_a_place_of_one_entry_costs_nothing(tmp_path):
    made = await filled(tmp_path, Tidier(lambda _: []), "Go west.")
    made._merger.cost = lambda entry: pytest.fail("nothing is to be merged")
    assert await made.merge() == MergeStats()
    await made.aclose()


# ── changes during a merge ────────────────────────────────────────────────────────────────────────


class Slow(Tidier):
    """Engine that answers a merge only when its gate is open."""

    def __init__(self, tidy: Callable[[list[str]], Any]) -> None:
        super().__init__(tidy)
        self.asked, self.gate = asyncio.Event(), asyncio.Event()

    async def generate(self, ids: Sequence[int], sampling: Sampling, **options: Any) -> Completion:
        if is_merge(ids):
            self.asked.set()
            await self.gate.wait()
        return await super().generate(ids, sampling, **options)


async def test_searches_distillation_and_credit_go_on_and_a_stale_op_is_dropped(tmp_path):
    engine = Slow(lambda _: [merge("Go west or south.", 1, 2), discard(3)])
    made = await filled(tmp_path, engine, "Go west.", "Go south.", "Go east.")
    merging = asyncio.create_task(made.merge())
    await engine.asked.wait()
    (found,) = await made.search([search("Go west.")])
    assert found is not None
    await made.credit([found.use], True, episode="run/1/0/0")
    engine._answer = lambda prompt: (
        update("Go west twice.") if "run/1" in prompt else engine._reply(prompt)
    )
    await made.submit(request(1, shown=(hit("run/0/0/0#0"),)))
    await made.drain()
    assert not merging.done()
    engine.gate.set()
    assert await merging == MergeStats(chunks=1, made=0, removed=1)
    assert sorted(texts(made)) == ["Go south.", "Go west twice."]
    assert (await made.stats())["dropped/stale target"] == 1
    await made.aclose()


async def test_one_that_is_due_while_one_runs_is_skipped_and_counted(tmp_path):
    engine = Slow(lambda _: [discard(1)])
    made = await filled(tmp_path, engine, "Go west.", "Go south.")
    merging = asyncio.create_task(made.merge())
    await engine.asked.wait()
    assert await made.merge() is None
    engine.gate.set()
    assert await merging == MergeStats(chunks=1, removed=1)
    assert (await made.stats())["merge/skipped"] == 1
    assert await made.merge() == MergeStats(), "a single entry is nothing to merge"
    await made.aclose()


async def test_a_merge_that_is_cancelled_leaves_whole_chunks(tmp_path):
    engine = Slow(lambda _: [discard(1)])
    made = await filled(tmp_path, engine, "Go west.", "Go south.")
    before = dump(tmp_path / "bank.sqlite")
    merging = asyncio.create_task(made.merge())
    await engine.asked.wait()
    merging.cancel()
    await asyncio.gather(merging, return_exceptions=True)
    assert dump(tmp_path / "bank.sqlite") == before
    engine.gate.set()
    assert await made.merge() == MergeStats(chunks=1, removed=1), "the next one starts anew"
    assert [data["targets"] for _, data in logged(tmp_path / "bank.sqlite", "discard")] == [
        ["run/0/0/0#0@1"]
    ]
    await made.aclose()


def test_the_prompts_of_the_tests_number_from_one():
    (message,) = PROMPTS.merge([entry("a"), entry("b")])
    assert message.text == "merge\n1. a\n2. b"

"""Concurrent searches: batches of embeddings, order of results, changes of the bank, closing."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from doors import until
from extractors import WordEmbedder, search
from hypothesis import given
from hypothesis import strategies as st

from crl.manager import CachedEmbedder, RetrievalSettings
from crl.manager.bank import Bank
from crl.manager.index import Build, Neighbour
from crl.manager.records import Entry
from crl.manager.searching import Searcher
from crl.protocols import Hit

ANY = {"margin": 2.0, "min_similarity": 0.0}


class GatedEmbedder(WordEmbedder):
    """Embedder that holds each call until its gate opens. A call with the text "broken" fails."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: list[asyncio.Event] = []

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        self.gates.append(gate := asyncio.Event())
        vectors = await super().embed(texts)
        await gate.wait()
        if "broken" in texts:
            raise OSError("the embedder is gone")
        return vectors

    async def open_all(self) -> None:
        """Open all gates, also those of later calls, until this task is cancelled."""
        while True:
            for gate in self.gates:
                gate.set()
            await asyncio.sleep(0.0001)


async def searcher(
    *texts: str, embedder: WordEmbedder | CachedEmbedder | None = None, **settings
) -> tuple[Searcher, Bank]:
    chosen = RetrievalSettings(**{**ANY, **settings})
    bank = Bank(WordEmbedder.dim, "task", chosen, seed=0)
    made = Searcher(bank, embedder or WordEmbedder(), chosen)
    vectors = await WordEmbedder().embed(texts)
    await made.change([(entry(text), vector) for text, vector in zip(texts, vectors, strict=True)])
    return made, bank


def entry(text: str) -> Entry:
    return Entry(text, 1, text, "room", "goal", text, (0, 1))


def ask(
    made: Searcher, query: str, group: int = 0, *, counted: bool = True
) -> asyncio.Task[list[Hit | None]]:
    return asyncio.create_task(made.search([search(query, group=group)], 0, counted=counted))


# ── batches ───────────────────────────────────────────────────────────────────────────────────────


async def test_one_that_is_alone_goes_at_once_and_what_comes_meanwhile_goes_together():
    embedder = GatedEmbedder()
    made, _ = await searcher("a", embedder=embedder, batch=3, max_wait=1e6)
    first = ask(made, "0")
    await until(lambda: len(embedder.calls) == 1)
    others = [ask(made, str(i), i) for i in range(1, 6)]
    await until(lambda: len(embedder.calls) == 2)
    assert embedder.calls == [["0"], ["1", "2", "3"]]
    for gate in embedder.gates:
        gate.set()
    # No call is in progress any more, so the last two searches do not wait for a third one.
    await until(lambda: len(embedder.calls) == 3)
    embedder.gates[-1].set()
    assert all(await asyncio.gather(first, *others))
    assert embedder.calls[2] == ["4", "5"]
    await made.aclose()


async def test_nobody_waits_for_others_longer_than_the_longest_wait():
    embedder = GatedEmbedder()
    made, _ = await searcher("a", embedder=embedder, batch=3, max_wait=0.0)
    asked = [ask(made, "0"), ask(made, "1", 1)]
    await until(lambda: len(embedder.calls) == 2)
    assert embedder.calls == [["0"], ["1"]]
    for gate in embedder.gates:
        gate.set()
    await asyncio.gather(*asked)
    await made.aclose()


async def test_equal_queries_share_an_embedding_and_not_a_result():
    embedder = GatedEmbedder()
    made, bank = await searcher(
        "go west", "go west now", embedder=CachedEmbedder(embedder, 8), batch=2
    )
    asked = [ask(made, "go west", group) for group in range(4)]
    await until(lambda: len(embedder.gates) == 1)
    await asyncio.sleep(0.01)
    embedder.gates[0].set()
    hits = [hit for (hit,) in await asyncio.gather(*asked) if hit]
    assert embedder.calls == [["go west"]]
    # The first retrieval is counted immediately, so the second search treats its entry as recent.
    assert [hit.text for hit in hits[:2]] == [
        "go west",
        "go west now",
    ]
    assert sum(one.retrieved for one in bank.entries.values()) == 4
    await made.aclose()


async def test_picks_are_made_in_the_order_of_the_searches_whatever_is_embedded_first():
    embedder = GatedEmbedder()
    made, bank = await searcher("a", "a b", embedder=embedder, batch=1)
    asked = [ask(made, "a", group) for group in range(3)]
    await until(lambda: len(embedder.gates) == 3)
    for gate in reversed(embedder.gates):
        gate.set()
        await asyncio.sleep(0)
    got = [hit.text for (hit,) in await asyncio.gather(*asked) if hit]
    alone, _ = await searcher("a", "a b")
    assert got == [
        hit.text
        for group in range(3)
        for hit in await alone.search([search("a", group=group)], 0, counted=True)
        if hit
    ]
    assert sorted(one.retrieved for one in bank.entries.values()) == [1, 2]
    await alone.aclose()
    await made.aclose()


async def test_an_embedder_that_fails_fails_those_who_asked_and_nobody_else():
    embedder = GatedEmbedder()
    made, _ = await searcher("a", embedder=embedder, batch=1)
    broken, whole = ask(made, "broken"), ask(made, "a", 1)
    await until(lambda: len(embedder.gates) == 2)
    for gate in embedder.gates:
        gate.set()
    with pytest.raises(OSError, match="the embedder is gone"):
        await broken
    assert await whole != [None]
    await made.aclose()


async def test_a_search_that_is_cancelled_counts_nothing():
    embedder = GatedEmbedder()
    made, bank = await searcher("a", embedder=embedder)
    asked = ask(made, "a")
    await until(lambda: len(embedder.gates) == 1)
    asked.cancel()
    embedder.gates[0].set()
    await made.aclose()
    assert asked.cancelled()
    assert bank.entries["a"].retrieved == 0
    assert not bank.take_counts()


async def test_searches_of_nothing_and_of_an_unknown_task_find_nothing():
    made, _ = await searcher("a")
    assert await made.search([], 0, counted=True) == []
    assert await made.search([search("a", name="maze")], 0, counted=True) == [None]
    await made.aclose()


async def test_what_needs_nothing_from_others_is_answered_without_leaving_the_callers_task():
    made, _ = await searcher("a", "a b")
    with pytest.raises(StopIteration) as answer:
        made.search([search("a")], 0, counted=True).send(None)
    assert all(answer.value.value)
    await made.aclose()


async def test_the_members_of_a_group_wait_for_nobody_once_the_first_has_its_pick():
    embedder = GatedEmbedder()
    made, bank = await searcher("a", embedder=embedder, max_wait=1e6)
    first, others = ask(made, "a", 7), ask(made, "a", 8)
    await until(lambda: len(embedder.gates) == 1)
    embedder.gates[0].set()
    hits = await first
    await until(lambda: len(embedder.gates) == 2)
    assert await ask(made, "a", 7) == hits
    assert not others.done()
    embedder.gates[1].set()
    assert await others == hits
    assert bank.entries["a"].retrieved == 2
    await made.aclose()


async def test_a_search_that_waits_alone_keeps_its_place_and_may_be_cancelled():
    """The second search receives its vector first and waits for the first search.

    When the first search is cancelled, the second one is answered, then the third one.
    """
    embedder = GatedEmbedder()
    made, bank = await searcher("a", "a b", embedder=embedder, batch=1)
    asked = [ask(made, "a", group) for group in range(3)]
    await until(lambda: len(embedder.gates) == 3)
    embedder.gates[1].set()
    await asyncio.sleep(0.01)
    assert not bank.take_counts()
    asked[0].cancel()
    (hit,) = await asked[1]
    assert hit is not None
    assert hit.text == "a"
    embedder.gates[2].set()
    (hit,) = await asked[2]
    assert hit is not None
    assert hit.text == "a b"
    await made.aclose()


SEARCHES = st.lists(
    st.tuples(
        st.sampled_from(["a", "a b", "b c", "x"]), st.integers(0, 5), st.booleans(), st.booleans()
    ),
    max_size=12,
)


@given(
    SEARCHES,
    st.integers(1, 4),
    st.sampled_from(["group", "rollout"]),
    st.randoms(use_true_random=False),
)
async def test_whatever_comes_together_is_picked_as_one_after_the_other(searches, batch, per, rng):
    """Each search is (query, group, counted, cancelled). The embeddings end in any order."""
    embedder, texts, picked, asked = (
        GatedEmbedder(),
        ("a", "a b", "b", "c b"),
        list[int](),
        list[asyncio.Task[list[Hit | None]]](),
    )
    made, bank = await searcher(*texts, embedder=CachedEmbedder(embedder, 2), batch=batch, per=per)
    plain, truth = await searcher(*texts, per=per)
    pick = bank.search
    bank.search = lambda request, *rest, **options: (
        picked.append(request.member),
        pick(request, *rest, **options),
    )[1]
    requests = [
        search(query, group=group, member=member)
        for member, (query, group, *_) in enumerate(searches)
    ]
    for request, (*_, counted, _) in zip(requests, searches, strict=True):
        asked.append(asyncio.create_task(made.search([request], 0, counted=counted)))
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        if embedder.gates and rng.random() < 0.5:
            rng.choice(embedder.gates).set()
    for task, (*_, cancelled) in zip(asked, searches, strict=True):
        if cancelled:
            task.cancel()
    opening = asyncio.create_task(embedder.open_all())
    results = await asyncio.gather(*asked, return_exceptions=True)
    await made.aclose()
    opening.cancel()

    assert picked == sorted(picked)
    for request, (*_, counted, cancelled), got in zip(requests, searches, results, strict=True):
        lost = isinstance(got, asyncio.CancelledError)
        assert cancelled or not lost
        if not lost or request.member in picked:  # may be cancelled after its pick
            (hit,) = await plain.search([request], 0, counted=counted)
            assert lost or got == [hit]
    assert bank.take_counts() == truth.take_counts()
    await plain.aclose()


async def test_a_text_that_cannot_be_embedded_fails_its_own_search_alone():
    embedder = GatedEmbedder()
    made, bank = await searcher("a", embedder=embedder, batch=3)
    first = ask(made, "0")
    await until(lambda: len(embedder.gates) == 1)
    asked = [ask(made, text, group) for group, text in enumerate(["a", "broken", "a b"], start=1)]
    await until(lambda: len(embedder.gates) == 2)
    embedder.gates[1].set()
    await until(lambda: len(embedder.gates) == 5)
    assert embedder.calls[1:] == [["a", "broken", "a b"], ["a"], ["broken"], ["a b"]]
    for gate in embedder.gates:
        gate.set()
    with pytest.raises(OSError, match="the embedder is gone"):
        await asked[1]
    assert all([await first, await asked[0], await asked[2]])
    assert bank.entries["a"].retrieved == 3
    await made.aclose()


async def test_a_search_for_several_counts_nothing_when_it_fails_for_one():
    embedder = GatedEmbedder()
    made, bank = await searcher("a", embedder=embedder)
    asked = asyncio.create_task(
        made.search([search("a"), search("broken", group=1)], 0, counted=True)
    )
    await until(lambda: len(embedder.gates) == 1)
    embedder.gates[0].set()
    await until(lambda: len(embedder.gates) == 3)
    for gate in embedder.gates:
        gate.set()
    with pytest.raises(OSError, match="the embedder is gone"):
        await asked
    assert not bank.take_counts()
    await made.aclose()


# ── large banks ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small_graphs(monkeypatch):
    """Lower the size limits of the index, so that a bank of more than 64 entries is a large one."""
    monkeypatch.setattr("crl.manager.index.GRAPH_FROM", 64)
    monkeypatch.setattr("crl.manager.index.TAIL", 16)
    monkeypatch.setattr("crl.manager.searching.THREADS_FROM", 64)


@pytest.mark.parametrize("exact", [True, False])
async def test_a_large_bank_answers_as_a_small_one_does(small_graphs, exact):
    texts = [f"go {i} {i // 2} {i // 4}" for i in range(400)]
    made, bank = await searcher(*texts, margin=0.0, exact=exact)
    await asyncio.gather(*made._builds)
    assert any(index._snapshot.graph for index in bank._indexes.values()) != exact
    hits = await asyncio.gather(
        *(made.search([search(text, group=i)], 0, counted=True) for i, text in enumerate(texts))
    )
    vectors = await WordEmbedder().embed(texts)
    best = (vectors @ vectors.T).max(axis=1)
    found = dict(zip(texts, vectors, strict=True))
    for (hit,), vector, similarity in zip(hits, vectors, best, strict=True):
        assert hit is not None
        assert found[hit.text] @ vector == pytest.approx(similarity, abs=1e-6)
    assert sum(one.retrieved for one in bank.entries.values()) == 400
    await made.aclose()


async def test_changes_take_effect_at_once_while_searches_and_builds_go_on(small_graphs):
    texts = [f"go {i}" for i in range(300)]
    made, bank = await searcher(*texts, margin=0.0, candidates=4)
    rng, group = random.Random(0), iter(range(10**6))
    alive, removed = set(texts), list[str]()

    async def reader() -> None:
        for _ in range(60):
            text, before = rng.choice(texts), len(removed)
            (hit,) = await made.search([search(text, group=next(group))], 0, counted=False)
            assert hit is not None
            assert hit.text not in removed[:before], "it was gone when this was asked"

    async def writer() -> None:
        for i in range(300, 420):
            vectors = await WordEmbedder().embed([f"go {i}"])
            gone = rng.choice(sorted(alive))
            await made.change([(entry(f"go {i}"), vectors[0])], [gone])
            alive.discard(gone)
            removed.append(gone)
            alive.add(f"go {i}")
            (hit,) = await made.search([search(f"go {i}", group=next(group))], 0, counted=False)
            assert hit is not None
            assert (await WordEmbedder().embed([hit.text]))[0] @ vectors[0] == pytest.approx(
                1.0, abs=1e-6
            )

    await asyncio.gather(writer(), *(reader() for _ in range(4)))
    assert set(bank.entries) == alive
    await made.aclose()


async def test_closing_answers_what_was_asked_and_stops_a_build(small_graphs, monkeypatch):
    monkeypatch.setattr("crl.manager.index.CHUNK", 1)
    made, _ = await searcher(*(f"go {i}" for i in range(2000)))
    asked = [ask(made, f"go {i}", i) for i in range(20)]
    await asyncio.sleep(0)
    await made.aclose()
    assert all(hit for (hit,) in await asyncio.gather(*asked))


async def test_searches_that_no_worker_can_be_found_for_fail_and_wait_for_nobody(small_graphs):
    made, _ = await searcher(*(f"go {i}" for i in range(100)), exact=True)
    made._workers.shutdown()
    with pytest.raises(RuntimeError, match="cannot schedule"):
        async with asyncio.timeout(60):
            await made.search([search("go 7")], 0, counted=True)
    await made.aclose()


async def test_a_worker_that_fails_fails_its_own_search_and_nothing_is_changed_under_the_others(
    small_graphs, monkeypatch
):
    made, _ = await searcher(*(f"go {i}" for i in range(100)), exact=True, batch=3)
    at_work, end, changed = threading.Event(), threading.Event(), list[bool]()
    nearest = Bank.nearest
    broken, slow = await WordEmbedder().embed(["broken", "slow"])

    def work(self: Bank, task: str, query: np.ndarray) -> list[Neighbour]:
        if np.array_equal(query, broken):
            raise MemoryError("no room")
        if np.array_equal(query, slow):
            at_work.set()
            end.wait(30)
            changed.append("go 0" not in self.entries)
        return nearest(self, task, query)

    monkeypatch.setattr(Bank, "nearest", work)
    asked = (
        asyncio.create_task(made.search([search("slow")], 0, counted=True)),
        ask(made, "broken", 1),
        ask(made, "go 7", 2),
    )
    await until(at_work.is_set)
    change = asyncio.create_task(made.change([], ["go 0"]))
    await asyncio.sleep(0.05)
    end.set()
    await change
    with pytest.raises(MemoryError, match="no room"):
        await asked[1]
    assert all([await asked[0], await asked[2]])
    assert changed == [False]
    await made.aclose()


async def test_an_index_that_cannot_be_built_loses_no_change_and_is_told_once(
    small_graphs, monkeypatch
):
    def fail(*_: object) -> bool:
        raise MemoryError("no room")

    monkeypatch.setattr(Build, "run", fail)
    texts = [f"go {i}" for i in range(400)]
    made, bank = await searcher(*texts)
    await asyncio.wait(made._builds)
    await made.change([(entry("new"), (await WordEmbedder().embed(["new"]))[0])])
    assert set(bank.entries) == {*texts, "new"}
    with pytest.raises(MemoryError, match="no room"):
        made.check()
    made.check()
    await made.aclose()

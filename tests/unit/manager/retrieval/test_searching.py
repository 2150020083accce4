"""Concurrent searches: batches of embeddings, order of results, changes of the bank, closing."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crl.config.schema import RetrievalSection
from crl.embedders.cached import CachedEmbedder
from crl.manager.records import Entry
from crl.manager.retrieval.entries import Bank
from crl.manager.retrieval.index import Build, Neighbour
from crl.manager.retrieval.searching import Searcher
from crl.protocols import Hit
from crl.types import Place, Provenance, Task
from support.doors import until
from support.managers import GOAL, WordEmbedder, search

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


async def open_searcher(
    *texts: str,
    embedder: WordEmbedder | CachedEmbedder | None = None,
    exact: bool = False,
    **settings,
) -> tuple[Searcher, Bank]:
    chosen = RetrievalSection(**{**ANY, **settings})
    bank = Bank(WordEmbedder.dim, "task", chosen, seed=0, exact=exact)
    searcher = Searcher(bank, embedder or WordEmbedder(), chosen)
    vectors = await WordEmbedder().embed(texts)
    await searcher.change(
        [(entry(text), vector) for text, vector in zip(texts, vectors, strict=True)]
    )
    return searcher, bank


def entry(text: str) -> Entry:
    return Entry(text, 1, text, Place("room", "goal"), Provenance(text, (0, 1)))


def start_search(
    searcher: Searcher, query: str, group: int = 0, *, counted: bool = True
) -> asyncio.Task[list[Hit | None]]:
    return asyncio.create_task(searcher.search([search(query, group=group)], 0, counted=counted))


# ── batches ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_single_search_starts_at_once_and_later_ones_share_a_batch():
    embedder = GatedEmbedder()
    searcher, _ = await open_searcher("a", embedder=embedder, batch=3, max_wait=1e6)
    first = start_search(searcher, "0")
    await until(lambda: len(embedder.calls) == 1)
    others = [start_search(searcher, str(i), i) for i in range(1, 6)]
    await until(lambda: len(embedder.calls) == 2)
    assert embedder.calls == [["0"], ["1", "2", "3"]]
    for gate in embedder.gates:
        gate.set()
    # No call is in progress any more, so the last two searches do not wait for a third one.
    await until(lambda: len(embedder.calls) == 3)
    embedder.gates[-1].set()
    assert all(await asyncio.gather(first, *others))
    assert embedder.calls[2] == ["4", "5"]
    await searcher.aclose()


async def test_no_search_waits_longer_than_max_wait():
    embedder = GatedEmbedder()
    searcher, _ = await open_searcher("a", embedder=embedder, batch=3, max_wait=0.0)
    asked = [start_search(searcher, "0"), start_search(searcher, "1", 1)]
    await until(lambda: len(embedder.calls) == 2)
    assert embedder.calls == [["0"], ["1"]]
    for gate in embedder.gates:
        gate.set()
    await asyncio.gather(*asked)
    await searcher.aclose()


async def test_equal_queries_share_an_embedding_but_not_a_result():
    embedder = GatedEmbedder()
    searcher, bank = await open_searcher(
        "go west", "go west now", embedder=CachedEmbedder(embedder, 8), batch=2
    )
    asked = [start_search(searcher, "go west", group) for group in range(4)]
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
    assert sum(one.counters.retrieved for one in bank.entries.values()) == 4
    await searcher.aclose()


async def test_picks_follow_the_order_of_the_searches():
    embedder = GatedEmbedder()
    searcher, bank = await open_searcher("a", "a b", embedder=embedder, batch=1)
    asked = [start_search(searcher, "a", group) for group in range(3)]
    await until(lambda: len(embedder.gates) == 3)
    for gate in reversed(embedder.gates):
        gate.set()
        await asyncio.sleep(0)
    got = [hit.text for (hit,) in await asyncio.gather(*asked) if hit]
    alone, _ = await open_searcher("a", "a b")
    assert got == [
        hit.text
        for group in range(3)
        for hit in await alone.search([search("a", group=group)], 0, counted=True)
        if hit
    ]
    assert sorted(one.counters.retrieved for one in bank.entries.values()) == [1, 2]
    await alone.aclose()
    await searcher.aclose()


async def test_an_embedder_error_fails_only_its_own_search():
    embedder = GatedEmbedder()
    searcher, _ = await open_searcher("a", embedder=embedder, batch=1)
    broken, whole = start_search(searcher, "broken"), start_search(searcher, "a", 1)
    await until(lambda: len(embedder.gates) == 2)
    for gate in embedder.gates:
        gate.set()
    with pytest.raises(OSError, match="the embedder is gone"):
        await broken
    assert await whole != [None]
    await searcher.aclose()


async def test_a_cancelled_search_counts_nothing():
    embedder = GatedEmbedder()
    searcher, bank = await open_searcher("a", embedder=embedder)
    asked = start_search(searcher, "a")
    await until(lambda: len(embedder.gates) == 1)
    asked.cancel()
    embedder.gates[0].set()
    await searcher.aclose()
    assert asked.cancelled()
    assert bank.entries["a"].counters.retrieved == 0
    assert not bank.take_counts()


async def test_searches_without_requests_or_of_an_unknown_task_find_nothing():
    searcher, _ = await open_searcher("a")
    assert await searcher.search([], 0, counted=True) == []
    assert await searcher.search([search("a", name="maze")], 0, counted=True) == [None]
    await searcher.aclose()


async def test_a_search_that_need_not_wait_runs_in_the_callers_task():
    searcher, _ = await open_searcher("a", "a b")
    with pytest.raises(StopIteration) as answer:
        searcher.search([search("a")], 0, counted=True).send(None)
    assert all(answer.value.value)
    await searcher.aclose()


async def test_group_members_do_not_wait_once_the_first_has_its_pick():
    embedder = GatedEmbedder()
    searcher, bank = await open_searcher("a", embedder=embedder, max_wait=1e6)
    first, others = start_search(searcher, "a", 7), start_search(searcher, "a", 8)
    await until(lambda: len(embedder.gates) == 1)
    embedder.gates[0].set()
    hits = await first
    await until(lambda: len(embedder.gates) == 2)
    assert await start_search(searcher, "a", 7) == hits
    assert not others.done()
    embedder.gates[1].set()
    assert await others == hits
    assert bank.entries["a"].counters.retrieved == 2
    await searcher.aclose()


async def test_a_cancelled_search_does_not_block_later_ones():
    """Cancel the first search.

    The second search received its vector first and waits for the first search. Then the second one
    is answered, then the third one.
    """
    embedder = GatedEmbedder()
    searcher, bank = await open_searcher("a", "a b", embedder=embedder, batch=1)
    asked = [start_search(searcher, "a", group) for group in range(3)]
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
    await searcher.aclose()


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
async def test_concurrent_searches_give_the_same_picks_as_sequential_ones(
    searches, batch, per, rng
):
    """Draw each search as (query, group, counted, cancelled). The embeddings end in any order."""
    embedder, texts, picked, asked = (
        GatedEmbedder(),
        ("a", "a b", "b", "c b"),
        list[int](),
        list[asyncio.Task[list[Hit | None]]](),
    )
    searcher, bank = await open_searcher(
        *texts, embedder=CachedEmbedder(embedder, 2), batch=batch, per=per
    )
    plain, truth = await open_searcher(*texts, per=per)
    pick = bank.search_several
    bank.search_several = lambda request, *rest, **options: (
        picked.append(request.member),
        pick(request, *rest, **options),
    )[1]
    requests = [
        search(query, group=group, member=member)
        for member, (query, group, *_) in enumerate(searches)
    ]
    for request, (*_, counted, _) in zip(requests, searches, strict=True):
        asked.append(asyncio.create_task(searcher.search([request], 0, counted=counted)))
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        if embedder.gates and rng.random() < 0.5:
            rng.choice(embedder.gates).set()
    for task, (*_, cancelled) in zip(asked, searches, strict=True):
        if cancelled:
            task.cancel()
    opening = asyncio.create_task(embedder.open_all())
    results = await asyncio.gather(*asked, return_exceptions=True)
    await searcher.aclose()
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


async def test_a_text_that_cannot_be_embedded_fails_only_its_own_search():
    embedder = GatedEmbedder()
    searcher, bank = await open_searcher("a", embedder=embedder, batch=3)
    first = start_search(searcher, "0")
    await until(lambda: len(embedder.gates) == 1)
    asked = [
        start_search(searcher, text, group)
        for group, text in enumerate(["a", "broken", "a b"], start=1)
    ]
    await until(lambda: len(embedder.gates) == 2)
    embedder.gates[1].set()
    await until(lambda: len(embedder.gates) == 5)
    assert embedder.calls[1:] == [["a", "broken", "a b"], ["a"], ["broken"], ["a b"]]
    for gate in embedder.gates:
        gate.set()
    with pytest.raises(OSError, match="the embedder is gone"):
        await asked[1]
    assert all([await first, await asked[0], await asked[2]])
    assert bank.entries["a"].counters.retrieved == 3
    await searcher.aclose()


async def test_a_search_with_one_failed_request_counts_nothing():
    embedder = GatedEmbedder()
    searcher, bank = await open_searcher("a", embedder=embedder)
    asked = asyncio.create_task(
        searcher.search([search("a"), search("broken", group=1)], 0, counted=True)
    )
    await until(lambda: len(embedder.gates) == 1)
    embedder.gates[0].set()
    await until(lambda: len(embedder.gates) == 3)
    for gate in embedder.gates:
        gate.set()
    with pytest.raises(OSError, match="the embedder is gone"):
        await asked
    assert not bank.take_counts()
    await searcher.aclose()


# ── large banks ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small_graphs(monkeypatch):
    """Lower the size limits of the index, so that a bank of more than 64 entries is a large one."""
    monkeypatch.setattr("crl.manager.retrieval.index.MAX_EXACT_ROWS", 64)
    monkeypatch.setattr("crl.manager.retrieval.index.MIN_TAIL_ROWS", 16)
    monkeypatch.setattr("crl.manager.retrieval.searching.THREADS_FROM", 64)


@pytest.mark.parametrize("exact", [True, False])
async def test_a_large_bank_gives_the_same_answers_as_a_small_one(small_graphs, exact):
    texts = [f"go {i} {i // 2} {i // 4}" for i in range(400)]
    searcher, bank = await open_searcher(*texts, margin=0.0, exact=exact)
    await asyncio.gather(*searcher._builds)
    assert any(index._snapshot.graph for index in bank._indexes.values()) != exact
    hits = await asyncio.gather(
        *(searcher.search([search(text, group=i)], 0, counted=True) for i, text in enumerate(texts))
    )
    vectors = await WordEmbedder().embed(texts)
    best = (vectors @ vectors.T).max(axis=1)
    found = dict(zip(texts, vectors, strict=True))
    for (hit,), vector, similarity in zip(hits, vectors, best, strict=True):
        assert hit is not None
        assert found[hit.text] @ vector == pytest.approx(similarity, abs=1e-6)
    assert sum(one.counters.retrieved for one in bank.entries.values()) == 400
    await searcher.aclose()


async def test_variations_of_a_large_bank_are_searched_apart(small_graphs):
    bank = Bank(WordEmbedder.dim, "variation", RetrievalSection(min_similarity=-1.0), seed=0)
    (vector,) = await WordEmbedder().embed(["go"])
    for i in range(200):
        place = Place("room", GOAL, str(i % 2))
        bank.put(Entry(f"m{i}", 1, "go", place, Provenance("g", (0, 1))), vector)
    searcher = Searcher(bank, WordEmbedder(), bank._settings)
    plain = search("go")
    requests = [
        replace(plain, group=i, task=replace(plain.task, params={"variation": i})) for i in (0, 1)
    ]
    hits = await searcher.search(requests, 0, counted=True)
    assert [hit and int(hit.use.uid[1:]) % 2 for hit in hits] == [0, 1]
    await searcher.aclose()


async def test_changes_take_effect_immediately_during_searches_and_builds(small_graphs):
    texts = [f"go {i}" for i in range(300)]
    searcher, bank = await open_searcher(*texts, margin=0.0, candidates=4)
    rng, group = random.Random(0), iter(range(10**6))
    alive, removed = set(texts), list[str]()

    async def reader() -> None:
        for _ in range(60):
            text, before = rng.choice(texts), len(removed)
            (hit,) = await searcher.search([search(text, group=next(group))], 0, counted=False)
            assert hit is not None
            assert hit.text not in removed[:before], "the entry was removed before the search"

    async def writer() -> None:
        for i in range(300, 420):
            vectors = await WordEmbedder().embed([f"go {i}"])
            gone = rng.choice(sorted(alive))
            await searcher.change([(entry(f"go {i}"), vectors[0])], [gone])
            alive.discard(gone)
            removed.append(gone)
            alive.add(f"go {i}")
            (hit,) = await searcher.search([search(f"go {i}", group=next(group))], 0, counted=False)
            assert hit is not None
            assert (await WordEmbedder().embed([hit.text]))[0] @ vectors[0] == pytest.approx(
                1.0, abs=1e-6
            )

    await asyncio.gather(writer(), *(reader() for _ in range(4)))
    assert set(bank.entries) == alive
    await searcher.aclose()


async def test_closing_answers_open_searches_and_stops_a_build(small_graphs, monkeypatch):
    monkeypatch.setattr("crl.manager.retrieval.index.BUILD_CHUNK_ROWS", 1)
    searcher, _ = await open_searcher(*(f"go {i}" for i in range(2000)))
    asked = [start_search(searcher, f"go {i}", i) for i in range(20)]
    await asyncio.sleep(0)
    await searcher.aclose()
    assert all(hit for (hit,) in await asyncio.gather(*asked))


async def test_searches_fail_immediately_without_worker_threads(small_graphs):
    searcher, _ = await open_searcher(*(f"go {i}" for i in range(100)), exact=True)
    searcher._workers.shutdown()
    with pytest.raises(RuntimeError, match="cannot schedule"):
        async with asyncio.timeout(60):
            await searcher.search([search("go 7")], 0, counted=True)
    await searcher.aclose()


async def test_a_worker_error_fails_only_its_search_and_changes_wait_for_the_others(
    small_graphs, monkeypatch
):
    searcher, _ = await open_searcher(*(f"go {i}" for i in range(100)), exact=True, batch=3)
    at_work, end, changed = threading.Event(), threading.Event(), list[bool]()
    nearest = Bank.nearest
    broken, slow = await WordEmbedder().embed(["broken", "slow"])

    def work(self: Bank, task: Task, query: np.ndarray) -> list[Neighbour]:
        if np.array_equal(query, broken):
            raise MemoryError("no room")
        if np.array_equal(query, slow):
            at_work.set()
            end.wait(30)
            changed.append("go 0" not in self.entries)
        return nearest(self, task, query)

    monkeypatch.setattr(Bank, "nearest", work)
    asked = (
        asyncio.create_task(searcher.search([search("slow")], 0, counted=True)),
        start_search(searcher, "broken", 1),
        start_search(searcher, "go 7", 2),
    )
    await until(at_work.is_set)
    change = asyncio.create_task(searcher.change([], ["go 0"]))
    await asyncio.sleep(0.05)
    end.set()
    await change
    with pytest.raises(MemoryError, match="no room"):
        await asked[1]
    assert all([await asked[0], await asked[2]])
    assert changed == [False]
    await searcher.aclose()


async def test_a_failed_index_build_loses_no_change_and_is_raised_once(small_graphs, monkeypatch):
    def fail(*_: object) -> bool:
        raise MemoryError("no room")

    monkeypatch.setattr(Build, "run", fail)
    texts = [f"go {i}" for i in range(400)]
    searcher, bank = await open_searcher(*texts)
    await asyncio.wait(searcher._builds)
    await searcher.change([(entry("new"), (await WordEmbedder().embed(["new"]))[0])])
    assert set(bank.entries) == {*texts, "new"}
    with pytest.raises(MemoryError, match="no room"):
        searcher.check()
    searcher.check()
    await searcher.aclose()

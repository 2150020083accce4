"""Retrieval: the choice among similar entries, the index, the hashing embedder, bank searches.

The scores of the choice are checked with numbers worked by hand.
"""

from __future__ import annotations

import math
import random
import threading
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crl.algo.experience import success_score
from crl.config.schema import RetrievalSection, Scope
from crl.embedders.hash import HashEmbedder
from crl.envs.actions import COMPASS
from crl.envs.places import FIXED_NAMES, PLACE_NAMES
from crl.envs.room import GOAL as ROOM_GOAL
from crl.envs.room.lessons import LESSONS, lesson
from crl.manager.keys import KeyEmbedder
from crl.manager.records import Entry
from crl.manager.retrieval.choice import (
    SIMILARITY_TOLERANCE,
    Candidate,
    choose_entries,
    is_trial,
)
from crl.manager.retrieval.entries import Bank
from crl.manager.retrieval.index import MIN_TAIL_ROWS, Index
from crl.manager.retrieval.policies.diverse import diverse_scores
from crl.types import Counters, Place, Provenance
from support.managers import GOAL, WordEmbedder, search


def entry(uid: str, **fields) -> Entry:
    return Entry(
        uid,
        fields.pop("version", 1),
        fields.pop("text", uid),
        Place(fields.pop("task", "room"), fields.pop("goal", "goal"), fields.pop("variation", "")),
        Provenance(uid, (0, 1), reward=fields.pop("reward", None)),
        counters=Counters(**fields),
    )


def candidates(*similarities: float, **fields) -> list[Candidate]:
    return [
        Candidate(entry(f"m{i}", **fields), similarity) for i, similarity in enumerate(similarities)
    ]


def picked(
    found: list[Candidate], step: int = 10, seed: int = 0, *, trial: bool = False, **settings
) -> str | None:
    chosen = choose_entries(
        found, step, lambda: random.Random(seed), RetrievalSection(**settings), trial=trial
    )
    return chosen[0].uid if chosen else None


# ── eq. 6 in context ──────────────────────────────────────────────────────────────────────────────


def test_equation_6_on_worked_numbers():
    # m0: rank 0, c = 11, retrieved in this step: −0 − 0.4·log 12 − 1 = −1.99396
    # m1: rank 1, c = 1: −1 − 0.4·log 2 = −1.27726
    # m2: rank 2, c = 0: −2
    found = candidates(0.95, 0.94, 0.93)
    found[0].entry.counters = Counters(retrieved=11, last_returned_step=10)
    found[1].entry.counters = Counters(retrieved=1, last_returned_step=9)
    settings = RetrievalSection(count_penalty=0.4, recent_steps=1)
    assert list(diverse_scores(found[:2], 10, settings)) == pytest.approx(
        [-1.993963, -1.277259], abs=1e-6
    )
    assert list(diverse_scores(found[2:], 10, settings)) == [0.0]
    assert len(list(diverse_scores(found, 10, settings))) == 2  # no score at rank 2 is above −2
    assert picked(found) == "m1"
    # Now m1 is recent too and has the score −2.277, so m0 has the best score of the three.
    assert picked(found, recent_steps=2) == "m0"
    assert picked(found, recent_steps=0, count_penalty=0.0) == "m0"


def test_a_retrieval_at_a_future_step_is_not_recent():
    found = candidates(0.95, 0.94)
    found[0].entry.counters = Counters(last_returned_step=11)
    assert list(diverse_scores(found, 10, RetrievalSection())) == [0]  # the best possible score


def test_equal_similarities_share_a_rank_and_ties_are_random():
    found = candidates(0.9, 0.9 - 1e-8, 0.9 - 2e-8)
    assert list(diverse_scores(found, 0, RetrievalSection())) == [0, 0, 0]
    drawn = {picked(found, seed=seed) for seed in range(20)}
    assert drawn == {"m0", "m1", "m2"}
    assert picked(found, seed=3) == picked(found, seed=3)


@pytest.mark.parametrize("choice", ["credit", "diverse"])
def test_several_entries_are_the_best_ones_without_repetition(choice: str):
    found = candidates(0.95, 0.94, 0.93, 0.5)
    for candidate, (credited, credit) in zip(found, [(4, 0), (4, 4), (4, 2), (4, 4)], strict=True):
        candidate.entry.counters = Counters(credited=credited, credit=credit)
    by_hand = {"credit": ["m1", "m2", "m0"], "diverse": ["m0", "m1", "m2"]}[choice]
    settings = RetrievalSection(choice=choice, margin=0.1)
    for count in (1, 2, 3, 4):
        chosen = choose_entries(found, 10, lambda: random.Random(0), settings, count=count)
        assert [entry.uid for entry in chosen] == by_hand[:count]


@pytest.mark.parametrize("choice", ["diverse", "credit", "reward"])
def test_the_order_of_equally_similar_candidates_changes_nothing(choice: str):
    """A resumed run rebuilds the index, which may return them in another order."""
    found = [*candidates(0.9), *candidates(*[0.5] * 5)[1:]]
    for seed in range(10):
        settings = RetrievalSection(choice=choice, margin=1.0, min_similarity=0.0)
        one, other = (
            choose_entries(order, 10, partial(random.Random, seed), settings, count=3)
            for order in (found, [found[0], *reversed(found[1:])])
        )
        assert one == other


def test_ties_among_several_entries_are_random():
    found = candidates(0.9, 0.9, 0.9, 0.9)
    settings = RetrievalSection(choice="credit")
    drawn = {
        tuple(e.uid for e in choose_entries(found, 0, partial(random.Random, s), settings, count=2))
        for s in range(40)
    }
    assert {len(set(pair)) for pair in drawn} == {2}
    assert len(drawn) > 6


FOUND = st.lists(
    st.tuples(
        st.sampled_from([0.9, 0.9 - 1e-7, 0.9 - 2e-6, 0.88, 0.86, 0.5]),
        st.integers(0, 40),
        st.none() | st.integers(8, 12),
    ),
    max_size=16,
)


@given(
    FOUND,
    st.sampled_from([0.0, 0.1, 0.4, 2.0]),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.05, 2.0]),
    st.integers(0, 9),
)
def test_the_pick_has_the_highest_score_of_equation_6(
    found, count_penalty, recent_steps, margin, seed
):
    ordered = sorted(found, key=lambda one: -one[0])
    entries = [
        entry(f"m{i}", retrieved=count, last_returned_step=last)
        for i, (_, count, last) in enumerate(ordered)
    ]
    scores = {}
    for (similarity, count, last), one in zip(ordered, entries, strict=True):
        if similarity >= ordered[0][0] - margin - SIMILARITY_TOLERANCE:
            rank = sum(-other < -similarity - SIMILARITY_TOLERANCE for other, *_ in ordered)
            recent = last is not None and 0 <= 10 - last < recent_steps
            scores[one.uid] = -float(rank) - count_penalty * math.log1p(count) - float(recent)
    tied = [uid for uid, score in scores.items() if score == max(scores.values())]
    candidates = [
        Candidate(one, similarity) for one, (similarity, *_) in zip(entries, ordered, strict=True)
    ]
    assert picked(
        candidates,
        seed=seed,
        count_penalty=count_penalty,
        recent_steps=recent_steps,
        margin=margin,
        min_similarity=0.0,
    ) in (tied or [None])


def test_entries_outside_the_margin_are_never_picked():
    found = candidates(0.9, 0.84)
    found[0].entry.counters = Counters(retrieved=10**6, last_returned_step=10)
    assert picked(found, margin=0.05) == "m0"
    assert picked(found, margin=0.07) == "m1"


def test_entries_below_min_similarity_are_never_picked():
    assert picked(candidates(0.29), min_similarity=0.3) is None
    assert picked([], min_similarity=0.0) is None
    found = candidates(0.31, 0.29)
    found[0].entry.counters = Counters(retrieved=10**6)
    assert picked(found, min_similarity=0.3, margin=0.1) == "m0"


# ── choice = credit ───────────────────────────────────────────────────────────────────────────────


def test_the_score_of_a_record_on_worked_numbers():
    # untried: 0.3; won 3 of 4: 3.3 / 5; won 0 of 1: 0.3 / 2
    assert [success_score(0, 0.0), success_score(4, 2.0), success_score(1, -1.0)] == pytest.approx(
        [0.3, 0.66, 0.15]
    )


def records() -> list[Candidate]:
    return [
        Candidate(entry("half", credited=2, credit=0.0, retrieved=2), 0.95),
        Candidate(entry("good", credited=4, credit=2.0, retrieved=4), 0.94),
        Candidate(entry("new"), 0.93),
        Candidate(entry("perfect but elsewhere", credited=9, credit=9.0), 0.5),
    ]


def test_the_policy_reward_prefers_the_best_episode() -> None:
    """EMPO², Listing 1: the score is stored with a tip; its own record does not count."""
    rewards = {"lost": 0.0, "unknown": None, "half": 0.5, "won": 1.0}
    found = [
        Candidate(entry(uid, reward=reward, credited=9, credit=9.0 if uid == "lost" else -9.0), 0.9)
        for uid, reward in rewards.items()
    ]
    settings = RetrievalSection(choice="reward", margin=0.1)
    chosen = choose_entries(found, 0, partial(random.Random, 0), settings, count=2)
    assert [each.uid for each in chosen] == ["won", "half"]
    assert picked(found, choice="reward", trial=True) == "won", "no trials"


def test_credit_picks_the_best_record_whatever_its_rank():
    found = records()
    assert picked(found, choice="credit") == "good"
    assert picked([found[0], found[2]], choice="credit") == "half"  # 1.3 / 3 against 0.3
    lost = Candidate(entry("lost", credited=1, credit=-1.0), 0.95)
    assert picked([lost, found[2]], choice="credit") == "new"


def test_a_trial_picks_the_least_retrieved_entry():
    found = records()
    assert picked(found, choice="credit", trial=True) == "new"
    assert picked(found[:2], choice="credit", trial=True) == "half"


@pytest.mark.parametrize(
    ("share", "phase", "trials"),
    [
        (0.0, 0.9, []), (0.25, 0.0, [3, 7]), (0.25, 0.75, [0, 4]),
        (0.5, 0.0, [1, 3, 5, 7]), (0.5, 0.5, [0, 2, 4, 6]),
        (0.75, 0.0, [1, 2, 3, 5, 6, 7]), (1.0, 0.3, [*range(8)]),
    ],
)  # fmt: skip
def test_trials_are_spread_evenly(share: float, phase: float, trials: list[int]):
    assert [index for index in range(8) if is_trial(index, share, phase)] == trials


@pytest.mark.parametrize("per", ["rollout", "group"])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_every_task_has_its_share_of_trials(per: Literal["rollout", "group"], share: float):
    bank = Bank(2, "shared", RetrievalSection(choice="credit", per=per, trial_share=share), seed=0)
    for task in ("room", "maze"):
        requests = [
            search("q", name=task, group=2 * group, member=m)
            for group in range(500)
            for m in range(4)
        ]
        met = sum(bank._is_trial(request) for request in requests) / len(requests)
        assert met == pytest.approx(share, abs=0.05)


def a_place_with_records() -> Bank:
    bank = Bank(
        2, "task", RetrievalSection(choice="credit", per="rollout", trial_share=0.5), seed=0
    )
    bank.put(entry("proven", credited=8, credit=6.0, retrieved=8), np.array([1, 0], np.float32))
    for number in range(3):
        bank.put(entry(f"untried {number}"), np.array([1, 0], np.float32))
    return bank


def test_half_of_the_guided_members_make_trials():
    bank = a_place_with_records()
    found = [
        bank.search(search("q", group=3, member=m), np.array([1, 0], np.float32), 0, counted=True)
        for m in range(4)
    ]
    texts = [hit.text for hit in found if hit]
    leaders = [member for member, text in enumerate(texts) if text == "proven"]
    assert leaders in ([0, 2], [1, 3])
    assert len(set(texts)) == 3


def test_evaluations_and_questions_make_no_trials():
    bank, query = a_place_with_records(), np.array([1, 0], np.float32)
    for member in range(4):
        evaluated = bank.search(search("q", group=3, member=member), query, 0, counted=False)
        asked = bank.search(
            replace(search("q", group=3, member=member), question=1), query, 0, counted=True
        )
        assert [hit.text for hit in (evaluated, asked) if hit] == ["proven", "proven"]


def test_some_groups_that_share_an_entry_make_trials():
    bank = a_place_with_records()
    bank._settings = bank._settings.model_copy(update={"per": "group"})
    query, texts = np.array([1, 0], np.float32), []
    for group in range(20):
        hits = [
            bank.search(search("q", group=group, member=member), query, 0, counted=True)
            for member in range(2)
        ]
        assert hits[0] == hits[1]
        texts.append(hits[0].text if hits[0] else None)
    assert 4 <= texts.count("proven") <= 16
    assert {"untried 0", "untried 1", "untried 2"} <= set(texts)


# ── the index ─────────────────────────────────────────────────────────────────────────────────────


def unit(rng: np.random.Generator, n: int, dim: int = 8) -> np.ndarray:
    rows = rng.normal(size=(n, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


CHANGES = st.lists(
    st.tuples(st.sampled_from(["put", "put", "remove", "begin", "swap"]), st.integers(0, 30)),
    max_size=80,
)


@given(CHANGES, st.integers(1, 8), st.integers(0, 99), st.booleans())
def test_the_index_agrees_with_an_exhaustive_sort(small_index, changes, k, seed, exact):
    """Build and swap in graph snapshots between searches, after any number of changes."""
    rng = np.random.default_rng(seed)
    index, truth, build = Index(8, exact=exact), {}, None
    for change, number in changes:
        if change == "put":
            truth.pop(f"m{number}", None)
            truth[f"m{number}"] = unit(rng, 1)[0]
            index.put(f"m{number}", truth[f"m{number}"])
        elif change == "remove":
            truth.pop(f"m{number}", None)
            index.remove(f"m{number}")
        elif change == "begin" and index.needs_rebuild:
            build = index.begin_build()
        elif change == "swap" and build:
            assert build.run(threading.Event())
            index.swap(build)
            build = None
        query = unit(rng, 1)[0]
        best = sorted(truth, key=lambda uid: -float(truth[uid] @ query))[:k]
        found = index.nearest(query, k)
        assert [neighbour.uid for neighbour in found] == best
        assert [neighbour.similarity for neighbour in found] == pytest.approx(
            [float(truth[uid] @ query) for uid in best], abs=1e-5
        )
    assert len(index) == len(truth)


@pytest.fixture(scope="module")
def small_index():
    """Lower the tail length and the minimum graph size, so that snapshots occur."""
    patch = pytest.MonkeyPatch()
    patch.setattr("crl.manager.retrieval.index.MIN_TAIL_ROWS", 4)
    patch.setattr("crl.manager.retrieval.index.MAX_EXACT_ROWS", 6)
    yield
    patch.undo()


@pytest.mark.parametrize("size", [3000, pytest.param(100_000, marks=pytest.mark.soak)])
async def test_the_graph_agrees_with_an_exhaustive_search(monkeypatch, size):
    """Use lessons about named places, 16 lessons per place.

    Replace a tenth of the lessons and remove a tenth after the graph was built.
    """
    monkeypatch.setattr("crl.manager.retrieval.index.MAX_EXACT_ROWS", 1000)
    rng = random.Random(0)
    goals = [
        ROOM_GOAL.format(place=f"{place} {i}")
        for i in range(size // 16 // 64 + 1)
        for place in PLACE_NAMES[:64]
    ]
    texts = [
        f"{rng.choice(goals)} {rng.choice(LESSON_TEXTS)} {rng.choice(LESSON_TEXTS)}"
        for _ in range(size)
    ]
    keys = await HashEmbedder().embed(texts)
    exact, graph = Index(keys.shape[1], exact=True), Index(keys.shape[1])
    for index in (exact, graph):
        for i in range(size):
            index.put(f"m{i}", keys[i])
        if index is graph:
            build = index.begin_build()
            assert build.run(threading.Event())
            index.swap(build)
        for i in range(0, size, 10):
            index.put(f"m{i}", keys[i - 1])
            index.remove(f"m{i + 5}")
    assert graph._snapshot.graph is not None
    queries = await HashEmbedder().embed(rng.sample(goals, 100) + rng.sample(texts, 100))
    recall = np.zeros((200, 2))
    for row, query in zip(recall, queries, strict=True):
        assert graph._search_graph(query, 10) is not None
        best, found = ([n.similarity for n in index.nearest(query, 10)] for index in (exact, graph))
        # A neighbour with an equal similarity counts as a hit.
        row[:] = (
            found[0] >= best[0] - 1e-6,
            np.mean(np.array(found) >= best[-1] - 1e-6),
        )
    at_1, at_10 = recall.mean(axis=0)
    assert at_1 >= 0.99
    assert at_10 >= 0.98


def test_a_stopped_build_changes_nothing(small_index):
    index, stop = Index(8), threading.Event()
    for i in range(40):
        index.put(f"m{i}", unit(np.random.default_rng(i), 1)[0])
    stop.set()
    assert not index.begin_build().run(stop)
    assert len(index.nearest(unit(np.random.default_rng(0), 1)[0], 99)) == 40


def test_equal_similarities_are_returned_in_insertion_order():
    index = Index(2)
    for i in range(3 * MIN_TAIL_ROWS):
        index.put(f"m{i}", np.array([1, 0], np.float32))
    index.put("m1", np.array([1, 0], np.float32))  # put again, so it is the newest
    assert [n.uid for n in index.nearest(np.array([1, 0], np.float32), 3)] == ["m0", "m2", "m3"]


def test_the_newest_of_equal_accepted_entries_is_the_first():
    """The last bits of a similarity do not count."""
    index, east = Index(2), np.array([1, 0], np.float32)
    for i, x in enumerate((1, 0.9999999, 1, 0.5, 1)):
        index.put(f"m{i}", np.array([x, 0], np.float32))
    index.remove("m4")
    found = index.nearest(east, 9, lambda uid: uid != "m2")
    assert [neighbour.uid for neighbour in found] == ["m1", "m0", "m3"]
    assert [neighbour.uid for neighbour in index.nearest(east, 1, lambda uid: True)] == ["m2"]


def test_a_vector_of_another_dimension_is_refused():
    with pytest.raises(ValueError, match=r"\(3,\) does not fit an index of dimension 2"):
        Index(2).put("m", np.zeros(3, np.float32))


# ── the hashing embedder ──────────────────────────────────────────────────────────────────────────


async def test_the_hash_embedder_is_unit_norm_and_tells_places_apart():
    embedder = HashEmbedder()
    texts = [
        "the azure cellar: go west",
        "the azure cellar: go east first",
        "the crimson attic: go west",
        "",
        "a",
    ]
    vectors = await embedder.embed(texts)
    assert vectors.dtype == np.float32
    assert vectors.shape == (5, embedder.dim) == (5, 384)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(5), abs=1e-6)
    query = (await embedder.embed(["the azure cellar"]))[0]
    similarities = vectors @ query
    assert min(similarities[:2]) > similarities[2] + 0.1
    assert np.array_equal(await HashEmbedder().embed(texts), vectors)
    assert (await embedder.embed([])).shape == (0, 384)


LESSON_TEXTS = [
    lesson(kind, direction)
    for kind, text in LESSONS.items()
    for direction in (COMPASS if "{" in text else [""])
]
# Neighbouring names are the most similar ones.
ROOM_GOALS = [
    ROOM_GOAL.format(place=place) for names in (FIXED_NAMES, PLACE_NAMES) for place in names[:32]
]


async def keyed(weight: float | None, entries: list[tuple[str, str]]) -> np.ndarray:
    return await KeyEmbedder(HashEmbedder(), weight).embed(entries)


@pytest.mark.parametrize("weight", [0.0, 0.1, 0.25])
async def test_with_goals_in_the_keys_lessons_are_nearest_to_their_own_place(
    weight,
):
    queries = await HashEmbedder().embed(ROOM_GOALS)
    keys = np.stack(
        [await keyed(weight, [(goal, text) for goal in ROOM_GOALS]) for text in LESSON_TEXTS]
    )
    assert np.linalg.norm(keys, axis=2) == pytest.approx(1.0, abs=1e-6)
    similarities = keys @ queries.T  # [lesson, its goal, query]
    own = similarities.diagonal(axis1=1, axis2=2)
    others = np.where(np.eye(len(ROOM_GOALS), dtype=bool), -1, similarities).max(axis=(0, 1))
    assert (own.min(axis=0) > others + 0.01).all()
    assert own.min() >= math.sqrt(1 - weight**2) - 1e-5  # the bound that `KeyEmbedder` guarantees


async def test_settings_for_tiny_models_separate_the_lessons_of_places():
    """Check the settings w = 0.1, margin = 0.01 and min_similarity = 0.994.

    They work for any text. The cosine of two goals is at most 0.977, and w turns a key by at most
    asin 0.1, therefore cos(acos 0.977 − asin 0.1) < 0.994 < √(1 − 0.1²).
    """
    goals = [
        ROOM_GOAL.format(place=place + again)
        for place in FIXED_NAMES + PLACE_NAMES
        for again in ("", " 2")
    ]
    vectors = await HashEmbedder().embed(goals)
    alike = (vectors @ vectors.T - 2 * np.eye(len(goals), dtype=np.float32)).max()
    assert alike < 0.977
    assert math.cos(math.acos(0.977) - math.asin(0.1)) < 0.994 < math.sqrt(1 - 0.1**2)
    assert 1 - math.sqrt(1 - 0.1**2) < 0.01


async def test_without_goals_a_key_is_the_embedding_of_the_text():
    assert np.array_equal(
        await keyed(None, [("goal", text) for text in LESSON_TEXTS]),
        await HashEmbedder().embed(LESSON_TEXTS),
    )
    with pytest.raises(ValueError, match=r"text_weight must not be negative, not -0\.1"):
        KeyEmbedder(HashEmbedder(), -0.1)


# ── the bank ──────────────────────────────────────────────────────────────────────────────────────


async def bank(*entries: Entry, scope: Scope = "task", **settings) -> Bank:
    made = Bank(WordEmbedder.dim, scope, RetrievalSection(**settings), seed=0)
    for one in entries:
        made.put(one, (await WordEmbedder().embed([one.text]))[0])
    return made


async def vector(text: str) -> np.ndarray:
    return (await WordEmbedder().embed([text]))[0]


async def test_with_task_scope_entries_of_other_tasks_are_not_returned():
    entries = [entry("a", text="go west now", task="room"), entry("b", text="go west", task="maze")]
    query = await vector("go west")
    apart, shared = await bank(*entries), await bank(*entries, scope="shared", margin=0.0)
    for group in range(20):
        hit = apart.search(search("go west", group=group), query, 0, counted=True)
        assert hit is not None
        assert hit.use.uid == "a"
        assert (
            apart.search(search("go west", name="attic", group=group), query, 0, counted=True)
            is None
        )
    hit = shared.search(search("go west"), query, 0, counted=True)
    assert hit is not None
    assert hit.use.uid == "b"


async def test_with_goal_scope_entries_of_other_goals_are_not_returned():
    made = await bank(
        entry("a", text="go west now", goal=GOAL), entry("b", text="go west"),
        entry("c", text="go west", task="maze", goal=GOAL), scope="goal", margin=2.0,
    )  # fmt: skip
    query = await vector("go west")
    for group in range(20):
        hit = made.search(search("go west", group=group), query, 0, counted=True)
        assert hit is not None
        assert hit.use.uid == "a"
    made.remove("a")
    assert made.search(search("go west", group=20), query, 0, counted=True) is None
    assert made.size(search().task) == 0


async def test_with_variation_scope_entries_of_other_variations_are_not_returned():
    entries = [
        entry("a", text="go west now", goal=GOAL, variation="3"),
        entry("b", text="go west", goal=GOAL, variation="0"),
        entry("c", text="go west", goal=GOAL),
    ]
    made, query = await bank(*entries, scope="variation", margin=0.0), await vector("go west")
    of_goal = await bank(*entries[:2], scope="goal", margin=0.0)
    plain = search("go west")

    def found(bank: Bank, **params: int) -> str | None:
        request = replace(plain, task=replace(plain.task, params=params))
        hit = bank.search(request, query, 0, counted=False)
        return hit and hit.use.uid

    assert found(made, variation=3) == "a"
    assert found(made, variation=0) == "b"
    assert found(made, variation=7) is None
    assert found(made, lgen=3) == found(made) == "c", "the goal identifies the place"
    assert found(of_goal, variation=3) == "b"
    made.remove("a")
    assert found(made, variation=3) is None


async def test_nothing_takes_the_place_of_experiences_that_the_episode_was_shown():
    """A state that returns adds no worse experiences to the conversation."""
    rewards = {"best": 1.0, "good": 0.9, "bad": 0.1, "worst": 0.0}
    made = await bank(
        *(entry(uid, text="go west", reward=reward) for uid, reward in rewards.items()),
        per="rollout", choice="reward",
    )  # fmt: skip
    query, request = await vector("go west"), replace(search("go west"), turn=2)

    def found(*shown: str) -> list[str]:
        again = replace(request, shown=shown)
        hits = made.search_several(again, query, 0, count=2, counted=True)
        return [hit.use.uid for hit in hits]

    assert [found(), found("best"), found("best", "good")] == [["best", "good"], ["good"], []]
    assert found("worst") == ["best", "good"]
    counted = {entry.uid: entry.counters.retrieved for entry in made.entries.values()}
    assert counted == {"best": 2, "good": 3, "bad": 0, "worst": 0}, "only what is shown"


async def test_equal_experiences_are_the_same_ones_at_every_turn():
    texts = [f"m{number}" for number in range(12)]  # all are candidates
    made = await bank(
        *(entry(uid, text="go west", reward=1.0) for uid in texts), per="rollout", choice="reward"
    )
    query = await vector("go west")

    def found(member: int, turn: int) -> list[str]:
        """Search while the trainer completes a step after each turn."""
        request = replace(search("go west", member=member), turn=turn)
        hits = made.search_several(request, query, turn, count=5, counted=False)
        return [hit.use.uid for hit in hits]

    first = found(0, 0)
    assert found(0, 1) == first != found(1, 1)
    made.remove(first[0])
    assert found(0, 2)[:4] == first[1:], "the order of the others stays"


async def test_group_members_share_one_pick_that_counts_once():
    made = await bank(entry("a", text="go west"), entry("b", text="go west"))
    query = await vector("go west")
    picks = [
        [
            made.search(search("go west", group=g, member=m), query, 4, counted=True)
            for m in range(3)
        ]
        for g in range(2)
    ]
    assert [len({hit.use.uid for hit in group if hit}) for group in picks] == [1, 1]
    # The first entry is recent and counted, so the second group receives the other entry.
    assert picks[0][0] != picks[1][0]
    assert {
        uid: (e.counters.retrieved, e.counters.last_returned_step)
        for uid, e in made.entries.items()
    } == {
        "a": (1, 4),
        "b": (1, 4),
    }
    assert {unit.uid: count for unit, count in made.take_counts().items()} == {
        "a": (1, 4),
        "b": (1, 4),
    }
    assert made.take_counts() == {}


async def test_with_per_rollout_every_search_is_counted_immediately():
    made = await bank(entry("a", text="go west"), entry("b", text="go west"), per="rollout")
    query = await vector("go west")
    hits = [made.search(search("go west", member=m), query, 0, counted=True) for m in range(4)]
    uids = [hit.use.uid for hit in hits if hit]
    assert sorted(uids[:2]) == sorted(uids[2:]) == ["a", "b"]


async def test_an_uncounted_search_changes_nothing():
    made = await bank(entry("a", text="go west"), entry("b", text="go west"))
    query = await vector("go west")
    first = [made.search(search("go west", member=m), query, 0, counted=False) for m in range(4)]
    assert len({hit.use.uid for hit in first if hit}) == 1
    assert all(
        e.counters.retrieved == 0 and e.counters.last_returned_step is None
        for e in made.entries.values()
    )
    assert made.take_counts() == {}
    # The address of the draw and the state of the bank are unchanged.
    assert made.search(search("go west"), query, 0, counted=True) == first[0]


async def test_a_newer_version_replaces_an_older_one_and_never_the_reverse():
    made = await bank(
        entry("a", text="go west", retrieved=5),
        entry("a", version=2, text="go north"),
        entry("a", text="go west"),
    )
    assert made.entries["a"].text == "go north"
    assert made.entries["a"].counters.retrieved == 0
    assert made.search(search("go west"), await vector("west"), 0, counted=True) is None
    hit = made.search(search("go north", group=1), await vector("go north"), 0, counted=True)
    assert hit is not None
    assert (hit.text, hit.use.version) == ("go north", 2)

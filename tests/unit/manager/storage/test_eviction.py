"""Eviction from the bank: bounds per goal and per bank, votes of the extractor, near duplicates."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from crl.algo.experience import success_score
from crl.config.schema import (
    BankSection,
    EvictionOrder,
    ExtractorSection,
    RetrievalSection,
    Scope,
)
from crl.engines.scripted import ScriptedEngine
from crl.errors import TransientError
from crl.manager import ExperienceManager, ManagerSettings, QueueSettings
from crl.manager.keys import STATE_KEYS
from crl.manager.records import Entry, Stamp
from crl.manager.storage.store import Store
from crl.protocols import Hit
from crl.types import Counters, Place, Provenance
from support.managers import (
    GOAL,
    PROMPTS,
    RETURN,
    WordEmbedder,
    add,
    answering,
    hit,
    logged,
    open_manager,
    request,
    search,
    task,
    update,
)

NEAREST = RetrievalSection(margin=0.0, min_similarity=0.0)


def echo_last_word(prompt: str) -> str:
    """Answer with the last word of the episode as the new entry. Answer "nothing" with a return."""
    word = prompt.split("<|im_end|>")[-2].split()[-1]
    return RETURN if word == "nothing" else add(word)


def bank_settings(**settings: Any) -> ManagerSettings:
    """Return settings of a manager: `extractor`, `queue`, and settings of the bank by name."""
    parts = {name: settings.pop(name) for name in ("extractor", "queue") if name in settings}
    return ManagerSettings(retrieval=NEAREST, bank=BankSection(**settings), **parts)


def texts(manager: ExperienceManager) -> list[str]:
    return [entry.text for entry in manager._bank.entries.values()]


async def distil(manager: ExperienceManager, *requests: Any) -> None:
    for distil_request in requests:
        await manager.submit(distil_request)
    await manager.drain()


# ── bounds ────────────────────────────────────────────────────────────────────────────────────────


async def four_entries(path: Path, evict: EvictionOrder, **bound: int) -> ExperienceManager:
    """Return a bank with four entries.

    "one" was retrieved at step 3 and won 1 of 2 episodes. "two" was never used. "three" was
    retrieved at step 2 and lost. "four" was retrieved at step 1 and lost.
    """
    manager = await open_manager(
        path, answering(echo_last_word), bank_settings(evict=evict, **bound)
    )
    await distil(
        manager,
        *(
            request(member=member, note=text)
            for member, text in enumerate(("one", "two", "three", "four"))
        ),
    )
    for step, text, rewards in (
        (1, "four", [False]),
        (2, "three", [False]),
        (3, "one", [True, False]),
    ):
        manager.advance(step)
        (found,) = await manager.search([search(text, group=step)])
        assert found is not None
        assert found.text == text
        for i, success in enumerate(rewards):
            await manager.credit([found.use], success, episode=f"run/{step}/0/{i}")
    await manager.flush()
    manager.advance(4)
    return manager


@pytest.mark.parametrize(
    ("evict", "gone"),
    [
        ("fifo", ["one", "two"]),
        # last steps: 3, 0 (written), 2, 1; the new entry is written at step 4
        ("lru", ["two", "four"]),
        ("credit", ["three", "four"]),  # scores: 0.433, 0.3, 0.15, 0.15
    ],
)
@pytest.mark.parametrize("bound", ["max_per_goal", "max_entries"])
async def test_the_eviction_policy_chooses_the_entries_over_a_bound(
    tmp_path: Path, evict: EvictionOrder, gone: list[str], bound: str
) -> None:
    manager = await four_entries(path := tmp_path / "bank.sqlite", evict, **{bound: 4})
    await distil(manager, request(4, note="five"))
    assert set(texts(manager)) == {"one", "two", "three", "four", "five"} - {gone[0]}
    await distil(manager, request(5, note="nothing"))
    assert len(texts(manager)) == 4
    await distil(manager, request(6, note="six"))
    assert set(texts(manager)) == {"one", "two", "three", "four", "five", "six"} - set(gone)
    await manager.aclose()
    assert [data for _, data in logged(path, "evict")] == [
        {"for": "run/4/0/0"},
        {"for": "run/6/0/0"},
    ]


async def test_credit_eviction_keeps_winners_and_untried_entries(tmp_path: Path) -> None:
    """Add eight new entries at every visit after the first. The place can hold eight.

    A useless entry guides to success in three of four episodes.
    """
    draw = random.Random(0)
    chosen_by = RetrievalSection(
        choice="credit", per="rollout", trial_share=0.5, min_similarity=-1, margin=2
    )
    settings = ManagerSettings(
        retrieval=chosen_by, bank=BankSection(max_per_goal=8, evict="credit")
    )
    manager = await open_manager(tmp_path / "bank.sqlite", answering(echo_last_word), settings)
    led = tried = 0
    for visit in range(20):
        notes = [f"useless-{visit}-{number}" for number in range(8)] if visit else ["right"]
        await distil(
            manager, *(request(visit, member=m, note=note) for m, note in enumerate(notes))
        )
        manager.advance(visit)
        untried = {
            entry.text for entry in manager._bank.entries.values() if not entry.counters.credited
        }
        assert len(untried) >= (4 if visit else 1)
        for member in range(4):
            (found,) = await manager.search([search("q", group=visit, member=member)])
            assert found is not None
            led += found.text == "right"
            tried += found.text in untried
            await manager.credit(
                [found.use],
                draw.random() < (0.95 if found.text == "right" else 0.75),
                episode=f"e/{visit}/0/{member}",
            )
    assert "right" in texts(manager)
    assert led >= 20
    assert tried >= 36
    await manager.aclose()


async def test_the_cap_limits_a_goal_and_the_size_limits_the_bank(tmp_path: Path) -> None:
    other = task(goal="Leave the long hall.")
    manager = await open_manager(
        tmp_path / "bank.sqlite",
        answering(lambda _: add("a b", "c d")),
        bank_settings(max_per_goal=2, max_entries=5),
    )
    await distil(manager, request(0), request(1))
    assert len(texts(manager)) == 2
    await distil(manager, request(2, of=other), request(3, of=task("maze", other.goal)))
    goals = [(entry.task, entry.goal, entry.uid) for entry in manager._bank.entries.values()]
    assert goals == [
        ("room", GOAL, "run/1/0/0#1"),
        ("room", other.goal, "run/2/0/0#0"), ("room", other.goal, "run/2/0/0#1"),
        ("maze", other.goal, "run/3/0/0#0"), ("maze", other.goal, "run/3/0/0#1"),
    ]  # fmt: skip
    await manager.aclose()


@pytest.mark.parametrize(
    ("evict", "left"),
    [("fifo", ["three", "four"]), ("lru", ["one", "three"]), ("credit", ["one", "two"])],
)
@pytest.mark.parametrize("bound", ["max_per_goal", "max_entries"])
async def test_opening_a_bank_evicts_entries_over_the_bounds(
    tmp_path: Path, evict: EvictionOrder, left: list[str], bound: str
) -> None:
    await (await four_entries(path := tmp_path / "bank.sqlite", "fifo")).aclose()
    manager = await open_manager(
        path, answering(echo_last_word), bank_settings(evict=evict, **{bound: 2})
    )
    assert texts(manager) == left
    await manager.aclose()
    assert [data for _, data in logged(path, "evict")] == [{"reason": "bounds"}] * 2, (
        "evictions are logged"
    )
    manager = await open_manager(path, answering(echo_last_word), bank_settings())
    assert texts(manager) == left
    await manager.aclose()


async def test_opening_a_bank_evicts_entries_over_the_bound_of_each_goal(tmp_path: Path) -> None:
    manager = await open_manager(
        path := tmp_path / "bank.sqlite", answering(lambda _: add("a", "b", "c")), bank_settings()
    )
    await distil(manager, request(0), request(1, of=task("maze", "Leave the long hall.")))
    before = await manager.snapshot()
    await manager.aclose()
    manager = await open_manager(path, answering(echo_last_word), bank_settings(max_per_goal=2))
    assert texts(manager) == ["b", "c"] * 2
    await manager.rollback(before)
    assert texts(manager) == ["b", "c"] * 2, "the restored bank is within the bound"
    await manager.aclose()


async def test_entries_of_another_run_count_as_older(
    tmp_path: Path,
) -> None:
    """Check that step numbers of different runs are not compared."""
    manager = await open_manager(
        tmp_path / "bank.sqlite", answering(lambda _: add("old")), bank_settings()
    )
    manager.advance(90)
    await distil(manager, request(90))
    await manager.search([search("old")])
    await manager.export_copy(tmp_path / "copy.sqlite")
    await manager.aclose()
    manager = await open_manager(
        tmp_path / "copy.sqlite",
        answering(lambda _: add("new")),
        bank_settings(max_entries=2, evict="lru"),
    )
    await distil(manager, request(0), request(1))
    assert texts(manager) == ["new", "new"]
    await manager.aclose()


@pytest.mark.parametrize("scope", ["goal", "variation"])
async def test_with_variation_scope_every_variation_has_a_bound_of_its_own(
    tmp_path: Path, scope: Scope
) -> None:
    games = [replace(task(), params={"variation": number}) for number in (0, 1)]
    settings = bank_settings(scope=scope, max_per_goal=2)
    path, engine = tmp_path / "bank.sqlite", answering(lambda _: add("a", "b"))
    manager = await open_manager(path, engine, settings)
    await distil(manager, *(request(step, of=games[step % 2]) for step in range(3)))
    kept = [(entry.place.variation, entry.uid) for entry in manager._bank.entries.values()]
    last = [("0", "run/2/0/0#0"), ("0", "run/2/0/0#1")]
    assert kept == ([("1", "run/1/0/0#0"), ("1", "run/1/0/0#1")] * (scope == "variation")) + last
    await manager.aclose()
    narrow = bank_settings(scope=scope, max_per_goal=1)
    manager = await open_manager(path, engine, narrow)
    left = [entry.place.variation for entry in manager._bank.entries.values()]
    assert left == (["1", "0"] if scope == "variation" else ["0"])
    await manager.aclose()


async def test_a_known_tip_is_updated_by_an_episode_with_a_higher_reward(tmp_path: Path) -> None:
    notes = replace(PROMPTS, notes=True, state=STATE_KEYS["state"])
    manager = await open_manager(
        tmp_path / "bank.sqlite", answering(lambda _: "Go west."), bank_settings(), prompts=notes
    )
    for step, reward in enumerate((None, 0.5, 0.0, 0.5, 1.0, 1.0, None)):
        await distil(manager, request(step, reward=reward))
    (entry,) = manager._bank.entries.values()
    assert (entry.unit, entry.provenance.reward) == (("run/0/0/0#0", 3), 1.0)
    counts = await manager.stats()
    assert (counts["ops/add"], counts["ops/update"], counts["dropped/known text"]) == (1, 2, 4)
    await manager.aclose()


async def test_a_tip_with_the_text_of_an_active_one_is_dropped(tmp_path: Path) -> None:
    """EMPO², Listing 1: content that a memory has is not added again."""
    games = [replace(task(), params={"variation": number}) for number in (0, 1)]
    notes = replace(PROMPTS, notes=True, state=STATE_KEYS["state"])
    tips = iter(["Go west.", "Go west.", "Go west.", "Go east.", "Go west."])
    manager = await open_manager(
        tmp_path / "bank.sqlite", answering(lambda _: next(tips)),
        bank_settings(scope="variation", max_per_goal=1), prompts=notes,
    )  # fmt: skip
    await distil(manager, request(0, of=games[0]), request(1, of=games[0]))
    await distil(manager, request(2, of=games[1]))
    uids = [entry.uid for entry in manager._bank.entries.values()]
    assert uids == ["run/0/0/0#0", "run/2/0/0#0"], "another variation has its own tips"
    counts = await manager.stats()
    assert (counts["dropped/known text"], counts["queue/done"]) == (1, 3)
    await distil(manager, request(3, of=games[0]), request(4, of=games[0]))
    assert texts(manager) == ["Go west."] * 2, "an evicted text is added again"
    assert (await manager.stats())["dropped/known text"] == 1
    await manager.aclose()


async def test_other_experiences_may_repeat_a_text(tmp_path: Path) -> None:
    """Role-Agent counts failures by their notes; reflections belong to attempts."""
    notes = replace(PROMPTS, notes=True)
    manager = await open_manager(
        tmp_path / "bank.sqlite", answering(lambda _: "Go west."), prompts=notes
    )
    await distil(manager, request(0), request(1))
    assert texts(manager) == ["Go west."] * 2
    await manager.aclose()


@pytest.mark.parametrize("evict", ["fifo", "lru", "credit"])
async def test_a_large_bank_evicts_more_than_the_surplus(
    tmp_path: Path, evict: EvictionOrder
) -> None:
    """Check that a bank of more than a hundred entries evicts one percent more than the surplus.

    Then only some answers have to search for entries to evict.
    """
    store = await Store.open(tmp_path / "bank.sqlite")
    rng = np.random.default_rng(0)
    credited = rng.integers(0, 4, 500)
    entries = [
        Entry(
            f"old/0/0/{i}#0",
            1,
            f"text {i}",
            Place("room", GOAL),
            Provenance("g", (0, 1)),
            Counters(credited=int(n), credit=float(rng.integers(0, n + 1) * 2 - n)),
        )
        for i, n in enumerate(credited)
    ]
    await store.import_entries(entries, Stamp(0, 0))
    await store.aclose()
    manager = await open_manager(
        tmp_path / "bank.sqlite",
        answering(lambda _: add("new")),
        bank_settings(max_entries=500, evict=evict),
    )
    sizes = []
    for step in range(8):
        await distil(manager, request(step))
        sizes.append(len(texts(manager)))
    assert sizes == [495, 496, 497, 498, 499, 500, 495, 496]
    order = entries
    if evict == "credit":
        score = {
            entry.uid: success_score(entry.counters.credited, entry.counters.credit)
            for entry in entries
        }
        best = {
            entry.uid
            for entry in sorted(reversed(entries), key=lambda entry: -score[entry.uid])[:250]
        }
        order = sorted(
            entries,
            key=lambda entry: (entry.uid in best, not entry.counters.credited, score[entry.uid]),
        )
    assert set(texts(manager)) & {entry.text for entry in entries} == {
        entry.text for entry in order[12:]
    }
    await manager.aclose()


async def test_counting_active_entries_uses_an_index(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "bank.sqlite")
    plan = await store._database.rows(
        "EXPLAIN QUERY PLAN SELECT COUNT(*) FROM entries WHERE status = 'active'"
    )
    assert "entries_written" in plan[0]["detail"], plan[0]["detail"]
    await store.aclose()


# ── votes ─────────────────────────────────────────────────────────────────────────────────────────


def vote_answer(**numbers: int) -> str:
    """Return an answer with one vote per keyword: the kind is the name, the target is the value."""
    return json.dumps([{"op": kind, "target": target} for kind, target in numbers.items()])


SHOWN = (hit("run/0/0/0#0"), hit("run/0/0/0#1"))


async def vote_manager(
    path: Path,
    *answers: str,
    shown: tuple[Hit, ...] = SHOWN,
    evict_votes: int | None = 2,
    **settings: Any,
) -> ExperienceManager:
    """Return a manager that has applied each answer to one episode guided by `shown`."""
    completions = iter([add("one", "two"), *answers])
    manager = await open_manager(
        path,
        answering(lambda _: next(completions)),
        bank_settings(evict_votes=evict_votes, **settings),
    )
    await distil(manager, request())
    for step in range(1, len(answers) + 1):
        await distil(manager, request(step, shown=shown))
    return manager


def votes(manager: ExperienceManager) -> dict[str, int]:
    return {entry.text: entry.counters.votes for entry in manager._bank.entries.values()}


async def test_votes_are_counted_and_enough_down_votes_evict(tmp_path: Path) -> None:
    path = tmp_path / "bank.sqlite"
    manager = await vote_manager(
        path, vote_answer(up=1, down=2), vote_answer(up=1), vote_answer(down=1)
    )
    assert votes(manager) == {"one": 1, "two": -1}
    await manager.aclose()
    assert [data for _, data in logged(path, "down")] == [
        {"uid": "run/0/0/0#1", "version": 1},
        {"uid": "run/0/0/0#0", "version": 1},
    ]
    manager = await open_manager(
        path,
        answering(lambda _: vote_answer(down=2)),
        bank_settings(evict_votes=2),
    )
    assert votes(manager) == {"one": 1, "two": -1}, "votes are stored"
    await distil(manager, request(9, shown=SHOWN))
    assert votes(manager) == {"one": 1}
    assert (
        (await manager.search([search("two")]))[0].text  # pyright: ignore[reportOptionalMemberAccess]
        == "one"
    )
    metrics = await manager.stats()
    assert metrics.items() >= {"ops/up": 2, "ops/down": 3, "ops/evict": 1, "bank/size": 1}.items()
    assert logged(path, "evict") == [("run/0/0/0#1", {"for": "run/9/0/0", "reason": "votes"})]
    await manager.aclose()


UP, DOWN, BETTER = (
    '{"op": "up", "target": %d}',
    '{"op": "down", "target": %d}',
    '{"op": "update", "target": %d, "text": "%s"}',
)
ASKED = Hit("one, here", replace(SHOWN[0].use, generation="run/1/0/0/1", how="ask"))
REFINED = Hit("one, in other words", replace(SHOWN[0].use, verdict="refine"))
AGAIN, REWORDED = "target named before", "vote on other words"


@pytest.mark.parametrize(
    ("shown", "ops", "left", "dropped"),
    [
        ((SHOWN[0], SHOWN[0]), [UP % 1, DOWN % 2], {"one": 1, "two": 0}, {AGAIN: 1}),
        ((SHOWN[0], SHOWN[0]), [DOWN % 2, DOWN % 1, DOWN % 2], {"one": -1, "two": 0}, {AGAIN: 2}),
        (
            (SHOWN[0], SHOWN[0]),
            [BETTER % (1, "a"), BETTER % (2, "b")],
            {"two": 0, "a": 0},
            {AGAIN: 1},
        ),
        # an update and a vote, in either order
        (
            (SHOWN[0], SHOWN[0]),
            [DOWN % 2, BETTER % (1, "a")],
            {"two": 0, "a": 0},
            {AGAIN: 1},
        ),
        ((SHOWN[0], SHOWN[0]), [BETTER % (1, "a"), DOWN % 2], {"two": 0, "a": 0}, {AGAIN: 1}),
        (SHOWN, [UP % 1, UP % 1, DOWN % 2], {"one": 1, "two": -1}, {AGAIN: 1}),
        (SHOWN, [BETTER % (1, "a"), BETTER % (2, "b")], {"a": 0, "b": 0}, {}),
        ((SHOWN[0], ASKED), [DOWN % 2, UP % 1], {"one": 1, "two": 0}, {REWORDED: 1}),
        ((ASKED,), [DOWN % 1], {"one": 0, "two": 0}, {REWORDED: 1}),
        ((REFINED, SHOWN[1]), [DOWN % 1, DOWN % 2], {"one": 0, "two": -1}, {REWORDED: 1}),
        ((REFINED,), [BETTER % (1, "a")], {"two": 0, "a": 0}, {}),
    ],
)
async def test_an_answer_changes_an_experience_at_most_once(
    tmp_path: Path,
    shown: tuple[Hit, ...],
    ops: list[str],
    left: dict[str, int],
    dropped: dict[str, int],
) -> None:
    """Check an answer to a prompt that gave an experience several numbers.

    An update takes precedence over a vote. A vote on a reworded text, for example on a refinement,
    is dropped.
    """
    manager = await vote_manager(tmp_path / "bank.sqlite", f"[{', '.join(ops)}]", shown=shown)
    assert votes(manager) == left
    assert {
        name.removeprefix("dropped/"): n
        for name, n in (await manager.stats()).items()
        if name.startswith("dropped/")
    } == dropped
    await manager.aclose()


async def test_a_vote_counts_for_one_version(tmp_path: Path) -> None:
    path = tmp_path / "bank.sqlite"
    manager = await vote_manager(
        path, vote_answer(down=1), update("one, better"), vote_answer(down=1)
    )
    assert votes(manager) == {"two": 0, "one, better": 0}
    await manager.aclose()
    assert logged(path, "down") == [("run/1/0/0", {"uid": "run/0/0/0#0", "version": 1})]
    assert logged(path, "drop") == [("run/3/0/0", {"reason": "stale target", "count": 1})]


async def test_votes_earn_no_credit_and_are_not_malformed(tmp_path: Path) -> None:
    extractor = ExtractorSection(cooldown=0, malformed_reward=-1.0)
    manager = await vote_manager(
        tmp_path / "bank.sqlite",
        vote_answer(up=1),
        f"{vote_answer(down=2)[:-1]}, {add('three')[1:]}",
        extractor=extractor,
    )
    assert (await manager.stats()).items() >= {"buffer/ready": 0, "generations": 2}.items()
    assert "ops/malformed" not in await manager.stats()
    await manager.credit([hit("run/2/0/0#1").use], True, episode="e")
    samples = await manager.take_batch(1, 1)
    assert samples is not None
    assert [sample.id for sample in samples] == ["run/2/0/0#1@1", "run/2/0/0@head"]
    await manager.aclose()


async def test_votes_are_unknown_ops_if_voting_is_off(tmp_path: Path) -> None:
    manager = await vote_manager(
        tmp_path / "bank.sqlite", vote_answer(up=1, down=2), evict_votes=None
    )
    assert (await manager.stats()).items() >= {
        "ops/up": 0,
        "ops/down": 0,
        "dropped/unknown op": 2,
    }.items()
    await manager.aclose()


# ── near duplicates ───────────────────────────────────────────────────────────────────────────────

# Cosines: SAME and ALIKE 4/5, ALIKE and OTHER 0, SAME and OTHER 1/√15.
SAME, ALIKE, OTHER = (
    "go west along the wall",
    "go west along that wall",
    "open the door",
)


async def test_a_near_duplicate_add_is_dropped_and_counted(tmp_path: Path) -> None:
    settings = bank_settings(
        duplicate_similarity=0.8, extractor=ExtractorSection(malformed_reward=-1.0)
    )
    answers = iter([add(SAME, ALIKE, OTHER), add(ALIKE), update(SAME)])
    manager = await open_manager(
        tmp_path / "bank.sqlite", answering(lambda _: next(answers)), settings
    )
    await distil(manager, request())
    assert texts(manager) == [SAME, OTHER], "also within one answer"
    await distil(manager, request(1))
    assert (await manager.stats()).items() >= {
        "dropped/near duplicate": 2,
        "ops/add": 2,
        "generations": 1,
        "buffer/ready": 0,
    }.items()
    assert "ops/malformed" not in await manager.stats(), "the answer is not malformed"
    await distil(manager, request(2, shown=(hit("run/0/0/0#2"),)))
    assert texts(manager) == [SAME, SAME], "updates are not compared"
    await manager.aclose()


@pytest.mark.parametrize(("weight", "kept"), [(None, 1), (0.1, 2)])
async def test_only_entries_that_one_query_can_find_are_compared(
    tmp_path: Path, weight: float | None, kept: int
) -> None:
    """Check that entries of different tasks are never compared.

    With goals in the keys, equal texts about different goals are not duplicates.
    """
    settings = bank_settings(duplicate_similarity=0.9, key_text_weight=weight)
    manager = await open_manager(tmp_path / "bank.sqlite", answering(lambda _: add(SAME)), settings)
    await distil(
        manager,
        request(),
        request(1, of=task(goal="Leave the long hall.")),
        request(2, of=task("maze")),
        request(3),
    )
    assert len([entry for entry in manager._bank.entries.values() if entry.task == "room"]) == kept
    assert len([entry for entry in manager._bank.entries.values() if entry.task == "maze"]) == 1
    await manager.aclose()


async def test_with_goals_in_the_keys_texts_are_compared_instead(tmp_path: Path) -> None:
    settings = bank_settings(duplicate_similarity=0.9, key_text_weight=0.1)
    manager = await open_manager(
        tmp_path / "bank.sqlite", answering(lambda _: add(SAME, OTHER)), settings
    )
    await distil(manager, request())
    first, second = (vector for _, vector in await manager._store.entries())
    assert first @ second > 0.99
    assert texts(manager) == [SAME, OTHER]
    await manager.aclose()


class BusyEmbedder(WordEmbedder):
    """Embedder that fails for the text `SAME` in the first `times` calls with this text."""

    times = 0

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        if SAME in texts and self.times:
            self.times -= 1
            raise TransientError("embedder", "busy")
        return await super().embed(texts)


@pytest.mark.parametrize(("weight", "times", "refused"), [(None, 2, 0), (0.1, 1, 1), (0.1, 2, 2)])
async def test_texts_to_compare_are_embedded_within_the_attempt(
    tmp_path: Path, weight: float | None, times: int, refused: int
) -> None:
    """Check that a failed embedding costs an attempt, and the last one the episode, not the run.

    Keys that depend only on the text are compared without another embedding.
    """
    embedder = BusyEmbedder()
    settings = bank_settings(
        duplicate_similarity=0.8,
        key_text_weight=weight,
        queue=QueueSettings(attempts=2, backoff=0.0),
    )
    for word, episode in ((SAME, request()), (ALIKE, request(1))):
        manager = await open_manager(
            tmp_path / "bank.sqlite",
            answering(lambda _, word=word: add(word)),
            settings,
            embedder=embedder,
        )
        await distil(manager, episode)
        embedder.times = times
        if episode.episode.step == 0:
            await manager.aclose()
    dead = refused == settings.queue.attempts
    metrics = {
        "queue/dead": int(dead),
        "queue/retried": int(refused > 0),
        "dropped/near duplicate": int(not dead),
        "ops/add": 1,
    }
    stats = await manager.stats()
    assert {name: stats.get(name, 0) for name in metrics} == metrics
    await manager.aclose()


@examples(max_examples=25, deadline=None)
@given(
    order=st.permutations(range(6)), weight=st.sampled_from([None, 0.1]), background=st.booleans()
)
def test_one_of_several_equal_concurrent_adds_is_stored(
    tmp_path_factory: pytest.TempPathFactory,
    order: Sequence[int],
    weight: float | None,
    background: bool,
) -> None:
    """Let the answers arrive in any order. At step boundaries the first episode's add is stored."""

    class ShuffledEngine(ScriptedEngine):
        async def generate(self, *args: Any, **options: Any) -> Any:
            for _ in range(3 * order[len(self.requests) % len(order)]):
                await asyncio.sleep(0)
            return await super().generate(*args, **options)

    async def run(path: Path) -> None:
        settings = bank_settings(duplicate_similarity=0.9, key_text_weight=weight)
        inner = answering(lambda _: add(SAME))
        manager = await open_manager(path, ShuffledEngine(inner._renderer, inner._answer), settings)
        running = asyncio.create_task(manager.run()) if background else None
        await asyncio.gather(
            *(manager.submit(request(member=member)) for member in range(len(order)))
        )
        await manager.drain()
        if running:
            running.cancel()
            await asyncio.wait({running})
        assert texts(manager) == [SAME]
        assert (await manager.stats())["dropped/near duplicate"] == len(order) - 1
        if not background:
            assert list(manager._bank.entries) == ["run/0/0/0#0"]
        await manager.aclose()

    asyncio.run(run(tmp_path_factory.mktemp("bank") / "bank.sqlite"))

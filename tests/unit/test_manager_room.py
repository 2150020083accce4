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
from extractors import (
    GOAL,
    RETURN,
    WordEmbedder,
    add,
    answering,
    hit,
    logged,
    manager,
    request,
    search,
    task,
    update,
)
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from crl.engines.scripted import ScriptedEngine
from crl.errors import TransientError
from crl.manager import (
    CreditSettings,
    DistilSettings,
    ExperienceManager,
    ManagerSettings,
    RetrievalSettings,
)
from crl.manager.records import Entry, Evict, Stamp
from crl.manager.retrieval import known_score
from crl.manager.store import Store
from crl.protocols import Hit

NEAREST = RetrievalSettings(margin=0.0, min_similarity=0.0, exact=True)


def echo(prompt: str) -> str:
    """Answer with the last word of the episode as the new entry. Answer "nothing" with a return."""
    word = prompt.split("<|im_end|>")[-2].split()[-1]
    return RETURN if word == "nothing" else add(word)


def bank(**settings: Any) -> ManagerSettings:
    return ManagerSettings(retrieval=NEAREST, **settings)


def texts(made: ExperienceManager) -> list[str]:
    return [entry.text for entry in made._bank.entries.values()]


async def distil(made: ExperienceManager, *requests: Any) -> None:
    for one in requests:
        await made.submit(one)
    await made.drain()


# ── bounds ────────────────────────────────────────────────────────────────────────────────────────


async def four(path: Path, evict: Evict, **bound: int) -> ExperienceManager:
    """Return a bank with four entries.

    "one" was retrieved at step 3 and won 1 of 2 episodes. "two" was never used. "three" was
    retrieved at step 2 and lost. "four" was retrieved at step 1 and lost.
    """
    made = await manager(path, answering(echo), bank(evict=evict, **bound))
    await distil(
        made,
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
        made.advance(step)
        (found,) = await made.search([search(text, group=step)])
        assert found is not None
        assert found.text == text
        for i, success in enumerate(rewards):
            await made.credit([found.use], success, episode=f"run/{step}/0/{i}")
    await made.flush()
    made.advance(4)
    return made


@pytest.mark.parametrize(
    ("evict", "gone"),
    [
        ("fifo", ["one", "two"]),
        # last steps: 3, 0 (written), 2, 1; the new entry is written at step 4
        ("lru", ["two", "four"]),
        ("credit", ["three", "four"]),  # scores: 0.433, 0.3, 0.15, 0.15
    ],
)
@pytest.mark.parametrize("bound", ["cap", "size"])
async def test_over_a_bound_those_go_that_the_policy_says(
    tmp_path: Path, evict: Evict, gone: list[str], bound: str
) -> None:
    made = await four(path := tmp_path / "bank.sqlite", evict, **{bound: 4})
    await distil(made, request(4, note="five"))
    assert set(texts(made)) == {"one", "two", "three", "four", "five"} - {gone[0]}
    await distil(made, request(5, note="nothing"))
    assert len(texts(made)) == 4
    await distil(made, request(6, note="six"))
    assert set(texts(made)) == {"one", "two", "three", "four", "five", "six"} - set(gone)
    await made.aclose()
    assert [data for _, data in logged(path, "evict")] == [
        {"for": "run/4/0/0"},
        {"for": "run/6/0/0"},
    ]


async def test_what_wins_stays_and_there_is_always_something_to_try(tmp_path: Path) -> None:
    """Eight new entries arrive at every visit after the first, and the place can hold eight.

    A useless entry guides to success in three of four episodes.
    """
    draw = random.Random(0)
    chosen_by = RetrievalSettings(
        choice="credit", per="rollout", trials=0.5, min_similarity=-1, margin=2
    )
    settings = ManagerSettings(retrieval=chosen_by, cap=8, evict="credit")
    made = await manager(tmp_path / "bank.sqlite", answering(echo), settings)
    led = tried = 0
    for visit in range(20):
        notes = [f"useless-{visit}-{number}" for number in range(8)] if visit else ["right"]
        await distil(made, *(request(visit, member=m, note=note) for m, note in enumerate(notes)))
        made.advance(visit)
        untried = {entry.text for entry in made._bank.entries.values() if not entry.credited}
        assert len(untried) >= (4 if visit else 1)
        for member in range(4):
            (found,) = await made.search([search("q", group=visit, member=member)])
            assert found is not None
            led += found.text == "right"
            tried += found.text in untried
            await made.credit(
                [found.use],
                draw.random() < (0.95 if found.text == "right" else 0.75),
                episode=f"e/{visit}/0/{member}",
            )
    assert "right" in texts(made)
    assert led >= 20
    assert tried >= 36
    await made.aclose()


async def test_a_cap_is_of_one_goal_and_a_size_of_all(tmp_path: Path) -> None:
    other = task(goal="Leave the long hall.")
    made = await manager(
        tmp_path / "bank.sqlite", answering(lambda _: add("a b", "c d")), bank(cap=2, size=5)
    )
    await distil(made, request(0), request(1))
    assert len(texts(made)) == 2
    await distil(made, request(2, of=other), request(3, of=task("maze", other.goal)))
    goals = [(entry.task, entry.goal, entry.uid) for entry in made._bank.entries.values()]
    assert goals == [
        ("room", GOAL, "run/1/0/0#1"),
        ("room", other.goal, "run/2/0/0#0"), ("room", other.goal, "run/2/0/0#1"),
        ("maze", other.goal, "run/3/0/0#0"), ("maze", other.goal, "run/3/0/0#1"),
    ]  # fmt: skip
    await made.aclose()


@pytest.mark.parametrize(
    ("evict", "left"),
    [("fifo", ["three", "four"]), ("lru", ["one", "three"]), ("credit", ["one", "two"])],
)
@pytest.mark.parametrize("bound", ["cap", "size"])
async def test_a_bank_that_is_opened_over_a_bound_is_brought_within_it(
    tmp_path: Path, evict: Evict, left: list[str], bound: str
) -> None:
    await (await four(path := tmp_path / "bank.sqlite", "fifo")).aclose()
    made = await manager(path, answering(echo), bank(evict=evict, **{bound: 2}))
    assert texts(made) == left
    await made.aclose()
    assert [data for _, data in logged(path, "evict")] == [{"reason": "room"}] * 2, (
        "they stay in the history"
    )
    made = await manager(path, answering(echo), bank())
    assert texts(made) == left
    await made.aclose()


async def test_each_goal_is_brought_within_the_cap(tmp_path: Path) -> None:
    made = await manager(
        path := tmp_path / "bank.sqlite", answering(lambda _: add("a", "b", "c")), bank()
    )
    await distil(made, request(0), request(1, of=task("maze", "Leave the long hall.")))
    before = await made.snapshot()
    await made.aclose()
    made = await manager(path, answering(echo), bank(cap=2))
    assert texts(made) == ["b", "c"] * 2
    await made.rollback(before)
    assert texts(made) == ["b", "c"] * 2, "what it goes back to is brought within it too"
    await made.aclose()


async def test_what_another_run_wrote_or_returned_counts_as_older_than_all_of_this_one(
    tmp_path: Path,
) -> None:
    """Step numbers of different runs cannot be compared."""
    made = await manager(tmp_path / "bank.sqlite", answering(lambda _: add("old")), bank())
    made.advance(90)
    await distil(made, request(90))
    await made.search([search("old")])
    await made.export_copy(tmp_path / "copy.sqlite")
    await made.aclose()
    made = await manager(
        tmp_path / "copy.sqlite", answering(lambda _: add("new")), bank(size=2, evict="lru")
    )
    await distil(made, request(0), request(1))
    assert texts(made) == ["new", "new"]
    await made.aclose()


@pytest.mark.parametrize("evict", ["fifo", "lru", "credit"])
async def test_a_large_bank_makes_room_for_a_while(tmp_path: Path, evict: Evict) -> None:
    """A bank of more than a hundred entries evicts one percent more than the surplus.

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
            "room",
            GOAL,
            "g",
            (0, 1),
            credited=int(n),
            credit=float(rng.integers(0, n + 1) * 2 - n),
        )
        for i, n in enumerate(credited)
    ]
    await store.take_in(entries, Stamp(0, 0))
    await store.aclose()
    made = await manager(
        tmp_path / "bank.sqlite", answering(lambda _: add("new")), bank(size=500, evict=evict)
    )
    sizes = []
    for step in range(8):
        await distil(made, request(step))
        sizes.append(len(texts(made)))
    assert sizes == [495, 496, 497, 498, 499, 500, 495, 496]
    order = entries
    if evict == "credit":
        score = {entry.uid: known_score(entry.credited, entry.credit) for entry in entries}
        best = {
            entry.uid
            for entry in sorted(reversed(entries), key=lambda entry: -score[entry.uid])[:250]
        }
        order = sorted(
            entries, key=lambda entry: (entry.uid in best, not entry.credited, score[entry.uid])
        )
    assert set(texts(made)) & {entry.text for entry in entries} == {
        entry.text for entry in order[12:]
    }
    await made.aclose()


async def test_looking_for_the_surplus_reads_an_index(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "bank.sqlite")
    plan = await store._database.rows(
        "EXPLAIN QUERY PLAN SELECT COUNT(*) FROM entries WHERE status = 'active'"
    )
    assert "entries_written" in plan[0]["detail"], plan[0]["detail"]
    await store.aclose()


# ── votes ─────────────────────────────────────────────────────────────────────────────────────────


def voting(**numbers: int) -> str:
    """Return an answer with one vote per keyword: the kind is the name, the target is the value."""
    return json.dumps([{"op": kind, "target": target} for kind, target in numbers.items()])


SHOWN = (hit("run/0/0/0#0"), hit("run/0/0/0#1"))


async def voted(
    path: Path,
    *answers: str,
    shown: tuple[Hit, ...] = SHOWN,
    vote_out: int | None = 2,
    **settings: Any,
) -> ExperienceManager:
    """Return a manager that has applied each answer to one episode guided by `shown`."""
    said = iter([add("one", "two"), *answers])
    made = await manager(path, answering(lambda _: next(said)), bank(vote_out=vote_out, **settings))
    await distil(made, request())
    for step in range(1, len(answers) + 1):
        await distil(made, request(step, shown=shown))
    return made


def votes(made: ExperienceManager) -> dict[str, int]:
    return {entry.text: entry.votes for entry in made._bank.entries.values()}


async def test_votes_are_counted_and_enough_of_them_evict(tmp_path: Path) -> None:
    path = tmp_path / "bank.sqlite"
    made = await voted(path, voting(up=1, down=2), voting(up=1), voting(down=1))
    assert votes(made) == {"one": 1, "two": -1}
    await made.aclose()
    assert [data for _, data in logged(path, "down")] == [
        {"uid": "run/0/0/0#1", "version": 1},
        {"uid": "run/0/0/0#0", "version": 1},
    ]
    made = await manager(path, answering(lambda _: voting(down=2)), bank(vote_out=2))
    assert votes(made) == {"one": 1, "two": -1}, "they are in the store"
    await distil(made, request(9, shown=SHOWN))
    assert votes(made) == {"one": 1}
    assert (
        (await made.search([search("two")]))[0].text  # pyright: ignore[reportOptionalMemberAccess]
        == "one"
    )
    metrics = await made.stats()
    assert metrics.items() >= {"ops/up": 2, "ops/down": 3, "ops/evict": 1, "bank/size": 1}.items()
    assert logged(path, "evict") == [("run/0/0/0#1", {"for": "run/9/0/0", "reason": "votes"})]
    await made.aclose()


UP, DOWN, BETTER = (
    '{"op": "up", "target": %d}',
    '{"op": "down", "target": %d}',
    '{"op": "update", "target": %d, "text": "%s"}',
)
ASKED = Hit("one, here", replace(SHOWN[0].use, generation="run/1/0/0/1", how="ask"))
REFINED = Hit("one, in other words", replace(SHOWN[0].use, verdict="refine"))
AGAIN, REWORDED = "target named before", "vote on other words"


@pytest.mark.parametrize(
    ("shown", "said", "left", "dropped"),
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
async def test_an_answer_says_one_thing_of_one_experience(
    tmp_path: Path,
    shown: tuple[Hit, ...],
    said: list[str],
    left: dict[str, int],
    dropped: dict[str, int],
) -> None:
    """An answer changes an experience at most once, even if the prompt gave it several numbers.

    An update takes precedence over a vote. A vote on a reworded text, for example on a refinement,
    is dropped.
    """
    made = await voted(tmp_path / "bank.sqlite", f"[{', '.join(said)}]", shown=shown)
    assert votes(made) == left
    assert {
        name.removeprefix("dropped/"): n
        for name, n in (await made.stats()).items()
        if name.startswith("dropped/")
    } == dropped
    await made.aclose()


async def test_a_vote_is_of_one_version(tmp_path: Path) -> None:
    path = tmp_path / "bank.sqlite"
    made = await voted(path, voting(down=1), update("one, better"), voting(down=1))
    assert votes(made) == {"two": 0, "one, better": 0}
    await made.aclose()
    assert logged(path, "down") == [("run/1/0/0", {"uid": "run/0/0/0#0", "version": 1})]
    assert logged(path, "drop") == [("run/3/0/0", {"reason": "stale target", "count": 1})]


async def test_votes_earn_nothing_and_are_an_answer(tmp_path: Path) -> None:
    credit = CreditSettings(cooldown=0, malformed_reward=-1.0)
    made = await voted(
        tmp_path / "bank.sqlite",
        voting(up=1),
        f"{voting(down=2)[:-1]}, {add('three')[1:]}",
        credit=credit,
    )
    assert (await made.stats()).items() >= {"buffer/ready": 0, "generations": 2}.items()
    assert "ops/malformed" not in await made.stats()
    await made.credit([hit("run/2/0/0#1").use], True, episode="e")
    samples = await made.take_batch(1, 1)
    assert samples is not None
    assert [sample.id for sample in samples] == ["run/2/0/0#1@1", "run/2/0/0@head"]
    await made.aclose()


async def test_where_nobody_asks_for_votes_they_are_no_ops(tmp_path: Path) -> None:
    made = await voted(tmp_path / "bank.sqlite", voting(up=1, down=2), vote_out=None)
    assert (await made.stats()).items() >= {
        "ops/up": 0,
        "ops/down": 0,
        "dropped/unknown op": 2,
    }.items()
    await made.aclose()


# ── near duplicates ───────────────────────────────────────────────────────────────────────────────

# Cosines: SAME and ALIKE 4/5, ALIKE and OTHER 0, SAME and OTHER 1/√15.
SAME, ALIKE, OTHER = (
    "go west along the wall",
    "go west along that wall",
    "open the door",
)


async def test_an_add_that_is_known_is_left_out_counted_and_earns_nothing(tmp_path: Path) -> None:
    settings = bank(duplicate=0.8, credit=CreditSettings(malformed_reward=-1.0))
    answers = iter([add(SAME, ALIKE, OTHER), add(ALIKE), update(SAME)])
    made = await manager(tmp_path / "bank.sqlite", answering(lambda _: next(answers)), settings)
    await distil(made, request())
    assert texts(made) == [SAME, OTHER], "also within one answer"
    await distil(made, request(1))
    assert (await made.stats()).items() >= {
        "dropped/near duplicate": 2,
        "ops/add": 2,
        "generations": 1,
        "buffer/ready": 0,
    }.items()
    assert "ops/malformed" not in await made.stats(), "it was an answer"
    await distil(made, request(2, shown=(hit("run/0/0/0#2"),)))
    assert texts(made) == [SAME, SAME], "an update is no add"
    await made.aclose()


@pytest.mark.parametrize(("weight", "kept"), [(None, 1), (0.1, 2)])
async def test_only_what_one_query_can_find_is_compared(
    tmp_path: Path, weight: float | None, kept: int
) -> None:
    """Entries of different tasks are never compared.

    With goals in the keys, equal texts about different goals are not duplicates.
    """
    settings = bank(duplicate=0.9, distil=DistilSettings(key_text_weight=weight))
    made = await manager(tmp_path / "bank.sqlite", answering(lambda _: add(SAME)), settings)
    await distil(
        made,
        request(),
        request(1, of=task(goal="Leave the long hall.")),
        request(2, of=task("maze")),
        request(3),
    )
    assert len([entry for entry in made._bank.entries.values() if entry.task == "room"]) == kept
    assert len([entry for entry in made._bank.entries.values() if entry.task == "maze"]) == 1
    await made.aclose()


async def test_with_goals_in_the_keys_texts_are_compared_and_not_keys(tmp_path: Path) -> None:
    settings = bank(duplicate=0.9, distil=DistilSettings(key_text_weight=0.1))
    made = await manager(tmp_path / "bank.sqlite", answering(lambda _: add(SAME, OTHER)), settings)
    await distil(made, request())
    first, second = (vector for _, vector in await made._store.entries())
    assert first @ second > 0.99
    assert texts(made) == [SAME, OTHER]
    await made.aclose()


class Refusing(WordEmbedder):
    """Embedder that fails for the text `SAME` in the first `times` calls with this text."""

    times = 0

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        if SAME in texts and self.times:
            self.times -= 1
            raise TransientError("embedder", "busy")
        return await super().embed(texts)


@pytest.mark.parametrize(("weight", "times", "refused"), [(None, 2, 0), (0.1, 1, 1), (0.1, 2, 2)])
async def test_what_is_compared_is_embedded_within_the_attempt(
    tmp_path: Path, weight: float | None, times: int, refused: int
) -> None:
    """A failure of the embedder costs an attempt, and the last attempt the episode, never the run.

    Keys that depend only on the text are compared without another embedding.
    """
    embedder = Refusing()
    settings = bank(
        duplicate=0.8, attempts=2, backoff=0.0, distil=DistilSettings(key_text_weight=weight)
    )
    for word, episode in ((SAME, request()), (ALIKE, request(1))):
        made = await manager(
            tmp_path / "bank.sqlite",
            answering(lambda _, word=word: add(word)),
            settings,
            embedder=embedder,
        )
        await distil(made, episode)
        embedder.times = times
        if episode.step == 0:
            await made.aclose()
    dead = refused == settings.attempts
    metrics = {
        "queue/dead": int(dead),
        "queue/retried": int(refused > 0),
        "dropped/near duplicate": int(not dead),
        "ops/add": 1,
    }
    stats = await made.stats()
    assert {name: stats.get(name, 0) for name in metrics} == metrics
    await made.aclose()


@examples(max_examples=25, deadline=None)
@given(
    order=st.permutations(range(6)), weight=st.sampled_from([None, 0.1]), background=st.booleans()
)
def test_of_equal_adds_at_the_same_time_one_gets_in(
    tmp_path_factory: pytest.TempPathFactory,
    order: Sequence[int],
    weight: float | None,
    background: bool,
) -> None:
    """The answers arrive in any order. At step boundaries the first episode's add is stored."""

    class Shuffled(ScriptedEngine):
        async def generate(self, *args: Any, **options: Any) -> Any:
            for _ in range(3 * order[len(self.requests) % len(order)]):
                await asyncio.sleep(0)
            return await super().generate(*args, **options)

    async def run(path: Path) -> None:
        settings = bank(duplicate=0.9, distil=DistilSettings(key_text_weight=weight))
        inner = answering(lambda _: add(SAME))
        made = await manager(path, Shuffled(inner._renderer, inner._answer), settings)
        running = asyncio.create_task(made.run()) if background else None
        await asyncio.gather(*(made.submit(request(member=member)) for member in range(len(order))))
        await made.drain()
        if running:
            running.cancel()
            await asyncio.wait({running})
        assert texts(made) == [SAME]
        assert (await made.stats())["dropped/near duplicate"] == len(order) - 1
        if not background:
            assert list(made._bank.entries) == ["run/0/0/0#0"]
        await made.aclose()

    asyncio.run(run(tmp_path_factory.mktemp("bank") / "bank.sqlite"))

"""Fuzz test of extractor answers. The bank applies the valid operations and keeps working."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from crl.config.schema import BankSection, ExtractorSection, RetrievalSection
from crl.manager import DistilRequest, ManagerSettings
from crl.manager.storage.store import Store
from support.managers import answering, logged, open_manager, request, search, task

SETTINGS = ManagerSettings(
    retrieval=RetrievalSection(margin=2.0, min_similarity=0.0),
    bank=BankSection(
        max_per_goal=3, max_entries=12, evict="credit", evict_votes=1, duplicate_similarity=0.8
    ),
    extractor=ExtractorSection(malformed_reward=-1.0),
)

WORDS = [
    "go", "west", "east", "wall", "door", "trap", "\ud800", "中", "🙂", "\x00", "\u202e",
    "}", "{", "]", "[", '"', "'", "\\", "</think>",
]  # fmt: skip
JUNK = [
    "", "[", "]", "{", "}", ",", ":", "\\", "```json\n", "<think>", "</think>", "NaN", "1e999",
    '{"op":', '{"a": ' * 9, "\ud800", "\x00",
]  # fmt: skip


def anything(rng: random.Random) -> object:
    return rng.choice(
        [
            None,
            True,
            -1,
            0,
            1,
            2,
            3,
            1e9,
            1.0,
            "1",
            "2",
            "x",
            [],
            [1],
            {},
            {"op": "add"},
            float("nan"),
            10**30,
            "9" * 5000,
        ]
    )


def text(rng: random.Random) -> str:
    return " ".join(
        rng.choices(WORDS, k=900 if rng.random() < 0.02 else rng.choice([0, 1, 3, 5, 8]))
    )


def op(rng: random.Random) -> object:
    kind = rng.choice(
        [
            "add",
            "add",
            "update",
            "update",
            "up",
            "down",
            "down",
            "return",
            "merge",
            "discard",
            "keep",
            "",
            None,
            7,
            ["add"],
        ]
    )
    operation: dict[str, object] = {
        "op": kind,
        "target": rng.choice([1, 1, 1, 2, "1", anything(rng)]),
        "text": text(rng),
    }
    if rng.random() < 0.2:
        operation[rng.choice(["op", "target", "text", "targets"])] = anything(rng)
    if rng.random() < 0.1:
        del operation[rng.choice(list(operation))]
    return operation


def answer(rng: random.Random) -> str:
    """Return an answer with random operations. About half of the answers are damaged."""
    completion = json.dumps(
        [op(rng) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 5]))], ensure_ascii=rng.random() < 0.5
    )
    if rng.random() < 0.3:
        completion = f"{rng.choice(JUNK)}{completion}{rng.choice(JUNK)}"
    if rng.random() < 0.2:
        at = rng.randrange(len(completion) + 1)
        completion = completion[:at] + rng.choice(["", *JUNK]) + completion[at + rng.randrange(9) :]
    # A tokenizer never produces lone surrogates. The escapes of JSON can.
    return completion.encode("utf-8", "ignore").decode()


@pytest.mark.parametrize("answers", [400, pytest.param(10_000, marks=pytest.mark.soak)])
async def test_the_bank_survives_any_answers(tmp_path: Path, answers: int) -> None:
    path, rng = tmp_path / "bank.sqlite", random.Random(0)
    manager = await open_manager(path, answering(lambda _: answer(rng)), SETTINGS)
    submitted = 0
    while submitted < answers:
        step = submitted // 40
        manager.advance(step)
        goals = [task(goal=f"Leave hall {i}.") for i in range(8)]
        hits = await manager.search(
            [search(goal.goal, group=8 * step + i) for i, goal in enumerate(goals)]
        )
        for i, (goal, hit) in enumerate(zip(goals * 5, hits * 5, strict=True)):
            one: DistilRequest = request(
                step, 8 * step + i % 8, i // 8, of=goal, shown=(hit,) if hit else ()
            )
            await manager.submit(one)
            submitted += 1
            if hit:
                await manager.credit([hit.use], rng.random() < 0.5, episode=one.id)
        await manager.drain()
        assert 0 < len(manager._bank.entries) <= 12
    metrics = await manager.stats()
    assert (
        metrics.items()
        >= {
            "queue/done": submitted,
            "queue/dead": 0,
            "queue/pending": 0,
            "queue/retried": 0,
        }.items()
    )
    assert (
        min(
            metrics[f"ops/{kind}"]
            for kind in ("add", "update", "up", "down", "return", "evict", "malformed")
        )
        > 0
    )
    assert {"near duplicate", "target named before", "stale target", "unknown op", "not JSON"} <= {
        name.removeprefix("dropped/") for name in metrics
    }
    entries = manager._bank.entries
    await manager.aclose()

    store = await Store.open(path)
    stored = [entry for entry, _ in await store.entries()]
    assert stored == list(entries.values()), "memory and store agree"
    assert all(
        entry.text.strip() and len(entry.text) <= 2000 and entry.counters.votes > -1
        for entry in stored
    )
    await store.aclose()
    counted = [data for kind in ("up", "down") for _, data in logged(path, kind)]
    assert len(counted) == metrics["ops/up"] + metrics["ops/down"]

"""Tables of the SmolLM2 benchmark, on numbers worked by hand."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from importlib.resources import files
from pathlib import Path

from support.paths import benchmark

smollm2 = benchmark("smollm2")


def test_means_of_the_first_and_the_last_steps_are_weighted_by_a_count() -> None:
    steps = [{"kind": "bank", "right": right, "answers": 2} for right in (0.0, 0.0, 0.1, 0.2, 0.2)]
    steps += [{"kind": "train"}, {"kind": "bank", "right": None, "answers": 0}]
    steps += [{"kind": "bank", "right": 0.9, "answers": 64}] * 4
    steps += [{"kind": "bank", "right": 0.0, "answers": 8}]
    assert smollm2.ends(steps, "right") == "0.100 → 0.720"
    assert smollm2.ends(steps, "right", "answers") == "0.100 → 0.873"  # 0.9 · 256 / 264
    assert smollm2.ends(steps, "left") == "–"


def test_answers_of_the_extractor_are_counted_by_kind(tmp_path: Path) -> None:
    refused, duplicate = {"reason": "no op in the answer"}, {"reason": "near duplicate"}
    rows = [
        *(("submit", f"run/0/0/{member}", {}) for member in range(5)),
        ("add", "run/0/0/0", {}),
        ("drop", "run/0/0/0", refused),  # one of two operations
        ("drop", "run/0/0/1", refused),  # not usable
        ("drop", "run/0/0/2", duplicate),
        ("return", "run/0/0/3", {}),
        ("dead", "run/0/0/4", {}),  # no answer
        ("chunk", "chunk/1", {}),
        ("drop", "chunk/1", refused),  # not usable
        ("chunk", "chunk/2", {}),  # keeps all
        ("chunk", "chunk/3", {}),
        ("discard", "chunk/3", {}),
        ("refine", "ask/1", {"text": "go east"}),
        ("refine", "ask/2", {"text": None}),  # return
        ("refine", "ask/3", {"text": None}),
        ("drop", "ask/3", refused),  # not usable
    ]
    bank = tmp_path / "bank.sqlite"
    with closing(sqlite3.connect(bank)) as database:
        database.executescript((files("crl.manager.storage") / "schema.sql").read_text("utf-8"))
        columns = "step, extractor, kind, origin, op, data"
        database.executemany(
            f"INSERT INTO log ({columns}) VALUES (0, 0, ?, ?, ?, ?)",
            [(kind, origin, op, json.dumps(data)) for op, (kind, origin, data) in enumerate(rows)],
        )
        database.commit()
    assert smollm2.answers(bank) == {
        "distillations": (3, 4),
        "merges": (2, 3),
        "answers to questions": (2, 3),
    }


def test_replies_of_the_actor_are_counted_over_the_steps() -> None:
    first = {"kind": "train", "total/env_turns": 40, "rollout/invalid_actions": 0.9}
    second = {"kind": "train", "total/env_turns": 60, "rollout/invalid_actions": 0.5}
    second |= {"critic/critiques": 4, "critic/malformed": 0.75}
    last = {"kind": "train", "total/env_turns": 60, "rollout/invalid_actions": 0.0}
    last |= {"critic/critiques": 0, "critic/malformed": None}
    metrics = [{"kind": "bank"}, first, second, last]
    assert smollm2.actor_replies(metrics) == {"actions": (14, 60), "verdicts": (1, 4)}

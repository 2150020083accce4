"""The asynchronous list of a bank: filters, orders and pages, beside a writer too."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from crl.errors import ConfigError, StoreError
from crl.manager import GroupSuccess
from crl.manager.inspection.reading import open_reader
from crl.manager.inspection.upkeep import create_bank
from crl.manager.records import Entry, UnitKey
from crl.serve.pages.bank_list import (
    MAX_TEXT,
    ROWS_PER_PAGE,
    Effect,
    Filters,
    Kind,
    Listing,
    Order,
    Selection,
    Status,
    open_list,
)
from crl.types import Counters, Lift, Place, Provenance, lift_order
from support.bank_commands import finished_run, open_bank, play_second_run
from support.hostile import HOSTILE
from support.managers import bank_of_version_1, hit, request


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("list") / "run")


def listing(
    bank: Path, *, order: Order = Order.lift, reverse: bool = False, page: int = 1, **filters: Any
) -> Listing:
    async def read() -> Listing:
        async with open_list(bank) as entries:
            return await entries.listing(Selection(Filters(**filters), order, reverse, page))

    return asyncio.run(read())


def texts(bank: Path, **choices: Any) -> list[str]:
    return [row.text for row in listing(bank, **choices).rows]


def bank_of(path: Path, counters: Sequence[Counters], texts: Sequence[str] = ()) -> Path:
    create_bank(
        path,
        [
            Entry(
                f"run/0/0/{i}#0", 1, texts[i] if texts else f"Lesson {i}.",
                Place("room", "Get out."),
                Provenance("run/0/0/0", (0, 1), ()), counter,
            )
            for i, counter in enumerate(counters)
        ],
    )  # fmt: skip
    return path


def test_rows_are_those_of_the_bank(run: Path):
    with open_reader(run / "bank.sqlite") as reader:
        entries = {entry.uid: entry for entry in reader.entries(None)}
        step = reader.step()
    found = listing(run / "bank.sqlite", status=Status.all)
    assert found.total == len(entries) > 4
    assert found.step == step
    for row in found.rows:
        entry = entries.pop(row.uid)
        assert (row.text, row.step) == (entry.text, entry.step)
        assert (row.task, row.goal, row.status) == (entry.task, entry.goal, entry.status)
        assert row.counters == entry.counters
    assert entries == {}
    assert sum(found.statuses.values()) == found.total
    assert found.tasks == {"maze": 1, "room": 5}


def test_filters(run: Path):
    bank = run / "bank.sqlite"
    assert texts(bank, words="SOUTHWEST go") == ["Go southwest."]
    assert texts(bank, words="southwest maze") == []
    assert texts(bank, words="LONG hall") == texts(bank, task="maze") != []
    assert {row.task for row in listing(bank, task="maze").rows} == {"maze"}
    assert [row.kind for row in listing(bank, kind=Kind.update).rows] == ["update"]
    assert listing(bank, kind=Kind.imported).total == 0
    active, every = listing(bank), listing(bank, status=Status.all)
    assert active.total < every.total
    assert {row.status for row in listing(bank, status=Status.evicted).rows} == {"evicted"}
    assert texts(bank, min_credit=1) == ["Go southwest."]
    assert texts(bank, effect=Effect.around) == ["Go southwest."]
    assert texts(bank, effect=Effect.above) == []
    assert listing(bank, effect=Effect.unknown).total == active.total - 1


def test_filters_by_age_count_steps_since_the_last_one(run: Path):
    bank = run / "bank.sqlite"
    found = listing(bank, status=Status.all)
    assert found.step == 2
    ages = {row.uid: 2 - row.step for row in found.rows if row.step is not None}
    for age in range(4):
        young = listing(bank, status=Status.all, max_age=age).rows
        assert {row.uid for row in young} == {uid for uid in ages if ages[uid] <= age}
        old = listing(bank, status=Status.all, min_age=age).rows
        assert {row.uid for row in old} == {uid for uid in ages if ages[uid] >= age}


def test_entries_of_another_run_have_no_age(run: Path, tmp_path: Path):
    asyncio.run(play_second_run(run / "bank.sqlite", tmp_path / "bank.sqlite"))
    every = listing(tmp_path / "bank.sqlite")
    assert {row.step for row in every.rows} == {None, 1}
    assert {row.step for row in listing(tmp_path / "bank.sqlite", min_age=0).rows} == {1}


LIFTS = [None, Lift(4, 0.5, 0.1), Lift(1, 1.0), Lift(9, -0.5, 0.2), Lift(40, 0.1, 1.0), Lift(2, 0)]


def test_orders(tmp_path: Path):
    counters = [
        Counters(i, None, 3 * i % 7, float(i * (-1) ** i), 0, lift) for i, lift in enumerate(LIFTS)
    ]
    bank = bank_of(tmp_path / "bank.sqlite", counters)

    def lifts(reverse: bool) -> list[Lift | None]:
        return [row.counters.lift for row in listing(bank, reverse=reverse).rows]

    assert lifts(False) == sorted(LIFTS, key=lift_order)
    assert lifts(True) == sorted(LIFTS, key=lambda lift: lift_order(lift and -lift))
    for order, value in {
        Order.credit: lambda row: row.counters.credit,
        Order.episodes: lambda row: row.counters.credited,
        Order.retrieved: lambda row: row.counters.retrieved,
        Order.written: lambda row: int(row.uid.split("/")[3][0]),
    }.items():
        values = [value(row) for row in listing(bank, order=order).rows]
        assert values == sorted(values, reverse=True)
        back = [value(row) for row in listing(bank, order=order, reverse=True).rows]
        assert back == sorted(values)
    assert texts(bank, order=Order.lesson) == [f"Lesson {i}." for i in range(len(LIFTS))]


def test_pages(tmp_path: Path):
    bank = bank_of(tmp_path / "bank.sqlite", [Counters()] * (2 * ROWS_PER_PAGE + 3))
    pages = [listing(bank, order=Order.written, page=page) for page in (1, 2, 3)]
    assert [len(page.rows) for page in pages] == [ROWS_PER_PAGE, ROWS_PER_PAGE, 3]
    assert pages[0].pages == 3
    uids = [row.uid for page in pages for row in page.rows]
    assert len(set(uids)) == pages[0].total == 2 * ROWS_PER_PAGE + 3
    assert listing(bank, order=Order.written, page=99).rows == pages[2].rows
    assert listing(bank, words="none at all", page=99).rows == []


def test_hostile_texts_and_long_ones(tmp_path: Path):
    long = ["x" * 10 * 2**20, "広" * 10**6, "a\x00b <script>" * 1000]
    hostile = [*HOSTILE, *long]
    bank = bank_of(tmp_path / "bank.sqlite", [Counters()] * len(hostile), hostile)
    rows = listing(bank, order=Order.written, reverse=True).rows
    assert [row.text for row in rows] == [text[:MAX_TEXT] for text in hostile]
    for word in ("a\x00b", "ÜBER-größe", "' OR 1=1 --", "%", "_"):
        found = {row.uid for row in listing(bank, words=word).rows}
        assert found == {
            row.uid
            for row, text in zip(rows, hostile, strict=True)
            if all(part in f"{text} get out. {row.uid}".casefold() for part in
                   word.casefold().split())
        }  # fmt: skip


@pytest.mark.parametrize("column", ["task", "goal", "text"])
def test_empty_texts_are_listed(tmp_path: Path, column: str):
    bank = bank_of(tmp_path / "bank.sqlite", [Counters()] * 2)
    with closing(sqlite3.connect(bank)) as db:
        db.execute(f"UPDATE entries SET {column} = '' WHERE written = 1")
        db.commit()
    assert sorted(getattr(row, column) == "" for row in listing(bank).rows) == [False, True]


def test_a_text_that_is_not_utf_8_is_shown_with_replacements(tmp_path: Path):
    bank = bank_of(tmp_path / "bank.sqlite", [Counters()] * 2)
    with closing(sqlite3.connect(bank)) as db:
        db.execute("UPDATE entries SET text = CAST(x'41eda08042' AS TEXT) WHERE written = 1")
        db.commit()
    assert "A���B" in texts(bank)
    assert listing(bank, words="a b").total == 1


def test_a_bank_of_an_older_version(tmp_path: Path):
    bank = bank_of_version_1(tmp_path / "bank.sqlite")
    found = listing(bank, status=Status.all)
    with open_reader(bank) as reader:
        assert found.total == len(reader.entries(None)) > 0


def test_a_damaged_bank_is_an_error(tmp_path: Path):
    (tmp_path / "bank.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    with pytest.raises(ConfigError):
        listing(tmp_path / "bank.sqlite")
    bank = bank_of(tmp_path / "rows.sqlite", [Counters(1, None, 1, 1.0, 0, Lift(1, 0.5))])
    with closing(sqlite3.connect(bank)) as db:
        db.execute("UPDATE units SET lift_mean = 7")
        db.commit()
    with pytest.raises(StoreError):
        listing(bank)


async def test_reading_while_a_run_writes(tmp_path: Path):
    """Neither side waits for the other, and the readers leave no file beside the bank."""
    bank = tmp_path / "bank.sqlite"
    manager = await open_bank(bank)
    done = asyncio.Event()
    totals: list[int] = []

    async def read() -> None:
        while not done.is_set():
            async with open_list(bank) as entries:
                totals.append((await entries.listing(Selection(Filters(words="o")))).total)

    readers = [asyncio.create_task(read()) for _ in range(4)]
    for step in range(12):
        manager.advance(step)
        await manager.submit(request(step, note="west"))
        await manager.drain()
        await manager.credit([hit("run/0/0/0#0").use], True, episode=f"run/{step}/5/0")
        await manager.record_lifts(
            {f"run/{step}": [GroupSuccess(UnitKey("run/0/0/0#0", 1), guided=0.5, free=0.25)]}
        )
    done.set()
    await asyncio.gather(*readers)
    await manager.aclose()
    assert totals[-1] >= totals[0]
    assert os.listdir(tmp_path) == ["bank.sqlite"]
    async with open_list(bank) as entries:
        assert (await entries.listing(Selection())).total > 1
    assert os.listdir(tmp_path) == ["bank.sqlite"]


def test_rows_are_plain_json(run: Path):
    """Only plain types come from the file, so that a template prints nothing else."""
    for row in listing(run / "bank.sqlite").rows:
        json.dumps([row.uid, row.task, row.goal, row.text, row.status, row.kind, row.step])

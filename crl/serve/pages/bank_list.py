"""Asynchronous list of a bank's entries: filters, orders, pages and counts in SQL."""

from __future__ import annotations

import codecs
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiosqlite

from crl.manager.inspection.reading import STEP_SQL, WRITES_VERSION
from crl.serve.database import open_bank
from crl.types import Counters, Lift

ROWS_PER_PAGE = 50
"""Number of entries on a page of the list."""

MAX_TEXT = 400
"""Number of characters of a text that are read for the list."""


class Kind(StrEnum):
    """Operations that write a version of an entry."""

    add, update, merge = "add", "update", "merge"
    imported = "import"


class Status(StrEnum):
    """Filters by status."""

    active, evicted, merged, all = "active", "evicted", "merged", "all"


class Effect(StrEnum):
    """Filters by the 95 % interval of the lift."""

    above, below, around, unknown = "above", "below", "around", "unknown"


class Order(StrEnum):
    """Orders of the list. The first row has the highest value, or is the newest."""

    lift, credit, episodes, retrieved = "lift", "credit", "episodes", "retrieved"
    written, task, lesson = "written", "task", "lesson"


_EFFECTS: Mapping[Effect, str] = {
    Effect.above: "lift_sign(lift_groups, lift_mean, lift_m2) = 1",
    Effect.below: "lift_sign(lift_groups, lift_mean, lift_m2) = -1",
    Effect.around: "lift_sign(lift_groups, lift_mean, lift_m2) = 0",
    Effect.unknown: "lift_groups = 0",
}

_ORDERS: Mapping[Order, tuple[str, str]] = {
    Order.lift: (
        "lift_groups = 0, lift_low(lift_groups, lift_mean, lift_m2) DESC, lift_mean DESC, "
        "credit DESC",
        "lift_groups = 0, lift_low(lift_groups, -lift_mean, lift_m2) DESC, lift_mean, credit",
    ),
    Order.credit: ("credit DESC", "credit"),
    Order.episodes: ("credited DESC", "credited"),
    Order.retrieved: ("retrieved DESC", "retrieved"),
    Order.written: ("place DESC", "place"),
    Order.task: ("task, goal", "task DESC, goal DESC"),
    Order.lesson: ("text COLLATE NOCASE", "text COLLATE NOCASE DESC"),
}
"""ORDER BY of each order, and of its reverse.

By lift: as `crl.types.lift_order`; reversed, the lowest upper end of the interval comes first.
"""


@dataclass(frozen=True)
class Filters:
    """Entries that the list has."""

    words: str = ""
    """Words that text, goal or uid must contain, in any case; separated by spaces."""
    task: str = ""
    """Task of the entries; empty = all tasks."""
    kind: Kind | None = None
    """Operation that wrote the current version; None = any."""
    status: Status = Status.active
    effect: Effect | None = None
    min_credit: int | None = None
    """Least Σ r, which is the number of won episodes minus that of lost ones."""
    min_age: int | None = None
    """Least number of steps since the current version was written.

    Entries that another run wrote have no age. A filter by age leaves them out.
    """
    max_age: int | None = None
    """Largest number of steps since the current version was written."""


@dataclass(frozen=True)
class Selection:
    """Filters, order and page of the list."""

    filters: Filters = field(default_factory=Filters)
    order: Order = Order.lift
    reverse: bool = False
    page: int = 1
    """Number of the page, from 1."""


@dataclass(frozen=True)
class Row:
    """Entry in the list."""

    uid: str
    status: str
    task: str
    goal: str
    text: str
    """Start of the text; at most `MAX_TEXT` characters."""
    kind: str | None
    """Operation that wrote the current version; None if the log does not have it."""
    step: int | None
    """Completed actor steps when the version was written; None if another run wrote it."""
    counters: Counters


@dataclass(frozen=True)
class Listing:
    """A page of the list."""

    rows: Sequence[Row]
    total: int
    """Number of entries that match the filters."""
    page: int
    """Number of the page, from 1; the last page if there are fewer than asked for."""
    step: int | None
    """Completed actor steps at the last operation; None if no run or another run made it."""
    tasks: Mapping[str, int]
    """Number of entries of each task, in the whole bank."""
    statuses: Mapping[str, int] = field(default_factory=dict)
    """Number of entries of each status, in the whole bank."""

    @property
    def pages(self) -> int:
        """Number of pages; at least 1."""
        return max(1, -(-self.total // ROWS_PER_PAGE))


class BankList:
    """Reader of one snapshot of a bank, created by `open_list`."""

    def __init__(self, db: aiosqlite.Connection, version: int) -> None:
        self._db = db
        # Older schemas have no votes and no lift.
        votes = "votes" if version > 2 else "0 AS votes"
        lift = (
            "lift_groups, lift_mean, lift_m2" if version > 3
            else "0 AS lift_groups, NULL AS lift_mean, 0.0 AS lift_m2"
        )  # fmt: skip
        # With the types of the casts, SQLite makes an index of `written` for the join.
        self._listed = f"""
            WITH written AS MATERIALIZED (
                SELECT CAST(data ->> 'uid' AS TEXT) AS uid,
                    CAST(data ->> 'version' AS INTEGER) AS version, kind, {STEP_SQL} AS step
                FROM log WHERE {WRITES_VERSION}
            ), listed AS (
                SELECT entries.rowid AS place, uid, version, status, task, goal, text, kind, step,
                    retrieved, last_returned_step, credited, credit, {votes}, {lift}
                FROM entries JOIN units USING (uid, version)
                    LEFT JOIN written USING (uid, version)
            )"""

    async def listing(self, selection: Selection) -> Listing:
        """Return the page of the list that a selection asks for."""
        step = await self.step()
        where, parameters = _conditions(selection.filters, step)
        total = await self._count(where, parameters)
        page = min(max(1, selection.page), max(1, -(-total // ROWS_PER_PAGE)))
        order = f"{_ORDERS[selection.order][selection.reverse]}, place DESC"
        found = await self._rows(
            f"{self._listed} SELECT uid FROM listed WHERE {where} ORDER BY {order} "
            f"LIMIT {ROWS_PER_PAGE} OFFSET {(page - 1) * ROWS_PER_PAGE}",
            parameters,
        )
        rows = await self.rows([row["uid"] for row in found])
        return Listing(
            rows, total, page, step, await self._counts("task"), await self._counts("status")
        )

    async def uids(self, filters: Filters) -> list[str]:
        """Return the uids of all entries that match the filters."""
        where, parameters = _conditions(filters, await self.step())
        found = await self._rows(f"{self._listed} SELECT uid FROM listed WHERE {where}", parameters)
        return [row["uid"] for row in found]

    async def rows(self, uids: Sequence[str]) -> list[Row]:
        """Return the entries with these uids, in their order. Unknown uids are left out."""
        places = ", ".join("?" * len(uids))
        cut = ", ".join(
            f"IFNULL(substr(CAST({name} AS BLOB), 1, {4 * MAX_TEXT}), x'') AS {name}"
            for name in ("task", "goal", "text")
        )
        found = await self._rows(
            f"{self._listed} SELECT uid, status, {cut}, kind, step, retrieved, last_returned_step, "
            "credited, credit, votes, lift_groups, lift_mean, lift_m2 "
            f"FROM listed WHERE uid IN ({places})",
            uids,
        )
        rows = {row["uid"]: _row(row) for row in found}
        return [rows[uid] for uid in uids if uid in rows]

    async def step(self) -> int | None:
        """Return the completed actor steps at the last operation, as `BankReader.step`."""
        rows = await self._rows(f"SELECT {STEP_SQL} AS step FROM log ORDER BY seq DESC LIMIT 1")
        return rows[0]["step"] if rows else None

    async def _count(self, where: str, parameters: Sequence[Any]) -> int:
        sql = f"{self._listed} SELECT COUNT(*) AS n FROM listed WHERE {where}"
        return (await self._rows(sql, parameters))[0]["n"]

    async def _counts(self, column: str) -> dict[str, int]:
        sql = f"SELECT {column} AS name, COUNT(*) AS n FROM entries GROUP BY 1 ORDER BY 1"
        return {row["name"]: row["n"] for row in await self._rows(sql)}

    async def _rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        return list(await self._db.execute_fetchall(sql, parameters))


@asynccontextmanager
async def open_list(path: Path) -> AsyncIterator[BankList]:
    """Open a reader of the list of the bank at `path` and close it when the block ends.

    It sees one snapshot. Errors are those of `open_bank`.
    """
    async with open_bank(path) as db:
        db.text_factory = lambda data: data.decode("utf-8", "replace")
        for name, function in _FUNCTIONS.items():
            await db.create_function(name, *function, deterministic=True)
        ((version,),) = await db.execute_fetchall("PRAGMA user_version")
        yield BankList(db, version)


def _conditions(filters: Filters, step: int | None) -> tuple[str, list[Any]]:
    """Return the SQL condition of the filters with its parameters. `step`: the last one."""
    conditions, parameters = ["TRUE"], list[Any]()

    def require(condition: str, *values: Any) -> None:
        conditions.append(condition)
        parameters.extend(values)

    if words := filters.words.casefold().split():
        text = "CAST(text || ' ' || goal || ' ' || uid AS BLOB)"
        require(f"has_words({text}, ?)", " ".join(words))
    if filters.task:
        require("task = ?", filters.task)
    if filters.kind:
        require("kind = ?", filters.kind.value)
    if filters.status is not Status.all:
        require("status = ?", filters.status.value)
    if filters.effect:
        require(_EFFECTS[filters.effect])
    if filters.min_credit is not None:
        require("credit >= ?", filters.min_credit)
    if filters.min_age is not None:
        require("? - step >= ?", step, filters.min_age)
    if filters.max_age is not None:
        require("? - step <= ?", step, filters.max_age)
    return " AND ".join(conditions), parameters


def _has_words(text: bytes, words: str) -> bool:
    """SQL function: whether a text contains all words, which are casefolded."""
    folded = text.decode("utf-8", "replace").casefold()
    return all(word in folded for word in words.split())


def _lift(groups: int, mean: float | None, m2: float) -> Lift | None:
    return Lift(groups, mean, m2) if groups and mean is not None else None


def _lift_low(groups: int, mean: float | None, m2: float) -> float | None:
    """SQL function: lower end of the interval of a lift; NULL if the lift is unknown."""
    lift = _lift(groups, mean, m2)
    return lift.low if lift else None


def _lift_sign(groups: int, mean: float | None, m2: float) -> int | None:
    """SQL function: `Lift.sign`; NULL if the lift is unknown."""
    lift = _lift(groups, mean, m2)
    return lift.sign if lift else None


_FUNCTIONS: Mapping[str, tuple[int, Callable[..., Any]]] = {
    "has_words": (2, _has_words),
    "lift_low": (3, _lift_low),
    "lift_sign": (3, _lift_sign),
}
"""SQL functions of the list: number of arguments and function, by name."""


def _row(row: sqlite3.Row) -> Row:
    counters = Counters(
        row["retrieved"], row["last_returned_step"], row["credited"], row["credit"], row["votes"],
        _lift(row["lift_groups"], row["lift_mean"], row["lift_m2"]),
    )  # fmt: skip
    return Row(
        row["uid"], row["status"], _start(row["task"]), _start(row["goal"]), _start(row["text"]),
        row["kind"], row["step"], counters,
    )  # fmt: skip


def _start(data: bytes) -> str:
    """Return the first `MAX_TEXT` characters. `data` may end within a character."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)[:MAX_TEXT]

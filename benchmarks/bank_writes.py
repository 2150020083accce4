"""Rate of durable submissions to the bank's queue, compared with bare SQLite.

    python benchmarks/bank_writes.py --out benchmarks/results/bank_writes.json

`Store.submit` is called for single episodes, and for 64 and 1,000 episodes at a time. The floor is
a bare `sqlite3` connection with the same durability (WAL, synchronous=FULL). It writes the same
payloads, prepared before the clock starts, with `executemany` into a table of id and payload. One
commit holds one row, or 64 rows. For 1,000 submissions at a time a commit holds 64 rows too,
because the bank commits at most 64 together.

Store and floor alternate on the same disk. The numbers are medians over the repetitions, and the
ratio of store to floor. `with a snapshot`: the bank holds a snapshot to which it can be restored.
An episode has 8 turns and about 1.5 kB.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path

from common import write_results

from crl.manager import DistilRequest, EpisodeId
from crl.manager.records import Stamp
from crl.manager.storage.database import MAX_WORKS_PER_COMMIT
from crl.manager.storage.store import Store
from crl.types import Segment, Task

ROUNDS = {1: 100, 64: 20, 1000: 3}
"""Number of rounds per repetition, by the number of submissions at a time."""

STAMP = Stamp(0, 0)
"""Stamp of every submission."""


def episodes() -> Iterator[DistilRequest]:
    """Yield requests for distillation of distinct episodes."""
    task = Task(
        "room", 7, "train", "Room: the azure cellar. Reach the stairs down (>).", {"lgen": 3}
    )
    turn = (
        Segment(
            "user",
            "you stand at 2 3; a wall lies to the west, a door to the east, and it is dark",
            "env",
        ),
        Segment("assistant", "east", "policy"),
    )
    for i in count():
        yield DistilRequest(
            EpisodeId("run", i // 1024, i // 8, i % 8),
            task,
            turn * 8,
            success=True,
            truncated=False,
        )


async def submit_rate(store: Store, requests: Sequence[DistilRequest], at_a_time: int) -> float:
    """Submit all requests and return the submissions per second."""
    begin = time.perf_counter()
    for start in range(0, len(requests), at_a_time):
        await asyncio.gather(
            *(store.submit(request, STAMP) for request in requests[start : start + at_a_time])
        )
    return len(requests) / (time.perf_counter() - begin)


def floor_rate(db: sqlite3.Connection, requests: Sequence[DistilRequest], at_a_time: int) -> float:
    """Insert all requests with bare SQLite and return the rows per second."""
    rows = [(request.id, request.to_json()) for request in requests]
    begin = time.perf_counter()
    for start in range(0, len(rows), at_a_time):
        db.execute("BEGIN IMMEDIATE")
        db.executemany("INSERT INTO requests VALUES (?, ?)", rows[start : start + at_a_time])
        db.execute("COMMIT")
    return len(rows) / (time.perf_counter() - begin)


async def measure(folder: Path, at_a_time: int, rounds: int, repetitions: int) -> dict[str, float]:
    """Return median rates per second, and their ratios to the floor."""
    stores = {
        "submit": await Store.open(folder / "bank.sqlite"),
        "with a snapshot": await Store.open(folder / "other.sqlite"),
    }
    await stores["with a snapshot"].snapshot(STAMP)
    source = episodes()
    all_rates: dict[str, list[float]] = {name: [] for name in ("floor", *stores)}
    with closing(sqlite3.connect(folder / "floor.sqlite", isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("CREATE TABLE requests (id TEXT PRIMARY KEY, payload TEXT) WITHOUT ROWID")
        for repetition in range(repetitions + 1):
            requests = [next(source) for _ in range(at_a_time * rounds)]
            rates = {"floor": floor_rate(db, requests, min(at_a_time, MAX_WORKS_PER_COMMIT))}
            for name, store in stores.items():
                rates[name] = await submit_rate(store, requests, at_a_time)
            if repetition:  # the first repetition is a warm-up
                for name, rate in rates.items():
                    all_rates[name].append(rate)
    for store in stores.values():
        await store.aclose()
    medians = {name: statistics.median(values) for name, values in all_rates.items()}
    return medians | {f"{name} / floor": medians[name] / medians["floor"] for name in stores}


def table(metrics: Mapping[int, Mapping[str, float]]) -> str:
    names = list(next(iter(metrics.values())))
    lines = [f"{'at a time':>10}" + "".join(f"{name:>24}" for name in names)]
    for at_a_time, rates in metrics.items():
        lines.append(
            f"{at_a_time:>10,}"
            + "".join(f"{rates[n]:>24.2f}" if "/" in n else f"{rates[n]:>22,.0f}/s" for n in names)
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder on the disk to measure (default: the system's temporary folder)",
    )
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    arguments = parser.parse_args()
    metrics = {}
    for at_a_time, rounds in ROUNDS.items():
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            metrics[at_a_time] = asyncio.run(
                measure(Path(folder), at_a_time, rounds, arguments.repetitions)
            )
    print(table(metrics))
    if arguments.out:
        write_results(arguments.out, {"per_second": metrics})


if __name__ == "__main__":
    main()

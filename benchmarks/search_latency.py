"""How long episodes wait for their experience: searches at once, on banks of several sizes, idle and while the bank is written to.

    python benchmarks/search_latency.py --out benchmarks/results/search_latency.json

A burst is `waiting` episode starts at the same moment: groups of 8 that share a query, of four tasks in turn, on one shared bank of lessons
about named places (16 a place), keys by HashEmbedder. Searches go through `ExperienceManager.search` with the paper's N, B, t_max and W.
Embedders: `known` looks vectors up and costs nothing; `hash` is HashEmbedder behind an empty cache in every burst. `writes`: meanwhile
16 updates a second go through submit, distillation by a scripted engine, the store and the index. `merge`: one merge of the whole bank
after the other, by an extractor that takes MERGE_SECONDS for a chunk and keeps everything.

Beside every burst, in turn with it, run its floors. asyncio: a future per request, resolved in batches of 16. numpy: the exact 16 nearest
of each group's query, one after the other, and nothing else. `ray`: a plain Ray actor that does the exact search and the pick for one
call at a time, where Ray is installed (`pip install ray`).

Every figure is the median over bursts of the burst's p50, p95, maximum (ms) and searches per second; `ratio` the median of the burst's
p95 over the sum of the p95 of its two floors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, get_args

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the manager's BLAS has one thread, and so have the floors

import numpy as np
from common import write_results
from numpy.typing import NDArray

from crl.engines.scripted import ScriptedEngine
from crl.manager import CachedEmbedder, DistilRequest, ExperienceManager, ManagerSettings, Prompts, RetrievalSettings
from crl.manager.embed import HashEmbedder
from crl.manager.records import ApplyRules, Distilled, Entry, Generation, Stamp, Write
from crl.manager.store import Store
from crl.protocols import Hit, SearchRequest
from crl.types import Completion, ExperienceUse, Sampling, Segment, Task

BANKS, QUICK_BANKS = (100, 1_000, 10_000, 100_000), (100, 1_000)
WAITING, QUICK_WAITING = (1, 16, 64, 128, 384, 1_024), (1, 384)
GROUP, LESSONS, NEAREST, BATCH, UPDATES = 8, 16, 16, 16, 16
MERGE_SECONDS = 0.02
TASKS = ("room", "maze", "shop", "lab")
SETTINGS = ManagerSettings(scope="shared", retrieval=RetrievalSettings())
COLUMNS = ("p50", "p95", "max", "searches/s")
Vectors = NDArray[np.float32]
Search = Callable[[SearchRequest], Awaitable[Any]]
Load = Literal["idle", "writes", "merge"]


# ── the bank ────────────────────────────────────────────────────────────────────────────────────────────────────────


def goal(place: int) -> str:
    colours = ("azure", "crimson", "sandy", "silent", "golden", "narrow", "frozen", "dusty", "hollow", "bright")
    houses = ("cellar", "attic", "oven", "well", "crypt", "tower", "garden", "library", "kitchen", "chapel")
    a, b, c = place % 10, place // 10 % 10, place // 100 % 10
    return f"Find the stairs of the {colours[a]} {colours[b]} {houses[c]} {place // 1000 or ''}".strip()


def lesson(place: int, rng: random.Random) -> str:
    way = [
        f"{rng.choice(('walk', 'go', 'run'))} {rng.choice(('north', 'south', 'east', 'west'))} {rng.randint(1, 9)} steps" for _ in range(3)
    ]
    return f"{goal(place)}: {', then '.join(way)}."


class Embeddings:
    """`crl.protocols.Embedder`: HashEmbedder's vectors, looked up where they are known; `real`: computed behind an empty cache."""

    def __init__(self) -> None:
        self._hash = HashEmbedder()
        self.name, self.dim = self._hash.name, self._hash.dim
        self.known: dict[str, Vectors] = {}
        self.real: CachedEmbedder | None = None

    async def learn(self, texts: Sequence[str]) -> Vectors:
        vectors = await self._hash.embed(texts)
        self.known.update(zip(texts, vectors, strict=True))
        return vectors

    async def embed(self, texts: Sequence[str]) -> Vectors:
        if self.real:
            return await self.real.embed(texts)
        if any(text not in self.known for text in texts):  # of an update
            return await self._hash.embed(texts)
        return np.stack([self.known[text] for text in texts])

    def forget(self) -> None:
        self.real = CachedEmbedder(self._hash, 4096)


class Characters:
    """Renders and tokenises by characters."""

    stop_ids = (0,)

    def text(self, segments: Sequence[Segment]) -> str:
        return "\n".join(segment.text for segment in segments)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def request(step: int, member: int, text: str, *shown: Hit) -> DistilRequest:
    return DistilRequest("bench", step, 0, member, Task("room", 0, "train", text), (Segment("user", text, "env"),), True, False, shown)


async def fill(path: Path, size: int, embeddings: Embeddings) -> Vectors:
    """Writes a bank of `size` lessons; their keys, in order."""
    rng = random.Random(0)
    texts = [lesson(i // LESSONS, rng) for i in range(size)]
    keys = await embeddings.learn(texts)
    store, stamp = await Store.open(path), Stamp(0, 0)
    await store.set_vectors(embeddings.name, {})
    for start in range(0, size, 1000):
        one = request(0, start, goal(start // LESSONS))
        await store.submit(one, stamp)
        writes = tuple(Write(i, texts[start + i], (0, 1), keys[start + i]) for i in range(min(1000, size - start)))
        await store.apply(
            Distilled(one, Generation(one.id, 0, (1,), Completion((1, 0), (0.0,) * 2, (0,) * 2, "stop"), 0), writes, 0, {}),
            stamp,
            ApplyRules(),
        )
    await store.aclose()
    return keys


class Scribe(ScriptedEngine):
    """Updates what an episode was shown; of a merge it keeps everything, after a while."""

    def __init__(self, renderer: Any) -> None:
        super().__init__(renderer, lambda prompt: json.dumps([{"op": "update", "target": 1, "text": f"{prompt}!"}]))

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None, rng: int | None = None) -> Completion:
        if "".join(map(chr, ids[:6])) != "merge\n":
            return await super().generate(ids, sampling, session=session, rng=rng)
        await asyncio.sleep(MERGE_SECONDS)
        return Completion((*map(ord, "[]"), 0), (0.0,) * 3, (0,) * 3, "stop")


def merge_prompt(entries: Sequence[Entry]) -> list[Segment]:
    return [Segment("user", "\n".join(["merge", *(entry.text for entry in entries)]), "task")]


@asynccontextmanager
async def opened(path: Path, embeddings: Embeddings):
    renderer: Any = Characters()
    prompts = Prompts(lambda one: one.segments, merge_prompt)
    manager = await ExperienceManager.open(path, Scribe(renderer), embeddings, renderer, prompts, SETTINGS, seed=0)
    try:
        yield manager
    finally:
        await manager.aclose()


@asynccontextmanager
async def loaded(manager: ExperienceManager, size: int, load: Load):
    """writes: UPDATES updates a second of entries of the bank, each through the queue, the extractor, the store and the index."""

    async def updates() -> None:
        for member in range(10**9):
            uid = f"bench/0/0/{member % size // 1000 * 1000}#{member % size % 1000}"
            shown = Hit("", ExperienceUse(uid, 1, uid, "start"))
            await manager.submit(request(1 + time.monotonic_ns(), member, goal(member % size // LESSONS), shown))
            await asyncio.sleep(1 / UPDATES)

    async def merges() -> None:
        while True:
            await manager.merge()

    works = {"idle": (), "writes": (manager.run, updates), "merge": (merges,)}[load]
    tasks = [asyncio.create_task(work()) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error


# ── one burst ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def burst(requests: Sequence[SearchRequest], search: Search) -> dict[str, float]:
    """All requests at the same moment. Milliseconds."""
    waits = np.zeros(len(requests))

    async def episode(number: int) -> None:
        begin = time.perf_counter()
        await search(requests[number])
        waits[number] = time.perf_counter() - begin

    begin = time.perf_counter()
    await asyncio.gather(*map(episode, range(len(requests))))
    return figures(waits, time.perf_counter() - begin)


def figures(waits: NDArray[np.float64], seconds: float) -> dict[str, float]:
    p50, p95, most = np.percentile(waits, (50, 95, 100)) * 1000
    return {"p50": p50, "p95": p95, "max": most, "searches/s": len(waits) / seconds}


class Futures:
    """The asyncio floor."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def search(self, request: SearchRequest) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._resolve, self._waiting)
        elif len(self._waiting) == BATCH:
            self._waiting = []
        await future

    def _resolve(self, batch: list[asyncio.Future[None]]) -> None:
        if batch is self._waiting:
            self._waiting = []
        for future in batch:
            future.set_result(None)


def nearest(keys: Vectors, query: Vectors) -> NDArray[np.intp]:
    scores = keys @ query
    best = np.argpartition(scores, -min(NEAREST, len(scores)))[-NEAREST:]
    return best[np.argsort(-scores[best])]


def numpy_floor(keys: Vectors, queries: Sequence[Vectors]) -> dict[str, float]:
    begin, waits = time.perf_counter(), np.zeros(len(queries))
    for number, query in enumerate(queries):
        nearest(keys, query)
        waits[number] = time.perf_counter() - begin
    return figures(waits, waits[-1])


# ── all bursts of one setting ───────────────────────────────────────────────────────────────────────────────────────


class Episodes:
    """Bursts of requests, every group of them new."""

    def __init__(self, size: int) -> None:
        self._places, self._group, self._rng = math.ceil(size / LESSONS), 0, random.Random(1)

    def start(self, waiting: int) -> list[SearchRequest]:
        requests = []
        for member in range(waiting):
            if member % GROUP == 0:
                self._group += 1
                task = Task(TASKS[self._group % len(TASKS)], 0, "train", goal(self._rng.randrange(self._places)))
            requests.append(SearchRequest(task.goal, task, self._group, member % GROUP))
        return requests


async def measure(
    manager: ExperienceManager, embeddings: Embeddings, keys: Vectors, episodes: Episodes, waiting: int, load: Load, seconds: float
) -> dict[str, dict[str, float]]:
    """Medians over bursts, by what ran: known, hash, and the floors; for at least `seconds` and five bursts."""
    seen = {"asyncio": [], "numpy": [], "known": [], "hash": []}

    async def search(request: SearchRequest) -> None:
        await manager.search([request])

    async with loaded(manager, len(keys), load):
        begin = time.monotonic()
        while time.monotonic() - begin < seconds or len(seen["known"]) < 6:
            requests = episodes.start(waiting)
            embeddings.real = None
            await asyncio.sleep(0.01)
            await burst(requests, Futures().search)  # the sleep is over, and the processor awake
            seen["asyncio"].append(await burst(requests, Futures().search))
            seen["numpy"].append(numpy_floor(keys, [embeddings.known[one.query] for one in requests[::GROUP]]))
            seen["known"].append(await burst(requests, search))
            embeddings.forget()
            seen["hash"].append(await burst(episodes.start(waiting), search))
    for name in ("known", "hash"):
        for one, *floors in zip(seen[name], seen["asyncio"], seen["numpy"], strict=True):
            one["ratio"] = one["p95"] / sum(floor["p95"] for floor in floors)
    return {name: medians(bursts[1:]) for name, bursts in seen.items()}  # the first warms up


def medians(bursts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: float(np.median([one[name] for one in bursts])) for name in bursts[0]}


async def bank_latency(size: int, waitings: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        embeddings = Embeddings()
        keys, episodes = await fill(Path(folder) / "bank.sqlite", size, embeddings), Episodes(size)
        await embeddings.learn([goal(place) for place in range(math.ceil(size / LESSONS))])
        async with opened(Path(folder) / "bank.sqlite", embeddings) as manager:
            await asyncio.gather(*manager._searcher._builds)
            for waiting in waitings:
                for load in get_args(Load):
                    measured = await measure(manager, embeddings, keys, episodes, waiting, load, seconds)
                    rows += [{"bank": size, "waiting": waiting, "load": load, "what": what, **row} for what, row in measured.items()]
                    print_rows(rows[-len(measured) :])
        rows += await ray_latency(keys, embeddings, waitings, seconds)
    return rows


# ── a plain Ray actor ───────────────────────────────────────────────────────────────────────────────────────────────


class PlainManager:
    """What a bank as an actor would do, and no more: one call at a time, the exact search and eq. 6, one pick a group."""

    def __init__(self, keys: Vectors, known: Mapping[str, Vectors]) -> None:
        self._keys, self._known, self._counts = keys, known, np.zeros(len(keys))
        self._picks: dict[int, int] = {}

    def search(self, query: str, group: int) -> int:
        if group not in self._picks:
            near = nearest(self._keys, self._known[query])
            pick = int(near[np.argmax(-np.arange(len(near)) - 0.4 * np.log1p(self._counts[near]))])
            self._counts[pick] += 1
            self._picks[group] = pick
        return self._picks[group]


async def ray_latency(keys: Vectors, embeddings: Embeddings, waitings: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """The same bursts, each request a call of one actor; nothing where Ray is not installed."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        return []

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    queries = {goal(place): embeddings.known[goal(place)] for place in range(math.ceil(len(keys) / LESSONS))}
    actor = ray.remote(PlainManager).remote(keys, queries)

    async def search(request: SearchRequest) -> None:
        await actor.search.remote(request.query, request.group)

    rows, episodes = [], Episodes(len(keys))
    for waiting in waitings:
        begin, seen = time.monotonic(), []
        while time.monotonic() - begin < seconds or len(seen) < 6:
            seen.append(await burst(episodes.start(waiting), search))
        rows.append({"bank": len(keys), "waiting": waiting, "load": "idle", "what": "ray", **medians(seen[1:])})
    ray.shutdown()
    print_rows(rows)
    return rows


# ── output ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def print_head() -> None:
    print(f"{'bank':>8}{'waiting':>9}  {'load':<8}{'what':<9}" + "".join(f"{name:>12}" for name in (*COLUMNS, "ratio")))


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        cells = "".join(f"{row[name]:>12,.2f}" for name in COLUMNS) + (f"{row['ratio']:>12.2f}" if "ratio" in row else "")
        print(f"{row['bank']:>8,}{row['waiting']:>9,}  {row['load']:<8}{row['what']:<9}{cells}", flush=True)


def under_load(rows: Sequence[Mapping[str, Any]]) -> str:
    """p95 with writes, and during a merge, over p95 without; the known embedder."""
    p95 = {(row["bank"], row["waiting"], row["load"]): row["p95"] for row in rows if row["what"] == "known"}
    banks, waitings = sorted({bank for bank, _, _ in p95}), sorted({waiting for _, waiting, _ in p95})
    lines = []
    for load in ("writes", "merge"):
        lines.append(f"{f'p95 {load} / idle':>17}" + "".join(f"{waiting:>9,}" for waiting in waitings))
        for bank in banks:
            ratios = [p95[bank, waiting, load] / p95[bank, waiting, "idle"] for waiting in waitings]
            lines.append(f"{bank:>17,}" + "".join(f"{ratio:>9.2f}" for ratio in ratios))
    return "\n".join(lines)


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    banks = sorted({row["bank"] for row in rows})
    figure, grid = pyplot.subplots(1, len(banks), figsize=(4 * len(banks), 4), sharey=True, squeeze=False)
    for axes, bank in zip(grid[0], banks, strict=True):
        for what, load in (
            ("known", "idle"),
            ("known", "writes"),
            ("known", "merge"),
            ("hash", "idle"),
            ("ray", "idle"),
            ("asyncio", "idle"),
            ("numpy", "idle"),
        ):
            line = [(row["waiting"], row["p95"]) for row in rows if (row["bank"], row["what"], row["load"]) == (bank, what, load)]
            if line:
                style = "--" if what in ("asyncio", "numpy") else "-"
                axes.plot(*zip(*line, strict=True), style, marker=".", label=what if load == "idle" else f"{what}, {load}")
        axes.set(xscale="log", yscale="log", xlabel="episodes that start at once", title=f"bank of {bank:,}")
        axes.grid(alpha=0.3)
    grid[0][0].set_ylabel("p95 of the wait (ms)")
    grid[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two banks, few bursts")
    parser.add_argument("--banks", type=int, nargs="+", help="entries")
    parser.add_argument("--waiting", type=int, nargs="+", help="episodes that start at once")
    parser.add_argument("--seconds", type=float, help="of each measurement")
    parser.add_argument("--out", type=Path, help="write the numbers here, as JSON, and a plot beside it")
    arguments = parser.parse_args()
    banks = arguments.banks or (QUICK_BANKS if arguments.quick else BANKS)
    waitings = arguments.waiting or (QUICK_WAITING if arguments.quick else WAITING)
    seconds = arguments.seconds or (0.5 if arguments.quick else 3.0)
    print_head()
    rows = [row for bank in banks for row in asyncio.run(bank_latency(bank, waitings, seconds))]
    print(f"\n{under_load(rows)}")
    if "ray" not in sys.modules:
        print("\nno rows of ray: it is not installed")
    if arguments.out:
        write_results(arguments.out, {"seconds": seconds, "rows": rows})
        plot(rows, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()

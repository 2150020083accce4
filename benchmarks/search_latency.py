"""Time that episodes wait for their experience, on banks of several sizes, idle and under load.

    python benchmarks/search_latency.py --out benchmarks/results/search_latency.json

A burst is `waiting` episode starts at the same moment. Each wait is measured from this moment. A
burst consists of groups of 8 with a common query, of four tasks in turn. All search one shared bank
of lessons about named places (16 per place) with keys by HashEmbedder. Searches use
`ExperienceManager.search` with the paper's N, B, t_max and W.

Embedders:

* `known` looks vectors up and costs nothing.
* `encoder` is measured only when idle. Its cache is empty before every burst. Behind the cache, an
  encoder of MiniLM-L6's size with random weights runs on one thread. It has the cost of a real
  encoder; the search itself uses the vectors of `known`.

Loads:

* `writes`: 16 updates per second pass through submit, distillation by a scripted engine, the store
  and the index.
* `merge`: the whole bank is merged again and again. The extractor takes MERGE_SECONDS per chunk.
  For one in MERGES_ONE_IN chunks it merges two entries into one. A new entry is then distilled, so
  that the size of the bank stays constant.
* `compute`: a thread computes in Python, like an engine between its kernels. It holds the
  interpreter's lock whenever the event loop releases it.

`writes` and `merge` are measured after their first operation was applied.

Floors are measured in alternation with every burst. asyncio: one future per request, resolved in
batches of 16. numpy: only the exact 16 nearest keys of each group's query, one query after the
other. `ray`: a plain Ray actor that performs the exact search and the choice for one call at a
time. It is measured if Ray is installed (`pip install '.[benchmarks]'`).

Metrics are computed over all waits of all bursts: p50, p95 and maximum (ms), and searches per
second of waiting. `ratio`: p95 divided by the sum of the p95 of the two floors. `updates/s` and
`merges/s`: applied operations per second.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import math
import os
import random
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

# One BLAS thread for the floors, as for the manager.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from common import write_plot, write_results
from numpy.typing import NDArray

from crl.config.schema import BankSection
from crl.embedders.cached import CachedEmbedder
from crl.embedders.hash import HashEmbedder
from crl.engines.scripted import ScriptedEngine
from crl.manager import (
    DistilRequest,
    EpisodeId,
    ExperienceManager,
    ManagerSettings,
    Prompts,
)
from crl.manager.records import Distilled, Entry, Generation, Stamp, Write
from crl.manager.storage.store import Store
from crl.protocols import Embedder, Hit, SearchRequest
from crl.run.main import frozen_heap
from crl.types import Completion, ExperienceUse, Sampling, Segment, Task

BANKS, QUICK_BANKS = (100, 1_000, 10_000, 100_000), (100, 1_000)
WAITING, QUICK_WAITING = (1, 16, 64, 128, 384, 1_024), (1, 384)
GROUP, LESSONS, NEAREST, BATCH, UPDATES = 8, 16, 16, 16, 16
MERGE_SECONDS, MERGES_ONE_IN = 0.02, 2
TASKS = ("room", "maze", "shop", "lab")
SETTINGS = ManagerSettings(bank=BankSection(scope="shared"))
COLUMNS = ("p50", "p95", "max", "searches/s")
LOAD_OPS = {"writes": "update", "merge": "merge"}
"""Counted operation of each load."""
EXTRA_COLUMNS = ("ratio", *(f"{kind}s/s" for kind in LOAD_OPS.values()))
"""Columns that only some rows have."""
Vectors = NDArray[np.float32]
Waits = NDArray[np.float64]
"""Waits of one burst, in seconds."""
Search = Callable[[SearchRequest], Awaitable[Any]]
Load = Literal["idle", "writes", "merge", "compute"]


# ── the bank ──────────────────────────────────────────────────────────────────────────────────────


def goal(place: int) -> str:
    """Return the goal of a place."""
    colours = (
        "azure",
        "crimson",
        "sandy",
        "silent",
        "golden",
        "narrow",
        "frozen",
        "dusty",
        "hollow",
        "bright",
    )
    houses = (
        "cellar",
        "attic",
        "oven",
        "well",
        "crypt",
        "tower",
        "garden",
        "library",
        "kitchen",
        "chapel",
    )
    a, b, c = place % 10, place // 10 % 10, place // 100 % 10
    return (
        f"Find the stairs of the {colours[a]} {colours[b]} {houses[c]} {place // 1000 or ''}"
    ).strip()


def lesson(place: int, rng: random.Random) -> str:
    """Return a random lesson about a place."""
    steps = [
        f"{rng.choice(('walk', 'go', 'run'))} {rng.choice(('north', 'south', 'east', 'west'))} "
        f"{rng.randint(1, 9)} steps"
        for _ in range(3)
    ]
    return f"{goal(place)}: {', then '.join(steps)}."


class LookupEmbedder:
    """`crl.protocols.Embedder` that looks up the vectors of HashEmbedder.

    After `use_encoder`, `encoder` embeds the texts too, behind a cache that is empty at first.
    `stop_encoder` ends this.
    """

    def __init__(self, encoder: Embedder) -> None:
        self._hash, self._encoder = HashEmbedder(), encoder
        self.name, self.dim = self._hash.name, self._hash.dim
        self.vectors: dict[str, Vectors] = {}
        self._cached: CachedEmbedder | None = None

    async def store(self, texts: Sequence[str]) -> Vectors:
        """Compute and store the vectors of `texts`."""
        vectors = await self._hash.embed(texts)
        self.vectors.update(zip(texts, vectors, strict=True))
        return vectors

    async def embed(self, texts: Sequence[str]) -> Vectors:
        if self._cached:
            await self._cached.embed(texts)
        if any(text not in self.vectors for text in texts):  # the text of an update
            return await self._hash.embed(texts)
        return np.stack([self.vectors[text] for text in texts])

    def use_encoder(self) -> None:
        """Embed texts with the encoder from now on, with an empty cache."""
        self._cached = CachedEmbedder(self._encoder, 4096)

    def stop_encoder(self) -> None:
        """Stop embedding texts with the encoder."""
        self._cached = None


@contextmanager
def random_encoder(folder: Path):
    """Yield an encoder of MiniLM-L6's size with random weights and the tiny actor's tokenizer."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    from crl.config.models import resolve_model
    from crl.embedders.encoder import EncoderEmbedder
    from crl.embedders.recipe import read_encoder_settings

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny-actor"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=384, num_hidden_layers=6, num_attention_heads=12,
        intermediate_size=1536,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    encoder = EncoderEmbedder(read_encoder_settings(folder), "cpu")
    try:
        yield encoder
    finally:
        encoder.close()


class CharacterRenderer:
    """Renderer and tokenizer by characters, with nothing between segments."""

    stop_ids = (0,)

    def text(self, segments: Sequence[Segment]) -> str:
        return "".join(segment.text for segment in segments)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def request(step: int, member: int, text: str, *shown: Hit) -> DistilRequest:
    return DistilRequest(
        EpisodeId("bench", step, 0, member),
        Task("room", 0, "train", text),
        (Segment("user", text, "env"),),
        True,
        False,
        shown,
    )


async def write_bank(path: Path, size: int, embeddings: LookupEmbedder) -> Vectors:
    """Write a bank of `size` lessons and return their keys, in order."""
    rng = random.Random(0)
    texts = [lesson(i // LESSONS, rng) for i in range(size)]
    keys = await embeddings.store(texts)
    store, stamp = await Store.open(path), Stamp(0, 0)
    await store.set_vectors(embeddings.name, {})
    for start in range(0, size, 1000):
        first_request = request(0, start, goal(start // LESSONS))
        await store.submit(first_request, stamp)
        writes = tuple(
            Write(i, texts[start + i], (0, 1), keys[start + i])
            for i in range(min(1000, size - start))
        )
        await store.apply(
            Distilled(
                first_request,
                Generation(
                    first_request.id, 0, (1,), Completion((1, 0), (0.0,) * 2, (0,) * 2, "stop"), 0
                ),
                writes,
                0,
                {},
            ),
            stamp,
            SETTINGS.rules,
        )
    await store.aclose()
    return keys


class ScriptedExtractor(ScriptedEngine):
    """Engine that writes the op in the first line of its prompt.

    A merge takes MERGE_SECONDS. Only one in MERGES_ONE_IN chunks changes entries.
    """

    def __init__(self, renderer: Any) -> None:
        super().__init__(renderer, self._write)
        self._chunks = itertools.count(1)

    def _write(self, prompt: str) -> str:
        op, *texts = prompt.split("\n")
        if op != "merge":
            return json.dumps([{"op": op, "target": 1, "text": f"{texts[0]}!"}])
        if next(self._chunks) % MERGES_ONE_IN:
            return "[]"
        last = len(texts)  # the last two texts were in no earlier chunk
        return json.dumps([{"op": "merge", "targets": [last - 1, last], "text": texts[-2]}])

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        rng: int | None = None,
    ) -> Completion:
        if "".join(map(chr, ids[:6])) == "merge\n":
            await asyncio.sleep(MERGE_SECONDS)
        return await super().generate(ids, sampling, session=session, rng=rng)


def distil_prompt(request: DistilRequest) -> list[Segment]:
    return [Segment("user", "update\n" if request.shown else "add\n", "task"), *request.segments]


def merge_prompt(entries: Sequence[Entry]) -> list[Segment]:
    return [Segment("user", "\n".join(["merge", *(entry.text for entry in entries)]), "task")]


@asynccontextmanager
async def open_manager(path: Path, embeddings: LookupEmbedder):
    """Yield the manager of a bank, and close it at exit."""
    renderer: Any = CharacterRenderer()
    prompts = Prompts(distil_prompt, merge_prompt)
    manager = await ExperienceManager.open(
        path, ScriptedExtractor(renderer), embeddings, renderer, prompts, SETTINGS, seed=0
    )
    try:
        yield manager
    finally:
        await manager.aclose()


@asynccontextmanager
async def run_load(manager: ExperienceManager, size: int, load: Load):
    """Run a load on the manager while the block runs. The load is active when the block starts.

    `writes`: UPDATES updates of entries per second, each through queue, extractor, store and index.
    `merge`: merges, and new entries that replace the merged ones through the same path.
    """
    entries, rng = manager._bank.entries, random.Random(2)

    async def count_applied() -> int:
        return (await manager.stats()).get(f"ops/{LOAD_OPS.get(load)}", 0)

    async def updates() -> None:
        begin = time.monotonic()
        for member, uid in enumerate(itertools.cycle(list(entries))):
            entry = entries[uid]  # in its current version: an update of an old one is not applied
            shown = Hit("", ExperienceUse(uid, entry.version, entry.provenance.generation, "start"))
            await manager.submit(request(1 + time.monotonic_ns(), member, entry.goal, shown))
            await asyncio.sleep(max(0.0, begin + (member + 1) / UPDATES - time.monotonic()))

    async def adds() -> None:
        for member in itertools.count():
            await asyncio.sleep(MERGE_SECONDS)
            if len(entries) < size:
                place = rng.randrange(math.ceil(size / LESSONS))
                await manager.submit(request(1 + time.monotonic_ns(), member, lesson(place, rng)))

    async def merges() -> None:
        while True:
            await manager.merge()

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    jobs = {"writes": (manager.run, updates), "merge": (manager.run, adds, merges)}.get(load, ())
    tasks, stop = [asyncio.create_task(job()) for job in jobs], threading.Event()
    thread = threading.Thread(target=compute)
    if load == "compute":
        thread.start()
    try:
        before = await count_applied()
        while tasks and await count_applied() == before:
            ended, _ = await asyncio.wait(
                tasks, timeout=MERGE_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if ended:  # by an error, which is raised below
                break
        yield
    finally:
        stop.set()
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error


# ── one burst ─────────────────────────────────────────────────────────────────────────────────────


async def burst(requests: Sequence[SearchRequest], search: Search) -> Waits:
    """Start all requests at the same moment and return their waits in seconds.

    The waits are measured from this moment, also for requests that the event loop starts later.
    """
    waits = np.zeros(len(requests))

    async def episode(number: int) -> None:
        await search(requests[number])
        waits[number] = time.perf_counter() - begin

    episodes = [asyncio.create_task(episode(number)) for number in range(len(requests))]
    begin = time.perf_counter()
    await asyncio.gather(*episodes)
    return waits


def metrics(bursts: Sequence[Waits]) -> dict[str, float]:
    """Return statistics in milliseconds over all bursts except the first, which is a warm-up."""
    p50, p95, maximum = np.percentile(np.concatenate(bursts[1:]), (50, 95, 100)) * 1000
    return {
        "p50": p50,
        "p95": p95,
        "max": maximum,
        "searches/s": sum(map(len, bursts[1:])) / sum(burst.max() for burst in bursts[1:]),
    }


class FutureFloor:
    """Floor of asyncio: futures that are resolved in batches."""

    def __init__(self) -> None:
        self._batch: list[asyncio.Future[None]] = []

    async def search(self, request: SearchRequest) -> None:
        future = asyncio.get_running_loop().create_future()
        self._batch.append(future)
        if len(self._batch) == 1:
            asyncio.get_running_loop().call_soon(self._resolve, self._batch)
        elif len(self._batch) == BATCH:
            self._batch = []
        await future

    def _resolve(self, batch: list[asyncio.Future[None]]) -> None:
        if batch is self._batch:
            self._batch = []
        for future in batch:
            future.set_result(None)


def nearest(keys: Vectors, query: Vectors) -> NDArray[np.intp]:
    """Return the indices of the NEAREST best keys, best first."""
    scores = keys @ query
    best = np.argpartition(scores, -min(NEAREST, len(scores)))[-NEAREST:]
    return best[np.argsort(-scores[best])]


def numpy_floor(keys: Vectors, queries: Sequence[Vectors]) -> Waits:
    """Return the waits of exact searches that run one after the other."""
    begin, waits = time.perf_counter(), np.zeros(len(queries))
    for number, query in enumerate(queries):
        nearest(keys, query)
        waits[number] = time.perf_counter() - begin
    return waits


# ── all bursts of one setting ─────────────────────────────────────────────────────────────────────


class BurstRequests:
    """Bursts of requests. Every group is new."""

    def __init__(self, size: int) -> None:
        self._places, self._group, self._rng = math.ceil(size / LESSONS), 0, random.Random(1)

    def next_burst(self, waiting: int) -> list[SearchRequest]:
        """Return the requests of the next burst."""
        requests = []
        for member in range(waiting):
            if member % GROUP == 0:
                self._group += 1
                task = Task(
                    TASKS[self._group % len(TASKS)],
                    0,
                    "train",
                    goal(self._rng.randrange(self._places)),
                )
            requests.append(SearchRequest(task.goal, task, self._group, member % GROUP))
        return requests


async def measure(
    manager: ExperienceManager,
    embeddings: LookupEmbedder,
    keys: Vectors,
    episodes: BurstRequests,
    waiting: int,
    load: Load,
    seconds: float,
) -> dict[str, dict[str, float]]:
    """Return measurements by name: the floors, `known`, and `encoder` if idle.

    The measurement takes at least `seconds` and five bursts, without the warm-up.
    """
    bursts_by_name: dict[str, list[Waits]] = {
        "asyncio": [],
        "numpy": [],
        "known": [],
        "encoder": [],
    }

    async def search(request: SearchRequest) -> None:
        await manager.search([request])

    op = LOAD_OPS.get(load)
    async with run_load(manager, len(keys), load):
        before, begin = await manager.stats(), time.monotonic()
        while time.monotonic() - begin < seconds or len(bursts_by_name["known"]) < 6:
            requests = episodes.next_burst(waiting)
            await asyncio.sleep(0.01)
            # Warm-up: wake the processor after the sleep.
            await burst(requests, FutureFloor().search)
            bursts_by_name["asyncio"].append(await burst(requests, FutureFloor().search))
            bursts_by_name["numpy"].append(
                numpy_floor(keys, [embeddings.vectors[r.query] for r in requests[::GROUP]])
            )
            bursts_by_name["known"].append(await burst(requests, search))
            if load == "idle":
                embeddings.use_encoder()
                bursts_by_name["encoder"].append(await burst(episodes.next_burst(waiting), search))
                embeddings.stop_encoder()
        after, elapsed = await manager.stats(), time.monotonic() - begin
    results = {name: metrics(waits) for name, waits in bursts_by_name.items() if waits}
    results["known"]["ratio"] = results["known"]["p95"] / (
        results["asyncio"]["p95"] + results["numpy"]["p95"]
    )
    if op:
        results["known"][f"{op}s/s"] = (
            after.get(f"ops/{op}", 0) - before.get(f"ops/{op}", 0)
        ) / elapsed
    return results


async def bank_latency(size: int, waitings: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder, random_encoder(Path(folder)) as encoder:
        embeddings = LookupEmbedder(encoder)
        keys, episodes = (
            await write_bank(Path(folder) / "bank.sqlite", size, embeddings),
            BurstRequests(size),
        )
        await embeddings.store([goal(place) for place in range(math.ceil(size / LESSONS))])
        async with open_manager(Path(folder) / "bank.sqlite", embeddings) as manager:
            await asyncio.gather(*manager._searcher._builds)
            for waiting, load in itertools.product(waitings, get_args(Load)):
                with frozen_heap():  # as in a run
                    measured = await measure(
                        manager, embeddings, keys, episodes, waiting, load, seconds
                    )
                rows += [
                    {"bank": size, "waiting": waiting, "load": load, "what": name, **row}
                    for name, row in measured.items()
                ]
                print_rows(rows[-len(measured) :])
        rows += await ray_latency(keys, embeddings, waitings, seconds)
    return rows


# ── a plain Ray actor ─────────────────────────────────────────────────────────────────────────────


class PlainManager:
    """Minimal bank as an actor: one call at a time, exact search, eq. 6, one choice per group."""

    def __init__(self, keys: Vectors, vectors: Mapping[str, Vectors]) -> None:
        self._keys, self._vectors, self._counts = keys, vectors, np.zeros(len(keys))
        self._choices: dict[int, int] = {}

    def search(self, query: str, group: int) -> int:
        if group not in self._choices:
            candidates = nearest(self._keys, self._vectors[query])
            ranks, counts = np.arange(len(candidates)), self._counts[candidates]
            choice = int(candidates[np.argmax(-ranks - 0.4 * np.log1p(counts))])
            self._counts[choice] += 1
            self._choices[group] = choice
        return self._choices[group]


async def ray_latency(
    keys: Vectors, embeddings: LookupEmbedder, waitings: Sequence[int], seconds: float
) -> list[dict[str, Any]]:
    """Measure the same bursts with one actor call per request; empty if Ray is not installed."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        return []

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    queries = {
        goal(place): embeddings.vectors[goal(place)]
        for place in range(math.ceil(len(keys) / LESSONS))
    }
    actor = ray.remote(PlainManager).remote(keys, queries)

    async def search(request: SearchRequest) -> None:
        await actor.search.remote(request.query, request.group)

    rows, episodes = [], BurstRequests(len(keys))
    for waiting in waitings:
        begin, bursts = time.monotonic(), []
        while time.monotonic() - begin < seconds or len(bursts) < 6:
            bursts.append(await burst(episodes.next_burst(waiting), search))
        rows.append(
            {
                "bank": len(keys),
                "waiting": waiting,
                "load": "idle",
                "what": "ray",
                **metrics(bursts),
            }
        )
    ray.shutdown()
    print_rows(rows)
    return rows


# ── output ────────────────────────────────────────────────────────────────────────────────────────


def print_head() -> None:
    print(
        f"{'bank':>8}{'waiting':>9}  {'load':<8}{'what':<9}"
        + "".join(f"{name:>12}" for name in (*COLUMNS, *EXTRA_COLUMNS))
    )


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        cells = "".join(
            f"{row[name]:>12,.2f}" if name in row else " " * 12
            for name in (*COLUMNS, *EXTRA_COLUMNS)
        )
        print(
            f"{row['bank']:>8,}{row['waiting']:>9,}  {row['load']:<8}"
            f"{row['what']:<9}{cells}".rstrip(),
            flush=True,
        )


def load_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of p95 under each load divided by p95 when idle, for the known embedder."""
    p95 = {
        (row["bank"], row["waiting"], row["load"]): row["p95"]
        for row in rows
        if row["what"] == "known"
    }
    banks, waitings = (
        sorted({bank for bank, _, _ in p95}),
        sorted({waiting for _, waiting, _ in p95}),
    )
    lines = []
    for load in get_args(Load)[1:]:
        lines.append(
            f"{f'p95 {load} / idle':>17}" + "".join(f"{waiting:>9,}" for waiting in waitings)
        )
        for bank in banks:
            ratios = [p95[bank, waiting, load] / p95[bank, waiting, "idle"] for waiting in waitings]
            lines.append(f"{bank:>17,}" + "".join(f"{ratio:>9.2f}" for ratio in ratios))
    return "\n".join(lines)


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    banks = sorted({row["bank"] for row in rows})
    figure, grid = pyplot.subplots(
        1, len(banks), figsize=(4 * len(banks), 4), sharey=True, squeeze=False
    )
    for axes, bank in zip(grid[0], banks, strict=True):
        for source, load in (
            ("known", "idle"),
            ("known", "writes"),
            ("known", "merge"),
            ("known", "compute"),
            ("encoder", "idle"),
            ("ray", "idle"),
            ("asyncio", "idle"),
            ("numpy", "idle"),
        ):
            points = [
                (row["waiting"], row["p95"])
                for row in rows
                if (row["bank"], row["what"], row["load"]) == (bank, source, load)
            ]
            if points:
                style = "--" if source in ("asyncio", "numpy") else "-"
                axes.plot(
                    *zip(*points, strict=True),
                    style,
                    marker=".",
                    label=source if load == "idle" else f"{source}, {load}",
                )
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="episodes that start at once",
            title=f"bank of {bank:,}",
        )
        axes.grid(alpha=0.3)
    grid[0][0].set_ylabel("p95 of the wait (ms)")
    grid[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="two banks, five bursts per measurement"
    )
    parser.add_argument("--banks", type=int, nargs="+", help="sizes of the banks, in entries")
    parser.add_argument(
        "--waiting", type=int, nargs="+", help="numbers of episodes that start at once"
    )
    parser.add_argument("--seconds", type=float, help="seconds per measurement")
    parser.add_argument(
        "--out", type=Path, help="JSON file for the numbers; the plot is written beside it"
    )
    arguments = parser.parse_args(argv)
    banks = arguments.banks or (QUICK_BANKS if arguments.quick else BANKS)
    waitings = arguments.waiting or (QUICK_WAITING if arguments.quick else WAITING)
    seconds = arguments.seconds or (0.0 if arguments.quick else 3.0)
    print_head()
    rows = [row for bank in banks for row in asyncio.run(bank_latency(bank, waitings, seconds))]
    print(f"\n{load_table(rows)}")
    if not any(row["what"] == "ray" for row in rows):
        print("\nRay was not measured because it is not installed (pip install '.[benchmarks]')")
    if arguments.out:
        write_results(arguments.out, {"seconds": seconds, "rows": rows})
        write_plot(plot, rows, arguments.out)


if __name__ == "__main__":
    main()

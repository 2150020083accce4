"""Time of a run's searches with and without open pages of `crl serve`.

    python benchmarks/serve_load.py --out benchmarks/results/serve_load.json

The run: a bank of `--bank` lessons, as in search_latency.py, under its load `writes`: 16 updates
per second through submit, distillation by a scripted engine, the store and the index. A line of
metrics is written each second. Bursts of WAITING searches are measured with
`ExperienceManager.search`, one after the other.

`crl serve` runs in a process of its own during all measurements. A further process at the lowest
priority has `--pages` open pages of the run, as browsers have them: each holds its event stream,
fetches the parts that change, and loads the list, the overview and the bank anew every RELOAD_S
seconds. Phases without and with pages alternate, so that a change of the machine's load changes
both.

p50, p95 and maximum (ms) are over all searches of all phases of a kind. `ratio`: p95 with pages
divided by p95 without. `noise`: the same quotient for the two halves of the phases without pages,
the larger by the smaller. `responses`: responses to the pages, without events.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from common import write_results
from search_latency import (
    BurstRequests,
    LookupEmbedder,
    Waits,
    burst,
    goal,
    open_manager,
    run_load,
    write_bank,
)

from crl.config.load import dump, load
from crl.embedders.hash import HashEmbedder
from crl.manager import ExperienceManager
from crl.monitor.files import FileMonitor
from crl.monitor.run_dir import RunDir
from crl.protocols import SearchRequest
from crl.run.main import frozen_heap

RUN = "run"
"""Name of the run."""

WAITING = 128
"""Searches of a burst: episode starts at the same moment."""

PAUSE_S = 0.05
"""Seconds between two bursts."""

RELOAD_S = 5.0
"""Seconds between two loads of the same page."""

LESSONS = 16
"""Lessons of a goal, as in search_latency.py."""


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────


class Browser:
    """Open pages of the run `run` of a server, in threads of this process."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._host, self._port = parts.hostname or "", parts.port
        self._lock = threading.Lock()
        self.responses = 0
        """Number of responses so far, without events."""

    def get(self, path: str) -> None:
        """Load a page."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=120)
        try:
            connection.request("GET", path)
            connection.getresponse().read()
        finally:
            connection.close()
        with self._lock:
            self.responses += 1

    def reload(self) -> None:
        """Load pages anew, again and again."""
        while True:
            for path in ("/", f"/runs/{RUN}", f"/runs/{RUN}/bank"):
                self.get(path)
            time.sleep(RELOAD_S)

    def listen(self, is_open: threading.Event) -> None:
        """Hold an event stream, and fetch the parts that it names."""
        connection = http.client.HTTPConnection(self._host, self._port)
        connection.request("GET", f"/runs/{RUN}/events")
        for line in connection.getresponse():
            is_open.set()
            if line.startswith(b"data: "):
                for name in json.loads(line.removeprefix(b"data: ")):
                    self.get(f"/runs/{RUN}/parts/{name}")


def browse(address: str, pages: int) -> None:
    """Hold open pages until stdin ends. Print a line when all are open, and one at the end.

    The last line is the number of responses.
    """
    os.nice(19)
    browser = Browser(address)
    opened = [threading.Event() for _ in range(pages)]
    for event in opened:
        for target, arguments in ((browser.reload, ()), (browser.listen, (event,))):
            threading.Thread(target=target, args=arguments, daemon=True).start()
    for event in opened:
        event.wait()
    print("open", flush=True)
    sys.stdin.read()
    print(browser.responses, flush=True)
    os._exit(0)  # the threads wait for the server


@asynccontextmanager
async def open_pages(address: str, pages: int) -> AsyncIterator[list[int]]:
    """Hold open pages inside the block, in a process of their own. 0 pages: none.

    The yielded list gets the number of responses at the end.
    """
    responses: list[int] = []
    if not pages:
        yield responses
        return
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--browse", address, "--pages", str(pages),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin
    assert process.stdout
    try:
        if not await process.stdout.readline():
            raise RuntimeError("the process with the pages has ended")
        yield responses
        process.stdin.close()
        responses.append(int(await process.stdout.readline()))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@contextmanager
def server(root: Path) -> Iterator[str]:
    """Run `crl serve` inside the block. Yield its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "crl", "serve", str(root), "--port", "0"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout
        yield process.stdout.readline().split()[0]
    finally:
        process.terminate()
        process.wait()


# ── the run ───────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def logging_run(run: RunDir) -> Iterator[None]:
    """Write a line of metrics each second inside the block, as a process that trains the run."""
    stop = threading.Event()

    def write() -> None:
        step = 0
        while not stop.wait(1.0):
            step += 1
            values = {"rollout/success/free": 0.5, "time/train": 1.0, "actor/loss": 1.0 / step}
            monitor.log(step, "train", values)
            monitor.log(step, "bank", {"bank/size": step})

    with run.lock():
        monitor = FileMonitor(run)
        thread = threading.Thread(target=write)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            monitor.close()


async def searches(
    manager: ExperienceManager, episodes: BurstRequests, seconds: float
) -> list[Waits]:
    """Return the waits of the bursts of `seconds`, at least two bursts."""

    async def search(request: SearchRequest) -> None:
        await manager.search([request])

    bursts, begin = [], time.monotonic()
    while time.monotonic() - begin < seconds or len(bursts) < 2:
        bursts.append(await burst(episodes.next_burst(WAITING), search))
        await asyncio.sleep(PAUSE_S)
    return bursts


async def measure(bank: int, pages: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Measure `rounds` phases of `seconds` without and with `pages`. Return the results."""
    responses: list[int] = []
    found: dict[int, list[list[Waits]]] = {0: [], pages: []}
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir.create(Path(folder) / RUN)
        dump(load(["room"], options={"run.steps": 100_000}), run.config)
        embeddings, episodes = LookupEmbedder(HashEmbedder()), BurstRequests(bank)
        await write_bank(run.bank, bank, embeddings)
        await embeddings.store([goal(place) for place in range(-(-bank // LESSONS))])
        async with open_manager(run.bank, embeddings) as manager:
            await asyncio.gather(*manager._searcher._builds)
            with server(run.path.parent) as address, logging_run(run), frozen_heap():
                async with run_load(manager, bank, "writes"):
                    await searches(manager, episodes, 0)  # warm-up
                    for number in range(2 * rounds):
                        # 0, P, P, 0: a drift of the machine's speed changes both kinds alike
                        shown = (0, pages, pages, 0)[number % 4]
                        async with open_pages(address, shown) as counted:
                            found[shown].append(await searches(manager, episodes, seconds))
                        responses += counted
    return {
        "bank": bank, "pages": pages, "waiting": WAITING, "seconds": seconds, "rounds": rounds,
        "without": statistics_of(found[0]), "with": statistics_of(found[pages]),
        "ratio": p95(found[pages]) / p95(found[0]), "noise": noise(found[0]),
        "responses": sum(responses),
    }  # fmt: skip


def statistics_of(phases: Sequence[Sequence[Waits]]) -> dict[str, float]:
    """Return statistics of all waits in milliseconds."""
    p50, ninety_five, maximum = np.percentile(_all(phases), (50, 95, 100)) * 1000
    return {"p50": p50, "p95": ninety_five, "max": maximum, "searches": len(_all(phases))}


def p95(phases: Sequence[Sequence[Waits]]) -> float:
    return float(np.percentile(_all(phases), 95))


def noise(phases: Sequence[Sequence[Waits]]) -> float | None:
    """Return the quotient of the p95 of every second phase and of the others, at least 1.

    None for a single phase.
    """
    if len(phases) < 2:
        return None
    low, high = sorted((p95(phases[::2]), p95(phases[1::2])))
    return high / low


def _all(phases: Sequence[Sequence[Waits]]) -> Waits:
    return np.concatenate([waits for bursts in phases for waits in bursts])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small bank and two short phases")
    parser.add_argument("--bank", type=int, default=1_000, help="size of the bank, in entries")
    parser.add_argument("--pages", type=int, default=10, help="number of open pages")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of a phase")
    parser.add_argument("--rounds", type=int, default=6, help="phases with and without pages")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    parser.add_argument("--browse", metavar="ADDRESS", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.browse:
        browse(given.browse, given.pages)
    if given.quick:
        given.bank, given.seconds, given.rounds = 100, 1.0, 1
    results = asyncio.run(measure(given.bank, given.pages, given.seconds, given.rounds))
    for name in ("without", "with"):
        row = results[name]
        print(
            f"{name:>8} pages: p50 {row['p50']:.2f} ms, p95 {row['p95']:.2f} ms, "
            f"max {row['max']:.2f} ms, {row['searches']:,} searches"
        )
    known = "" if results["noise"] is None else f" (noise {results['noise']:.2f})"
    print(f"p95 with / without pages: {results['ratio']:.2f}{known}; "
          f"{results['responses']:,} responses to {results['pages']} pages")  # fmt: skip
    if given.out:
        write_results(given.out, results)


if __name__ == "__main__":
    main()

"""Reports about runs in which nothing finishes."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from crl.errors import StallError
from crl.run.supervision import watchdog as module
from crl.run.supervision.watchdog import Watchdog


class Clock:
    """Clock that tests set."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    return clock


async def wait_for(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 600)


@pytest_asyncio.fixture
async def waiting() -> AsyncIterator[None]:
    """Let three tasks wait in `wait_for`."""
    event = asyncio.Event()
    tasks = [asyncio.create_task(wait_for(event), name=f"group {i}") for i in range(3)]
    await asyncio.sleep(0)
    yield
    event.set()
    await asyncio.gather(*tasks)


@pytest.mark.usefixtures("waiting")
async def test_a_stall_is_reported_once_with_the_places_of_all_tasks(clock: Clock):
    notes: list[str] = []
    logged: list[str] = []
    watchdog = Watchdog(300, ends_run=False, note=notes.append, log=logged.append)
    watchdog.details = lambda: ["3 of 8 steps completed"]
    for now in (1100, 1299):
        clock.now = now
        watchdog.check()
    assert (notes, logged) == ([], [])
    for now in (1310, 1400, 2000):
        clock.now = now
        watchdog.check()
    text = "nothing has finished for 310 s (run.stall_seconds)"
    assert notes == [f"warning: {text}; log.txt shows where each part waits"]
    (report,) = logged
    first, *lines = report.splitlines()
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d {re.escape(text)}", first)
    (groups,) = [line for line in lines if line.startswith("  3 × group: ")]
    assert "in wait_for, for 210 s" in groups, "since the first look"
    assert lines[-1] == "  3 of 8 steps completed"


async def test_every_stall_is_reported(clock: Clock):
    notes: list[str] = []
    watchdog = Watchdog(300, ends_run=False, note=notes.append, log=lambda text: None)
    for now in (1300, 1500, 1700, 1799):
        clock.now = now
        watchdog.check()
        if now == 1500:
            watchdog.progress()
    assert len(notes) == 1
    clock.now = 1800
    watchdog.check()
    assert len(notes) == 2


async def test_a_stalled_run_can_end(clock: Clock):
    watchdog = Watchdog(300, ends_run=True, note=print, log=print)
    clock.now = 1300
    with pytest.raises(StallError, match="the run has stalled: nothing has finished for 300 s"):
        watchdog.check()


async def run_for(watchdog: Watchdog, looks: int) -> None:
    """Run a watchdog until it has looked `looks` times at the tasks."""
    done = asyncio.Event()
    check = watchdog.check

    def counted() -> None:
        nonlocal looks
        check()
        looks -= 1
        if not looks:
            done.set()

    watchdog.check = counted
    running = asyncio.create_task(watchdog.run())
    ended = asyncio.create_task(done.wait())
    await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    running.cancel()
    await asyncio.wait({running})


async def test_the_time_before_the_start_does_not_count(clock: Clock):
    watchdog = Watchdog(2, ends_run=True, note=print, log=print)
    clock.now += 1000  # models are loaded
    await run_for(watchdog, 2)


async def test_a_blocked_loop_is_reported_while_it_is_blocked_and_does_not_end_the_run():
    reported = threading.Event()
    notes: list[str] = []
    logged: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        reported.set()

    watchdog = Watchdog(2, ends_run=True, note=note, log=logged.append)
    asyncio.get_running_loop().call_later(0.05, reported.wait, 30)
    await run_for(watchdog, 3)
    text = "the event loop has been blocked for 2 s (run.stall_seconds)"
    assert notes == [f"warning: {text}; log.txt has the stack of its thread"]
    (report,) = logged
    first, *stack = report.splitlines()
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d [\d:]{{8}} {re.escape(text)}\. .*:", first)
    assert any("waiter.acquire(" in line for line in stack), "the call that blocks"
    assert not any("_watch_loop" in line for line in stack)


async def test_a_loop_that_runs_without_progress_ends_the_run():
    with pytest.raises(StallError):
        await run_for(Watchdog(1, ends_run=True, note=print, log=print), 1000)
    await asyncio.sleep(0.2)
    assert "crl-watchdog" not in {thread.name for thread in threading.enumerate()}


async def test_the_watchdog_can_be_off():
    await Watchdog(0, ends_run=True, note=print, log=print).run()

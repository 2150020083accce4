"""Reports about runs in which nothing finishes."""

from __future__ import annotations

import asyncio
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
    assert notes == [f"warning: {text}; log.txt says which part waits for what"]
    (report,) = logged
    first, *lines = report.splitlines()
    assert first == text
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


async def test_the_watchdog_can_be_off():
    await Watchdog(0, ends_run=True, note=print, log=print).run()

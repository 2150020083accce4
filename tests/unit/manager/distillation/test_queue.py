"""Queue of episodes with `run` and `drain` at the same time.

Either of them may fail or be cancelled. Each processes only the requests that it has leased.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl.config.schema import ExtractorSection
from crl.errors import EngineError
from crl.manager import ManagerSettings
from crl.manager.distillation.queue import DistilQueue, Outcome
from crl.manager.records import Distilled, DistilRequest, Generation, Stamp
from crl.manager.storage.store import Store
from crl.types import Completion
from support.doors import until
from support.managers import add, answering, open_manager, request

AT = Stamp(0, 0)
RULES = ManagerSettings().rules


class QueueHarness:
    """Queue whose extractor answers when the test sets a result.

    `waiting` maps the id of each request in progress to the future of its answer.
    """

    def __init__(self, store: Store, concurrency: int = 2) -> None:
        self.store, self.waiting = store, dict[str, asyncio.Future[None]]()
        self.queue = DistilQueue(
            store,
            ManagerSettings(extractor=ExtractorSection(concurrency=concurrency)),
            lambda: AT,
            self._attempt,
            self._settle,
        )

    async def _attempt(self, leased: DistilRequest) -> Distilled:
        assert leased.id not in self.waiting, "leased twice"
        answer = self.waiting[leased.id] = asyncio.get_running_loop().create_future()
        try:
            await answer
        finally:
            del self.waiting[leased.id]
        generation = Generation(leased.id, 0, (1,), Completion((2,), (-0.1,), (0,), "stop"), 0)
        return Distilled(leased, generation, (), 1, {})

    async def _settle(self, leased: DistilRequest, outcome: Outcome) -> None:
        assert isinstance(outcome, Distilled)
        await self.store.apply(outcome, AT, RULES)
        await self.queue.count_settled()

    async def states(self) -> dict[str, str]:
        return {
            row["id"]: row["state"]
            for row in await self.store._database.rows("SELECT id, state FROM requests")
        }


@asynccontextmanager
async def open_harness(folder: Path, **options: int):
    store = await Store.open(folder / "bank.sqlite")
    store._database.connection.execute("PRAGMA synchronous = OFF")  # no power failure in this test
    try:
        yield QueueHarness(store, **options)
    finally:
        await store.aclose()


async def cancel_all(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_failed_drain_releases_only_its_own_requests(tmp_path: Path) -> None:
    async with open_harness(tmp_path) as harness:
        await harness.queue.submit(request(member=0))
        draining = asyncio.create_task(harness.queue.drain())
        await until(lambda: "run/0/0/0" in harness.waiting)
        running = asyncio.create_task(harness.queue.run())
        await harness.queue.submit(request(member=1))
        await until(lambda: "run/0/0/1" in harness.waiting)
        harness.waiting["run/0/0/0"].set_exception(EngineError("gone"))
        with pytest.raises(ExceptionGroup):
            await draining
        assert await harness.states() == {"run/0/0/0": "pending", "run/0/0/1": "leased"}
        harness.waiting["run/0/0/1"].set_result(None)
        await until(lambda: not harness.waiting)
        await cancel_all(running)
        assert await harness.states() == {"run/0/0/0": "pending", "run/0/0/1": "done"}


async def test_a_cancelled_run_releases_only_its_own_requests(tmp_path: Path) -> None:
    async with open_harness(tmp_path) as harness:
        await harness.queue.submit(request(member=0))
        draining = asyncio.create_task(harness.queue.drain())
        await until(lambda: "run/0/0/0" in harness.waiting)
        running = asyncio.create_task(harness.queue.run())
        await harness.queue.submit(request(member=1))
        await until(lambda: "run/0/0/1" in harness.waiting)
        await cancel_all(running)
        assert await harness.states() == {"run/0/0/0": "leased", "run/0/0/1": "pending"}
        harness.waiting["run/0/0/0"].set_result(None)
        await draining
        assert await harness.states() == {"run/0/0/0": "done", "run/0/0/1": "pending"}


async def test_a_second_drain_waits_for_the_first_one(
    tmp_path: Path,
) -> None:
    async with open_harness(tmp_path) as harness:
        await harness.queue.submit(request())
        drains = [asyncio.create_task(harness.queue.drain()) for _ in range(2)]
        await until(lambda: bool(harness.waiting))
        await asyncio.wait(drains, timeout=0.02)
        assert not any(drain.done() for drain in drains)
        harness.waiting["run/0/0/0"].set_result(None)
        await asyncio.gather(*drains)
        assert await harness.states() == {"run/0/0/0": "done"}


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancelled_lease_holds_no_requests(turns: int, tmp_path: Path) -> None:
    async with open_harness(tmp_path) as harness:
        await harness.store.submit(request(), AT)
        leasing = asyncio.create_task(harness.store.lease())
        for _ in range(turns):
            await asyncio.sleep(0)
        cancelled = leasing.cancel()
        await asyncio.wait({leasing})
        assert await harness.states() == {"run/0/0/0": "pending" if cancelled else "leased"}


async def test_a_rollback_during_a_drain_is_refused(tmp_path: Path) -> None:
    manager = await open_manager(
        tmp_path / "bank.sqlite", answering(lambda prompt: add("Go west."))
    )
    seq = await manager.snapshot()
    await manager.submit(request())
    draining = asyncio.create_task(manager.drain())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="cannot be rolled back while requests"):
        await manager.rollback(seq)
    await draining
    await manager.rollback(seq)
    await manager.aclose()


KINDS = ["submit", "run", "drain", "answer", "fail", "cancel", "turn"]
SCHEDULES = st.lists(
    st.tuples(st.sampled_from([*KINDS, "submit", "drain", "answer"]), st.integers(0, 5))
)


@settings(max_examples=100, deadline=None)
@given(schedule=SCHEDULES)
def test_every_request_is_done_once_despite_failures_and_cancellations(
    schedule: Sequence[tuple[str, int]],
) -> None:
    async def play(folder: Path) -> None:
        async with open_harness(folder) as harness:
            running: asyncio.Task[None] | None = None
            drains: list[asyncio.Task[None]] = []
            for member, (kind, n) in enumerate(schedule):
                answers = sorted(
                    name for name, answer in harness.waiting.items() if not answer.done()
                )
                match kind:
                    case "submit":
                        await harness.queue.submit(request(member=member))
                    case "run" if running is None or running.done():
                        running = asyncio.create_task(harness.queue.run())
                    case "drain":
                        drains.append(asyncio.create_task(harness.queue.drain()))
                    case "answer" | "fail" if answers:
                        answer = harness.waiting[answers[n % len(answers)]]
                        answer.set_result(None) if kind == "answer" else answer.set_exception(
                            EngineError("gone")
                        )
                    case "cancel" if tasks := [task for task in (running, *drains) if task]:
                        tasks[n % len(tasks)].cancel()
                    case _:
                        await asyncio.sleep(n / 2000)
            await cancel_all(*drains, *([running] if running else []))
            assert not harness.queue.busy
            assert set((await harness.states()).values()) <= {"pending", "done"}, "no lease is left"
            last = asyncio.create_task(harness.queue.drain())
            while not last.done():
                for answer in [answer for answer in harness.waiting.values() if not answer.done()]:
                    answer.set_result(None)
                await asyncio.wait({last}, timeout=0.001)
            await last
            assert set((await harness.states()).values()) <= {"done"}
            counts = await harness.store.counts()
            assert counts["ops/return"] == sum(kind == "submit" for kind, _ in schedule)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder)))

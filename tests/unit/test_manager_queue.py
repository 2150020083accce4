"""The queue of episodes with `run` and `drain` at the same time.

Either of them may fail or be cancelled. Each processes only the requests that it has leased.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from doors import until
from extractors import add, answering, manager, request
from hypothesis import given, settings
from hypothesis import strategies as st

from crl.errors import EngineError
from crl.manager import ManagerSettings
from crl.manager.queue import DistilQueue, Outcome
from crl.manager.records import ApplyRules, Distilled, DistilRequest, Generation, Stamp
from crl.manager.store import Store
from crl.types import Completion

AT = Stamp(0, 0)
RULES = ApplyRules(None, None)


class Desk:
    """Queue whose extractor answers when the test sets a result.

    `waiting` maps the id of each request in progress to the future of its answer.
    """

    def __init__(self, store: Store, concurrency: int = 2) -> None:
        self.store, self.waiting = store, dict[str, asyncio.Future[None]]()
        self.queue = DistilQueue(
            store, ManagerSettings(concurrency=concurrency), lambda: AT, self._attempt, self._settle
        )

    async def _attempt(self, one: DistilRequest) -> Distilled:
        assert one.id not in self.waiting, "in the hands of two"
        answer = self.waiting[one.id] = asyncio.get_running_loop().create_future()
        try:
            await answer
        finally:
            del self.waiting[one.id]
        generation = Generation(one.id, 0, (1,), Completion((2,), (-0.1,), (0,), "stop"), 0)
        return Distilled(one, generation, (), 1, {})

    async def _settle(self, one: DistilRequest, outcome: Outcome) -> None:
        assert isinstance(outcome, Distilled)
        await self.store.apply(outcome, AT, RULES)
        await self.queue.count_settled()

    async def states(self) -> dict[str, str]:
        return {
            row["id"]: row["state"]
            for row in await self.store._database.rows("SELECT id, state FROM requests")
        }


@asynccontextmanager
async def desk(folder: Path, **options: int):
    store = await Store.open(folder / "bank.sqlite")
    store._database.connection.execute("PRAGMA synchronous = OFF")  # no power failure in this test
    try:
        yield Desk(store, **options)
    finally:
        await store.aclose()


async def ended(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_drain_that_fails_leaves_the_others_requests_alone(tmp_path: Path) -> None:
    async with desk(tmp_path) as at:
        await at.queue.submit(request(member=0))
        draining = asyncio.create_task(at.queue.drain())
        await until(lambda: "run/0/0/0" in at.waiting)
        running = asyncio.create_task(at.queue.run())
        await at.queue.submit(request(member=1))
        await until(lambda: "run/0/0/1" in at.waiting)
        at.waiting["run/0/0/0"].set_exception(EngineError("gone"))
        with pytest.raises(ExceptionGroup):
            await draining
        assert await at.states() == {"run/0/0/0": "pending", "run/0/0/1": "leased"}
        at.waiting["run/0/0/1"].set_result(None)
        await until(lambda: not at.waiting)
        await ended(running)
        assert await at.states() == {"run/0/0/0": "pending", "run/0/0/1": "done"}


async def test_a_run_that_ends_leaves_the_others_requests_alone(tmp_path: Path) -> None:
    async with desk(tmp_path) as at:
        await at.queue.submit(request(member=0))
        draining = asyncio.create_task(at.queue.drain())
        await until(lambda: "run/0/0/0" in at.waiting)
        running = asyncio.create_task(at.queue.run())
        await at.queue.submit(request(member=1))
        await until(lambda: "run/0/0/1" in at.waiting)
        await ended(running)
        assert await at.states() == {"run/0/0/0": "leased", "run/0/0/1": "pending"}
        at.waiting["run/0/0/0"].set_result(None)
        await draining
        assert await at.states() == {"run/0/0/0": "done", "run/0/0/1": "pending"}


async def test_a_second_drain_returns_when_the_first_ones_requests_are_settled_too(
    tmp_path: Path,
) -> None:
    async with desk(tmp_path) as at:
        await at.queue.submit(request())
        drains = [asyncio.create_task(at.queue.drain()) for _ in range(2)]
        await until(lambda: bool(at.waiting))
        await asyncio.wait(drains, timeout=0.02)
        assert not any(one.done() for one in drains)
        at.waiting["run/0/0/0"].set_result(None)
        await asyncio.gather(*drains)
        assert await at.states() == {"run/0/0/0": "done"}


@pytest.mark.parametrize("turns", range(6))
async def test_who_is_cancelled_while_it_leases_holds_nothing(turns: int, tmp_path: Path) -> None:
    async with desk(tmp_path) as at:
        await at.store.submit(request(), AT)
        leasing = asyncio.create_task(at.store.lease())
        for _ in range(turns):
            await asyncio.sleep(0)
        cancelled = leasing.cancel()
        await asyncio.wait({leasing})
        assert await at.states() == {"run/0/0/0": "pending" if cancelled else "leased"}


async def test_a_bank_is_not_rolled_back_under_a_drain(tmp_path: Path) -> None:
    made = await manager(tmp_path / "bank.sqlite", answering(lambda prompt: add("Go west.")))
    seq = await made.snapshot()
    await made.submit(request())
    draining = asyncio.create_task(made.drain())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="not rolled back while requests or a merge are in work"):
        await made.rollback(seq)
    await draining
    await made.rollback(seq)
    await made.aclose()


KINDS = ["submit", "run", "drain", "answer", "fail", "cancel", "turn"]
SCHEDULES = st.lists(
    st.tuples(st.sampled_from([*KINDS, "submit", "drain", "answer"]), st.integers(0, 5))
)


@settings(max_examples=100, deadline=None)
@given(schedule=SCHEDULES)
def test_whoever_fails_or_is_cancelled_every_request_is_done_once_and_never_in_two_hands(
    schedule: Sequence[tuple[str, int]],
) -> None:
    async def play(folder: Path) -> None:
        async with desk(folder) as at:
            running: asyncio.Task[None] | None = None
            drains: list[asyncio.Task[None]] = []
            for member, (kind, n) in enumerate(schedule):
                answers = sorted(name for name, answer in at.waiting.items() if not answer.done())
                match kind:
                    case "submit":
                        await at.queue.submit(request(member=member))
                    case "run" if running is None or running.done():
                        running = asyncio.create_task(at.queue.run())
                    case "drain":
                        drains.append(asyncio.create_task(at.queue.drain()))
                    case "answer" | "fail" if answers:
                        answer = at.waiting[answers[n % len(answers)]]
                        answer.set_result(None) if kind == "answer" else answer.set_exception(
                            EngineError("gone")
                        )
                    case "cancel" if tasks := [task for task in (running, *drains) if task]:
                        tasks[n % len(tasks)].cancel()
                    case _:
                        await asyncio.sleep(n / 2000)
            await ended(*drains, *([running] if running else []))
            assert not at.queue.busy
            assert set((await at.states()).values()) <= {"pending", "done"}, (
                "whoever is gone holds nothing"
            )
            last = asyncio.create_task(at.queue.drain())
            while not last.done():
                for answer in [answer for answer in at.waiting.values() if not answer.done()]:
                    answer.set_result(None)
                await asyncio.wait({last}, timeout=0.001)
            await last
            assert set((await at.states()).values()) <= {"done"}
            counts = await at.store.counts()
            assert counts["ops/return"] == sum(kind == "submit" for kind, _ in schedule)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder)))

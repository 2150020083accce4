"""Guarantees of the read-write lock under random schedules.

The holders may fail, be cancelled or time out.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl.manager.retrieval.lock import ReadWriteLock

# ── random schedules ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Plan:
    """Schedule of one task that wants the lock. All times are in turns of the event loop."""

    kind: Literal["read", "write"]
    comes: int
    """Time at which the task asks for the lock."""
    holds: int
    """Time for which the task holds the lock."""
    fails: bool
    """True if the task raises `Failed` while it holds the lock."""
    cancelled_after: int | None
    """Time from `comes` to the cancellation, or None if the task is not cancelled."""


PLANS = st.lists(
    st.builds(
        Plan,
        st.sampled_from(["read", "write"]),
        st.integers(0, 12),
        st.integers(0, 4),
        st.booleans(),
        st.none() | st.integers(0, 8),
    ),
    max_size=14,
)


@dataclass
class History:
    """Record of the tasks that asked for the lock and of those that received the lock."""

    inside: list[str] = field(default_factory=list)
    """Kinds of the tasks that hold the lock now."""
    came: list[int] = field(default_factory=list)
    """Numbers of the plans in the order of their requests."""
    entered: list[int] = field(default_factory=list)
    """Numbers of the plans in the order in which they received the lock."""


class Failed(Exception):
    pass


async def yield_turns(n: int) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


async def hold_lock(number: int, plan: Plan, lock: ReadWriteLock, history: History) -> None:
    history.came.append(number)
    async with lock.read() if plan.kind == "read" else lock.write():
        history.entered.append(number)
        assert not history.inside or {plan.kind, *history.inside} == {"read"}, (
            "a writer shares the lock"
        )
        history.inside.append(plan.kind)
        try:
            await yield_turns(plan.holds)
            if plan.fails:
                raise Failed
        finally:
            history.inside.remove(plan.kind)


async def run_plans(plans: Sequence[Plan], lock: ReadWriteLock) -> History:
    """Run all plans to their ends and return the history.

    The number of turns is larger than any schedule needs. A task that is still waiting after these
    turns has lost a wake-up.
    """
    history, tasks = History(), {}
    for now in range(24):
        for number, plan in enumerate(plans):
            if plan.comes == now:
                tasks[number] = asyncio.create_task(hold_lock(number, plan, lock, history))
            if plan.cancelled_after is not None and plan.comes + plan.cancelled_after == now:
                tasks[number].cancel()
        await asyncio.sleep(0)
    await yield_turns(sum(plan.holds + 4 for plan in plans))
    assert all(task.done() for task in tasks.values()), "a lost wake-up"
    for task, ended in zip(
        tasks.values(), await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True
    ):
        assert task.cancelled() or ended is None or isinstance(ended, Failed), ended
    return history


async def check_guarantees(plans: Sequence[Plan]) -> None:
    lock = ReadWriteLock()
    history = await run_plans(plans, lock)
    assert not history.inside
    for first, second in itertools.combinations(history.entered, 2):
        in_order = history.came.index(first) < history.came.index(second)
        assert in_order or plans[first].kind == plans[second].kind == "read", (
            "the order of arrival was violated"
        )
    async with asyncio.timeout(60), lock.write():  # the lock is free again
        pass


@settings(max_examples=300)
@given(PLANS)
async def test_the_lock_is_exclusive_fair_and_free_at_the_end(
    plans,
):
    await check_guarantees(plans)


@pytest.mark.soak
@settings(max_examples=20_000, deadline=None)
@given(PLANS)
async def test_the_lock_is_correct_in_thousands_of_schedules(plans):
    await check_guarantees(plans)


async def test_readers_share_the_lock():
    lock, inside = ReadWriteLock(), asyncio.Barrier(3)

    async def reader() -> int:
        async with lock.read():
            return await inside.wait()

    async with asyncio.timeout(60):
        assert sorted(await asyncio.gather(*(reader() for _ in range(3)))) == [0, 1, 2]


async def test_a_timeout_while_waiting_leaves_the_lock_free():
    lock = ReadWriteLock()
    async with lock.read():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0), lock.write():
                raise AssertionError("a writer beside a reader")
    async with asyncio.timeout(60), lock.write():
        pass

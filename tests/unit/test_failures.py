"""Reports of failures: which errors of a task group end a run."""

from __future__ import annotations

import asyncio

import pytest

from crl.failures import TaskGroup, reported, reporting


async def fail_when_cancelled() -> None:
    try:
        await asyncio.sleep(600)
    finally:
        raise OSError("the game does not close")


async def in_groups() -> None:
    """Run work in two nested groups."""
    async with TaskGroup() as outer:

        async def inner() -> None:
            async with TaskGroup() as group:
                group.create_task(fail_when_cancelled())
                await asyncio.sleep(0)

        outer.create_task(inner())


async def reported_alone() -> None:
    with reported():
        await fail_when_cancelled()


@pytest.mark.parametrize("work", [in_groups, reported_alone])
async def test_an_error_of_work_that_is_being_cancelled_is_no_failure(work) -> None:
    failures: list[BaseException] = []
    with reporting(failures.append):
        task = asyncio.create_task(work())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
    assert not task.cancelled()
    assert task.exception(), "the caller sees the error"
    assert failures == []


async def test_the_first_error_is_reported_before_other_tasks_have_ended() -> None:
    failures: list[BaseException] = []
    released, failed = asyncio.Event(), asyncio.Event()

    def report(error: BaseException) -> None:
        failures.append(error)
        failed.set()

    async def slow() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            await released.wait()

    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("first")

    async def work() -> None:
        async with TaskGroup() as tasks:
            tasks.create_task(slow())
            tasks.create_task(fail())

    with reporting(report):
        task = asyncio.create_task(work())
        await failed.wait()
        assert not task.done()
        released.set()
        with pytest.raises(ExceptionGroup):
            await task
    assert isinstance(failures[0], KeyError)

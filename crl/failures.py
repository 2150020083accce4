"""Reports of failures that are made before anything is closed.

`asyncio.TaskGroup` raises the error of a task when all other tasks of the group have ended. This
may take long: a training step in a thread cannot be cancelled. An exit stack raises the error of
its body when all its parts are closed. This may take long too: a rank may hang.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Report = Callable[[BaseException], object]

_report: ContextVar[Report | None] = ContextVar("report", default=None)


@contextmanager
def reporting(report: Report) -> Iterator[None]:
    """Pass the failures of all `TaskGroup`s and `reported` blocks of this context to `report`."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


@contextmanager
def reported() -> Iterator[None]:
    """Report an error of the body, which ends the run, unless the body is being cancelled."""
    try:
        yield
    except BaseException as error:
        _failed(error)
        raise


class TaskGroup(asyncio.TaskGroup):
    """`asyncio.TaskGroup` for work whose errors end the run.

    An error of a task that is being cancelled is not reported. The task is cancelled because of an
    earlier error, which has been reported, or because the run is interrupted. An interrupted run
    has the time that it needs to write its checkpoint.
    """

    def create_task(self, *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
        task = super().create_task(*args, **kwargs)
        task.add_done_callback(_ended)
        return task

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *rest: Any
    ) -> bool | None:
        if error:
            _failed(error)
        return await super().__aexit__(kind, error, *rest)


def _ended(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _failed(error, task)


def _failed(error: BaseException, task: asyncio.Task[Any] | None = None) -> None:
    """Report an error of `task`, by default of the current one."""
    report = _report.get()
    if not report or isinstance(error, asyncio.CancelledError):
        return
    task = task or asyncio.current_task()
    if not (task and task.cancelling()):
        report(error)

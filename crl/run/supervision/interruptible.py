"""Execution of work that the first Ctrl-C cancels and the second one ends at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from crl.errors import Interrupted
from crl.run.models import print_to_stderr
from crl.run.supervision.ending import exit_now, first_cause
from crl.run.supervision.signals import INTERRUPTED, Interrupts, do_nothing

T = TypeVar("T")

AGAIN = "(press Ctrl-C again to exit immediately)"


def run_evaluation(work: Coroutine[Any, Any, T], name: str) -> T:
    """Return the result of `work`, an evaluation whose results are not saved before its end.

    The first Ctrl-C cancels it, with a line on stderr. Raise `Interrupted` then. The second one
    ends the process. `name` names the evaluation in the lines.
    """
    lost = f"nothing of {name} is saved"
    interrupts = Interrupts(lambda: exit_now(INTERRUPTED, f"exiting immediately: {lost}"))
    interrupts.stop = do_nothing  # until the event loop runs
    with interrupts.handled():
        try:
            return asyncio.run(
                interruptible(
                    work, interrupts, lambda: print_to_stderr(f"interrupted: {lost} {AGAIN}")
                )
            )
        except asyncio.CancelledError as error:
            raise Interrupted from error


async def interruptible(
    work: Coroutine[Any, Any, T], interrupts: Interrupts, note: Callable[[], object]
) -> T:
    """Await `work`. The first interrupt calls `note` and cancels it.

    Raise `CancelledError` then, and the first error of an exception group.
    """
    event_loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop() -> None:
        note()
        task.cancel()

    interrupts.stop = lambda: event_loop.call_soon_threadsafe(stop)
    if interrupts.received:
        stop()
    try:
        return await work
    except BaseExceptionGroup as group:
        raise (cause := first_cause(group)) from cause.__cause__ or group
    finally:
        interrupts.stop = do_nothing  # only the outputs have to be closed

"""Ends of a run's process that do not wait for its parts."""

from __future__ import annotations

import os
import shlex
import threading
import traceback
from asyncio import CancelledError
from collections.abc import Callable
from contextlib import suppress

from crl.child_processes import kill_owned
from crl.errors import CrlError
from crl.monitor.run_dir import RunDir
from crl.protocols import Monitor
from crl.run.checkpoint import complete_steps
from crl.scratch import remove_own_folders
from crl.wording import counted, printable_lines

FAILURE_LIMIT_S = 8.0
"""Seconds after a failure in which the parts of a run have to close."""

SCREEN_LIMIT_S = 1.0
"""Seconds that an immediate exit may spend on closing the screen, and again on the rest."""

STDERR = 2
"""File descriptor of stderr."""

exit_process: Callable[[int], object] = os._exit
"""Function that ends the process without closing anything. A test replaces it."""


class Ending:
    """End of a run's process: after a failure, or at a second Ctrl-C.

    After a failure, the parts of the run are closed in order, and a checkpoint is written if it can
    be. If a part does not end in time, for example a training step, the process ends without it.
    """

    def __init__(self, run: RunDir, screen: Monitor) -> None:
        self._run, self._screen = run, screen
        self._timer: threading.Timer | None = None
        self.completed_steps: Callable[[], int] = int
        """Function that returns the number of completed steps."""

    def failed(self, error: BaseException) -> None:
        """Record a failure of the run. The first one starts the time limit."""
        if self._timer is None and not isinstance(error, CancelledError | KeyboardInterrupt):
            self._timer = threading.Timer(FAILURE_LIMIT_S, self._expire, (error,))
            self._timer.daemon = True
            self._timer.start()

    def done(self) -> None:
        """Record that all parts have been closed, so that the time limit has no effect."""
        if self._timer:
            self._timer.cancel()

    def _expire(self, error: BaseException) -> None:
        failure = logged_failure(first_cause(error), self._run)
        self.exit_now(failure.exit_code, f"error: {' '.join(str(failure).split())}")

    def interrupted_again(self, code: int) -> None:
        """Exit with `code`. Print what is lost, and the command that continues the run."""
        done, saved = self.completed_steps(), max(complete_steps(self._run.checkpoints), default=-1)
        if saved < 0:
            lost = "the run has no checkpoint, so all of it is lost"
        else:
            steps = counted(done - saved, "step") if done > saved else "what happened"
            verb = "are" if done - saved > 1 else "is"
            lost = (
                f"{steps} after the checkpoint of step {saved} {verb} lost. "
                f"Continue with: {resume_command(self._run)}"
            )
        self.exit_now(code, f"exiting immediately: {lost}")

    def exit_now(self, code: int, text: str) -> None:
        """End the process without closing its parts, except the screen. Print `text` on stderr."""
        exit_now(code, text, self._screen.close)  # the screen may have to restore the terminal


def exit_now(code: int, text: str, close_screen: Callable[[], object] = lambda: None) -> None:
    """End the process without closing its parts. Print `text` on stderr.

    The screen is closed first. `text` is printed even if the screen does not close in time. Engines
    and ranks are killed. Workers of environments end when they notice the end of this process.
    """
    lock, exited = threading.Lock(), False

    def print_and_exit() -> None:
        nonlocal exited
        with lock:
            if exited:
                return
            with suppress(Exception):
                # Not print: a signal may have interrupted another print.
                os.write(STDERR, f"{printable_lines(text)}\n".encode())
            exited = True
            with suppress(Exception):
                kill_owned()
            with suppress(Exception):
                remove_own_folders()
            exit_process(code)

    timers = [
        threading.Timer(SCREEN_LIMIT_S, print_and_exit),
        threading.Timer(2 * SCREEN_LIMIT_S, exit_process, (code,)),  # stderr may block too
    ]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        with suppress(Exception):
            close_screen()
    finally:
        timers[0].cancel()
        print_and_exit()
        timers[1].cancel()


def first_cause(error: BaseException) -> BaseException:
    """Return `error`, or the first error in a group that is not itself a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def resume_command(run: RunDir) -> str:
    """Return the command that continues the run."""
    return f"crl resume {shlex.quote(str(run.path))}"


def logged_failure(error: BaseException, run: RunDir) -> CrlError:
    """Append the traceback of `error` to the run's log. Return the error that ends the run.

    Its message says where the traceback is, and names the last checkpoint with the command that
    continues the run. If the log cannot be written (for example, because the disk is full), the
    message says so. An error that is no `CrlError` is its cause.
    """
    note = log_traceback(error, run)
    if steps := complete_steps(run.checkpoints):
        note += f"; last checkpoint: step {steps[-1]}; continue with: {resume_command(run)}"
    if isinstance(error, CrlError):
        error.args = (f"{error} ({note})",)
        return error
    failure = CrlError(f"{type(error).__name__}: {error} ({note})")
    failure.__cause__ = error
    return failure


def log_traceback(error: BaseException, run: RunDir) -> str:
    """Append the traceback of `error` to the run's log. Return a text that says where it is."""
    try:
        run.append_to_log("".join(traceback.format_exception(error)))
    except OSError as write_error:
        return f"no traceback: cannot write {run.log}: {write_error.strerror}"
    return f"traceback: {run.log}"

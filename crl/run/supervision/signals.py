"""Ctrl-C and SIGTERM during a run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit code of a command that was interrupted."""


def do_nothing() -> None:
    """Ignore the first interrupt."""


class Interrupts:
    """Handler of Ctrl-C (SIGINT) and SIGTERM, from the start of a run to the end of its process.

    The first signal calls `stop`, which begins the orderly end of the run. Before `stop` is set,
    it raises `KeyboardInterrupt`. The second signal calls `exit_now`. This also works while the
    event loop is busy, or while the parts of the run are being closed.
    """

    def __init__(self, exit_now: Callable[[], object]) -> None:
        self.stop: Callable[[], object] | None = None
        self.received = False
        """True after the first signal."""
        self._exit_now = exit_now

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals inside the context.

        SIGINT remains ignored in a process that ignores it, such as a background job of a shell.
        Only the main thread handles signals; in another thread this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number, handler in previous.items():
            if number == signal.SIGTERM or handler is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            self._exit_now()
            return
        self.received = True
        if self.stop is None:
            raise KeyboardInterrupt
        self.stop()


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C inside the context, so that open resources are closed.

    Only the main thread handles signals; in another thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        ctrl_c = signal.getsignal(signal.SIGINT)
        if not callable(ctrl_c):  # a background process ignores SIGINT
            raise KeyboardInterrupt
        ctrl_c(number, frame)

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)

"""Shutdown on SIGTERM that closes everything that is open."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C inside the context, so that open resources are closed.

    This also covers the time before and after the training loop.
    """

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

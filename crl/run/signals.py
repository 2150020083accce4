"""SIGTERM as a way to end that leaves nothing open."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM is a Ctrl-C here, so that whatever is open is closed: also before the loop and after it."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        ctrl_c = signal.getsignal(signal.SIGINT)
        if not callable(ctrl_c):  # a process that was started in the background ignores it
            raise KeyboardInterrupt
        ctrl_c(number, frame)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

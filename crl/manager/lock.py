"""The lock between searches, which read the index, and what changes it: granted strictly in order, readers together, a writer alone.

So no reader that comes later passes a waiting writer, and no writer passes a waiting reader. Of the libraries that were put under
tests/unit/test_manager_lock.py, fifolock 0.0.20 alone holds. aiorwlock 1.5.1 and rwlocker 3.4.2 are safe; but the first, and the
writer-preferring lock of the second, starve readers under a stream of writers, and the fair ones of the second let later ones pass.
readerwriterlock 1.0.10 is left locked by cancellations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from fifolock import FifoLock


class ReadWriteLock:
    """Of one event loop; not reentrant. One that is cancelled while it waits, or as it is let in, leaves no trace."""

    def __init__(self) -> None:
        self._lock = FifoLock()

    def read(self) -> AbstractAsyncContextManager[None]:
        """Held together with other readers."""
        return self._lock(_Read)

    def write(self) -> AbstractAsyncContextManager[None]:
        """Held alone."""
        return self._lock(_Write)


class _Read(asyncio.Future[None]):
    @staticmethod
    def is_compatible(holds: Mapping[type, int]) -> bool:
        return not holds[_Write]


class _Write(asyncio.Future[None]):
    @staticmethod
    def is_compatible(holds: Mapping[type, int]) -> bool:
        return not (holds[_Read] or holds[_Write])

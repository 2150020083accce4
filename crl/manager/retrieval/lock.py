"""Lock between searches, which read the index, and changes, which write it.

The lock is granted strictly in order of arrival. Readers share it; a writer holds it alone. A
reader never passes a waiting writer that came before it, and a writer never passes a waiting
reader.

Several libraries were tested with tests/unit/manager/retrieval/test_lock.py. Only fifolock 0.0.20
passes:

* aiorwlock 1.5.1 is safe, but it starves readers under a stream of writers.
* rwlocker 3.4.2 is safe, but its writer-preferring lock starves readers in the same way. Its fair
  locks let later arrivals pass earlier ones.
* readerwriterlock 1.0.10 stays locked after cancellations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from fifolock import FifoLock


class ReadWriteLock:
    """First-in, first-out read-write lock for one event loop. It is not reentrant.

    A task may be cancelled while it waits, or at the moment it acquires the lock. It then holds
    neither the lock nor a place in the queue.
    """

    def __init__(self) -> None:
        self._lock = FifoLock()

    def read(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager that holds the lock together with other readers."""
        return self._lock(_Read)

    def write(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager that holds the lock alone."""
        return self._lock(_Write)


class _Read(asyncio.Future[None]):
    @staticmethod
    def is_compatible(holds: Mapping[type, int]) -> bool:
        return not holds[_Write]


class _Write(asyncio.Future[None]):
    @staticmethod
    def is_compatible(holds: Mapping[type, int]) -> bool:
        return not (holds[_Read] or holds[_Write])

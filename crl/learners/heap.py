"""Memory that the C library keeps after it is freed."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def release_freed_memory() -> None:
    """Return freed memory of this process to the system, if the C library is glibc.

    glibc keeps freed blocks of up to 32 MiB in the arena of the thread that allocated them
    (`M_MMAP_THRESHOLD` in mallopt(3)). The tensors of a training step have many sizes, so the free
    blocks rarely fit those of the next step. Other threads do not use these blocks.
    """
    if trim := _malloc_trim():
        trim(0)


@cache
def _malloc_trim() -> Any:
    """Return glibc's function malloc_trim(3), or None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)

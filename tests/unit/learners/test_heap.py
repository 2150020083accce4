"""Memory that the C library keeps after it is freed."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from crl.learners.heap import _malloc_trim, release_freed_memory

MIB = 2**20
BLOCKS, BLOCK = 2_000, 25_000
"""Number of tensors, and of their float32 values: 100 kB, below the threshold of mmap."""


def resident() -> float:
    """Return the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def fragment_heap() -> list[torch.Tensor]:
    """Free most of many tensors. The others are between the free blocks."""
    tensors = [torch.ones(BLOCK) for _ in range(BLOCKS)]
    return tensors[::100]


@pytest.mark.skipif(_malloc_trim() is None, reason="the C library is not glibc")
def test_freed_blocks_of_all_threads_are_returned() -> None:
    allocated = BLOCKS * BLOCK * 4 / MIB
    with ThreadPoolExecutor(1) as thread:
        kept = thread.submit(fragment_heap).result()
    before = resident()
    release_freed_memory()
    assert before - resident() > 0.8 * allocated
    assert all(bool(tensor.eq(1).all()) for tensor in kept)

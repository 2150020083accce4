"""Processes of the vLLM engines of a test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

import psutil  # pyright: ignore[reportMissingModuleSource]


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that have not ended."""
    return [
        process
        for process in processes
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def all_engine_processes() -> set[psutil.Process]:
    """Return the processes of all engines of this process."""
    return {
        child
        for child in alive(psutil.Process().children(recursive=True))
        if "VLLM" in " ".join(child.cmdline())
    }


def kill_worker() -> None:
    """Kill the newest worker process of this process's engines."""
    workers = [child for child in all_engine_processes() if "Worker" in " ".join(child.cmdline())]
    os.kill(max(workers, key=lambda child: child.create_time()).pid, signal.SIGKILL)

"""Metrics of the machine: memory and CPU load, and GPUs if torch has some."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

GIB = 2**30


def no_resources() -> dict[str, float]:
    """Return no metrics. It is for deterministic runs, whose metrics do not depend on load."""
    return {}


def resource_metrics(proc: Path = Path("/proc")) -> dict[str, float]:
    """Return the metrics of this moment. What the system does not tell is left out.

    Numbers of the process do not contain its child processes, such as workers of environments.
    """
    return {**_memory(proc), **_load(), **_gpus()}


def _memory(proc: Path) -> dict[str, float]:
    """Return the resident memory of this process, and the used share of the machine's memory."""
    metrics = {}
    with suppress(OSError, ValueError, IndexError):
        pages = int((proc / "self" / "statm").read_text("ascii").split()[1])
        metrics["perf/process_memory_gib"] = pages * os.sysconf("SC_PAGE_SIZE") / GIB
    with suppress(OSError, ValueError, KeyError, ZeroDivisionError):
        lines = (proc / "meminfo").read_text("ascii").splitlines()
        kilobytes = {name: text for name, _, text in (line.partition(":") for line in lines)}
        total, free = (int(kilobytes[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
        metrics["perf/machine_memory"] = 1 - free / total
    return metrics


def _load() -> dict[str, float]:
    try:
        return {"perf/cpu_load": os.getloadavg()[0] / (os.cpu_count() or 1)}
    except OSError:
        return {}


def _gpus() -> dict[str, float]:
    """Return utilisation and memory of each GPU; empty if torch is not imported or has none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    return {
        name: value
        for device in range(torch.cuda.device_count())
        for name, value in _gpu(torch.cuda, device)
    }


def _gpu(cuda: Any, device: int) -> Iterator[tuple[str, float]]:
    """Yield the metrics of one GPU.

    torch asks NVML, if the package nvidia-ml-py is installed. Without it, the memory is known of
    GPUs that this process uses. Others are not asked: CUDA would take memory of them.
    """
    used = _asked(cuda.device_memory_used, device)
    if used is None and cuda.is_initialized() and cuda.memory_reserved(device):
        free_total = _asked(cuda.mem_get_info, device)
        used = None if free_total is None else free_total[1] - free_total[0]
    if used is not None:
        yield f"perf/gpu/{device}/memory_gib", used / GIB
    if (percent := _asked(cuda.utilization, device)) is not None:
        yield f"perf/gpu/{device}/utilisation", percent / 100


def _asked(question: Callable[[int], Any], device: int) -> Any:
    """Return an answer about a GPU, or None if there is none."""
    try:
        return question(device)
    except Exception:  # its type depends on the library, which may be missing or not permitted
        return None

"""Metrics of the machine, with and without GPUs. CUDA is replaced by an object like torch.cuda."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crl.monitor.resources import GIB, resource_metrics


def missing(device: int) -> Any:
    raise ModuleNotFoundError("pynvml does not seem to be installed")


def with_gpus(monkeypatch: pytest.MonkeyPatch, **parts: Any) -> None:
    """Let torch have two GPUs of 80 GiB; this process has tensors on the first."""
    parts = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "is_initialized": lambda: True,
        "memory_reserved": lambda device: GIB if device == 0 else 0,
        "mem_get_info": lambda device: (20 * GIB, 80 * GIB),
        "device_memory_used": lambda device: (device + 1) * GIB,
        "utilization": lambda device: 25 * (device + 1),
        **parts,
    }
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(**parts)))


def gpus(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("perf/gpu/")}


def test_memory_and_load_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    metrics = resource_metrics()
    assert metrics.keys() == {"perf/process_memory_gib", "perf/machine_memory", "perf/cpu_load"}
    assert 0.01 < metrics["perf/process_memory_gib"] < 64
    assert 0 < metrics["perf/machine_memory"] < 1
    assert metrics["perf/cpu_load"] >= 0


def test_numbers_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 9.0, 9.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    (tmp_path / "self").mkdir()
    pages = 2 * GIB // os.sysconf("SC_PAGE_SIZE")
    (tmp_path / "self/statm").write_text(f"999999 {pages} 3 4 5 6 7\n")
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 250 kB\n")
    assert resource_metrics(tmp_path) == {
        "perf/process_memory_gib": 2.0,
        "perf/machine_memory": 0.75,
        "perf/cpu_load": 1.5,
    }


def test_a_system_without_these_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    (tmp_path / "meminfo").write_text("MemTotal: none\n")
    assert resource_metrics(tmp_path).keys() <= {"perf/cpu_load"}


def test_gpus_with_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch)
    assert gpus(resource_metrics()) == {
        "perf/gpu/0/memory_gib": 1.0, "perf/gpu/0/utilisation": 0.25,
        "perf/gpu/1/memory_gib": 2.0, "perf/gpu/1/utilisation": 0.5,
    }  # fmt: skip


def test_gpus_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without tensors of this process is not asked: that would create a CUDA context."""
    asked: list[int] = []

    def mem_get_info(device: int) -> tuple[int, int]:
        asked.append(device)
        return 20 * GIB, 80 * GIB

    with_gpus(
        monkeypatch, device_memory_used=missing, utilization=missing, mem_get_info=mem_get_info
    )
    assert gpus(resource_metrics()) == {"perf/gpu/0/memory_gib": 60.0}
    assert asked == [0]
    with_gpus(monkeypatch, device_memory_used=missing, utilization=missing, mem_get_info=missing)
    assert gpus(resource_metrics()) == {}


def test_a_machine_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, is_available=lambda: False)
    assert gpus(resource_metrics()) == {}

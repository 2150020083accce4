"""The GPUs that this process may use, as nvidia-smi tells. No torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIB = 2**20

_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,uuid,name,memory.total,memory.used,driver_version",
    "--format=csv,noheader,nounits",
)


@dataclass(frozen=True)
class Gpu:
    """index: nvidia-smi's; memory, used: bytes."""

    index: int
    uuid: str
    name: str
    memory: int
    used: int
    driver: str


def visible_gpus() -> list[Gpu]:
    """In the order in which CUDA_VISIBLE_DEVICES names them, where it is set; none without an NVIDIA driver."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return visible(parse(done.stdout), os.environ)


def parse(listing: str) -> list[Gpu]:
    """nvidia-smi's lines; one whose memory it does not tell (a GPU that is cut into MIG instances) is left out."""
    gpus = []
    for line in filter(str.strip, listing.splitlines()):
        index, uuid, name, memory, used, driver = (part.strip() for part in line.split(","))
        if memory.isdigit() and used.isdigit():
            gpus.append(Gpu(int(index), uuid, name, int(memory) * MIB, int(used) * MIB, driver))
    return gpus


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """As CUDA reads the variable: indices or the beginnings of UUIDs; whatever follows one that it does not know is not visible."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return list(gpus)
    found: list[Gpu] = []
    for name in (part.strip() for part in named.split(",")):
        match = [
            gpu
            for gpu in gpus
            if name
            and (name == str(gpu.index) or (not name.isdigit() and gpu.uuid.startswith(name)))
        ]
        if len(match) != 1:
            break
        found += match
    return found

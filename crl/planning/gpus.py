"""GPUs that this process may use, as listed by nvidia-smi. Needs no torch."""

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
    """GPU of this machine."""

    index: int
    """Index in nvidia-smi."""
    uuid: str
    name: str
    memory: int
    """Total memory in bytes."""
    used: int
    """Memory in use, in bytes."""
    driver: str
    """Driver version."""


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that this process may use, in the order of CUDA_VISIBLE_DEVICES if it is set.

    Return an empty list if nvidia-smi is missing or fails.
    """
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return visible(parse(done.stdout), os.environ)


def parse(listing: str) -> list[Gpu]:
    """Return the GPUs in the output of nvidia-smi.

    A GPU without a memory value (for example, one split into MIG instances) is left out.
    """
    gpus = []
    for line in filter(str.strip, listing.splitlines()):
        index, uuid, name, memory, used, driver = (part.strip() for part in line.split(","))
        if memory.isdigit() and used.isdigit():
            gpus.append(Gpu(int(index), uuid, name, int(memory) * MIB, int(used) * MIB, driver))
    return gpus


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES in `environment` selects; all if it is not set.

    The variable holds indices or prefixes of UUIDs. As in CUDA, the first entry that matches no GPU
    ends the list. A prefix that matches several GPUs ends it too.
    """
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

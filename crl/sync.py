"""Published weights on their way from a learner's process to an engine's: in a file of shared memory, or over NCCL."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from crl.protocols import WeightManifest

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = Path("/dev/shm")


def shared_folder() -> Path:
    """Where weights are laid down for other processes: memory where the machine shares it, else the folder of temporary files."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


@dataclass(frozen=True)
class FileWeights:
    """A `PublishHandle`: a safetensors file at `path`, which `done` removes. checksum: of the tensors in the manifest's order."""

    path: Path
    version: int
    checksum: int
    manifest: WeightManifest
    transport: str = "file"

    async def done(self) -> None:
        """The file was complete when it was published; whoever still needs it has linked or read it."""
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class NcclWeights:
    """A `PublishHandle` of weights that rank 0 of `world_size` NCCL ranks broadcasts, packed, while the others receive.

    address, port: where the ranks meet before the first transfer; the same for all versions of one learner.
    """

    address: str
    port: int
    world_size: int
    version: int
    checksum: int
    manifest: WeightManifest
    transport: str = "nccl"

    async def done(self) -> None:
        """What sends overrides this with the end of its broadcast."""


def write_weights(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """A safetensors file of them, tied ones once."""
    from safetensors.torch import save_file

    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, path)


def read_weights(path: Path, names: tuple[str, ...] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a safetensors file one by one, in the order of `names`."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in names if names is not None else file.keys():
            yield name, file.get_tensor(name)

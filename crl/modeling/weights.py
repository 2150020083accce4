"""Transfer of weights between processes, in a file or over NCCL.

A learner writes the file tensor by tensor, and engines read it. The file has the safetensors
format, so other programs that load models can read it. It should be in shared memory
(`weights_path`), where writing the file costs only one copy.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from crl.modeling.loading import checksum, tensor_bytes
from crl.protocols import WeightManifest
from crl.scratch import SHARED_MEMORY, scratch_folder

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes in the safetensors format."""

LOOPBACK_ADDRESS = "127.0.0.1"
"""Address at which learners and engines connect. They run on the same machine."""


@dataclass(frozen=True)
class FileWeights:
    """`PublishHandle` for weights in a safetensors file. Tied weights are stored once."""

    path: Path
    version: int
    checksum: int
    manifest: WeightManifest
    transport: str = "file"

    @classmethod
    def write(cls, path: Path, tensors: Mapping[str, torch.Tensor], version: int) -> FileWeights:
        """Write the tensors to `path` and return the handle.

        Raise `OSError` if the file cannot be written, for example because the disk is full.
        """
        manifest = manifest_of(tensors)
        return cls(path, version, write_tensors(path, manifest, tensors.values()), manifest)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """CPU tensors by name, in the manifest's order. Pages of the file are read on first use."""
        with safe_open(self.path, "pt") as file:
            return {name: file.get_tensor(name) for name in self.manifest.names}

    def discard(self) -> None:
        """Remove the file. A process that has opened the file can still read it."""
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class NcclWeights:
    """`PublishHandle` for weights that a learner broadcasts over NCCL, packed in vLLM's format."""

    world_size: int
    """Number of ranks in the NCCL group. Rank 0 broadcasts and the other ranks receive."""
    version: int
    checksum: int
    manifest: WeightManifest
    send: Callable[[int], Awaitable[None]]
    """Function that makes the learner broadcast the weights. It may raise `LearnerError`.

    The receiver calls it when no request is decoding any more, and receives the weights at the same
    time. The argument is a port of this machine, where the ranks connect before the first transfer.
    """
    transport: str = "nccl"

    def discard(self) -> None:
        """Do nothing; there is no resource to release."""


def manifest_of(tensors: Mapping[str, torch.Tensor]) -> WeightManifest:
    """Return names, dtypes and shapes of the tensors, in order."""
    named = tensors.items()
    return WeightManifest(
        tuple(tensors),
        tuple(str(t.dtype) for _, t in named),
        tuple(tuple(t.shape) for _, t in named),
    )


def weight_bytes(manifest: WeightManifest) -> int:
    """Return the total size of the tensors in bytes."""
    sizes = zip(manifest.shapes, manifest.dtypes, strict=True)
    return sum(
        math.prod(shape) * getattr(torch, dtype.removeprefix("torch.")).itemsize
        for shape, dtype in sizes
    )


def write_tensors(
    path: Path,
    manifest: WeightManifest,
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write a safetensors file and return the `crl.modeling.loading.checksum` of the tensors.

    `tensors` yields the tensors in the manifest's order. They are written one at a time, so they
    need not exist at the same time. Raise `ValueError` if a tensor's dtype or shape differs from
    the manifest, and `OSError` if the file cannot be written. The file is removed after an error.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True):
        begin, torch_dtype = end, getattr(torch, dtype.removeprefix("torch."))
        end += torch.Size(shape).numel() * torch_dtype.itemsize
        header[name] = {
            "dtype": _DTYPES[torch_dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors start at a multiple of 8 bytes
    crc = 0
    try:
        with path.open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for name, dtype, shape, tensor in zip(
                manifest.names, manifest.dtypes, manifest.shapes, tensors, strict=True
            ):
                if (str(tensor.dtype), tuple(tensor.shape)) != (dtype, shape):
                    raise ValueError(
                        f"tensor {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                        f"but the manifest says {dtype} {shape}"
                    )
                crc = checksum({name: tensor}, crc)
                file.write(tensor_bytes(tensor.detach()).cpu().numpy().data)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return crc


def weights_path(size: int) -> Path:
    """Return a new path for a file of `size` bytes in this process's scratch folder.

    The folder is in shared memory if more than two files of this size fit there, because two models
    may be published at the same time. Otherwise it is in the system's temporary folder. If the
    scratch folder does not exist yet, stale folders of killed processes are removed first.
    """
    parents = [scratch_folder(SHARED_MEMORY)] if os.access(SHARED_MEMORY, os.W_OK) else []
    fitting = [parent for parent in parents if shutil.disk_usage(parent).free > 2 * size]
    return sibling_path((*fitting, scratch_folder())[0] / "weights")


def sibling_path(path: Path) -> Path:
    """Return a new path for a weight file in the folder of `path`."""
    return path.with_name(f"weights-{uuid.uuid4().hex}.safetensors")

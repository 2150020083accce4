"""Weights that travel between processes in a file: a learner writes it tensor by tensor, engines read it where it lies.

The file is in the safetensors format, so anything that loads models can read it. It belongs in memory that processes share
(`weights_path`), where writing it costs one copy.
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

from crl.modeling import checksum, tensor_bytes
from crl.protocols import WeightManifest
from crl.scratch import SHARED_MEMORY, scratch_folder

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""What the format calls a dtype."""

MEETING = "127.0.0.1"
"""Where learners and engines meet, which are on one machine."""


@dataclass(frozen=True)
class FileWeights:
    """A `PublishHandle`: one version of a model's weights in a safetensors file. Tied weights are in it once."""

    path: Path
    version: int
    checksum: int
    manifest: WeightManifest
    transport: str = "file"

    @classmethod
    def write(cls, path: Path, tensors: Mapping[str, torch.Tensor], version: int) -> FileWeights:
        """The weights as they are now. Raises `OSError` when there is no room for them."""
        manifest = manifest_of(tensors)
        return cls(path, version, write_tensors(path, manifest, tensors.values()), manifest)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """By name, in the manifest's order, on the CPU; the file's pages are read when they are used."""
        with safe_open(self.path, "pt") as file:
            return {name: file.get_tensor(name) for name in self.manifest.names}

    def discard(self) -> None:
        """Removes the file; whoever still reads it keeps what it opened."""
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class NcclWeights:
    """A `PublishHandle`: weights that rank 0 of `world_size` NCCL ranks broadcasts, packed as vLLM does it, while the others receive.

    send: has it done by the learner; the receiver calls it beside its own part, once nothing decodes any more, with the port of this
    machine where the ranks meet before the first transfer. Raises `LearnerError`.
    """

    world_size: int
    version: int
    checksum: int
    manifest: WeightManifest
    send: Callable[[int], Awaitable[None]]
    transport: str = "nccl"

    def discard(self) -> None:
        """It leaves nothing behind."""


def manifest_of(tensors: Mapping[str, torch.Tensor]) -> WeightManifest:
    named = tensors.items()
    return WeightManifest(
        tuple(tensors),
        tuple(str(t.dtype) for _, t in named),
        tuple(tuple(t.shape) for _, t in named),
    )


def weight_bytes(manifest: WeightManifest) -> int:
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
    """A safetensors file of `tensors`, which come one at a time in the manifest's order and need not exist together.

    Returns their `crl.modeling.checksum`. Raises `ValueError` for a tensor that is not as the manifest says, and `OSError`;
    then no file is left.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True):
        begin, kind = end, getattr(torch, dtype.removeprefix("torch."))
        end += torch.Size(shape).numel() * kind.itemsize
        header[name] = {"dtype": _DTYPES[kind], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    crc = 0
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, dtype, shape, tensor in zip(
                manifest.names, manifest.dtypes, manifest.shapes, tensors, strict=True
            ):
                if (str(tensor.dtype), tuple(tensor.shape)) != (dtype, shape):
                    raise ValueError(
                        f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}"
                    )
                crc = checksum({name: tensor}, crc)
                file.write(tensor_bytes(tensor.detach()).cpu().numpy().data)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return crc


def weights_path(size: int) -> Path:
    """A new name for a file of `size` bytes: in shared memory where two of them fit, so that two models' may be written at the same time;
    else among temporary files. What killed processes left there is removed first."""
    parents = [scratch_folder(SHARED_MEMORY)] if os.access(SHARED_MEMORY, os.W_OK) else []
    roomy = [parent for parent in parents if shutil.disk_usage(parent).free > 2 * size]
    return beside((*roomy, scratch_folder())[0] / "weights")


def beside(path: Path) -> Path:
    """A new name in the same folder."""
    return path.with_name(f"weights-{uuid.uuid4().hex}.safetensors")

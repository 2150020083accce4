"""Kinds of inference engines: what each needs, how much memory it takes, and how it is opened.

A new kind is a subclass of `EngineBackend` in `ENGINES`, and a value of `EngineSection.kind`.
`SETTINGS_OF_KINDS` in `crl/config/schema.py` lists the settings that only some kinds use. Checks of
settings against each other are in `crl/config/schema.py`. Torch is imported only to open an engine.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from crl.config.models.shapes import ModelShape, require_context, require_divisible
from crl.config.schema import EngineSection, LoraSection
from crl.engines import PREFILL_TOKENS, prepare_vllm, require_vllm
from crl.errors import ConfigError
from crl.modeling import Precision
from crl.modeling.memory import (
    GIB,
    PROCESS_BYTES,
    GpuAssignment,
    GpuRequest,
    GpuUser,
    Memory,
    VllmCache,
    adapter_size,
    block_bytes,
    sampling_bytes,
    size_text,
)
from crl.protocols import Engine
from crl.types import RoleName
from crl.wording import counted, device_text

VLLM_WORK_BYTES = 3.0 * GIB
"""Bytes of vLLM apart from weights and cache.

They cover the forward pass of a full batch, CUDA graphs and the sampler's logits.
"""

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM can reserve the matrices of an adapter (`MaxLoRARanks` in vLLM 0.32.0)."""

PACKED_LAYERS = (
    frozenset({"q_proj", "k_proj", "v_proj"}),
    frozenset({"gate_proj", "up_proj"}),
)
"""Layers of Llama and Qwen that are one layer in vLLM."""

ALTERNATIVE_FRACTIONS = (0.8, 0.5, 0.3)
"""Alternatives that are tried for an engine.memory_fraction that does not fit."""


@dataclass(frozen=True)
class ServedModel:
    """Model that an engine serves."""

    role: RoleName
    path: Path
    """Directory of the model."""
    dtype: Precision
    """Precision of the weights."""
    max_context: int
    """Maximum number of tokens of prompt and answer."""
    adapter: LoraSection | None = None
    """Adapter that a learner trains; None if it trains all weights, or if none trains the model."""
    structured_outputs: bool = False
    """True if requests may have a JSON schema (`Sampling.json_schema`)."""

    @property
    def key(self) -> str:
        """Setting that names the model; used in error messages."""
        return f"{self.role}.model"


class EngineBackend(ABC):
    """Kind of engine."""

    in_process: ClassVar[bool]
    """True if the engine is part of this process. Other engines use the GPUs assigned to them."""
    extra: ClassVar[str] = ""
    """Extra that installs the engine; empty if the base install does."""
    receives_adapters: ClassVar[bool] = False
    """True if the engine holds the base model of an adapter and receives the adapter alone.

    Other engines receive the base model with the adapter merged.
    """

    @abstractmethod
    def require_installed(self) -> None:
        """Raise `ConfigError` if the engine is not installed."""

    @abstractmethod
    def require_servable(self, section: EngineSection, role: str, shape: ModelShape) -> None:
        """Raise `ConfigError` for a model that the engine cannot serve on any machine."""

    @abstractmethod
    def require_adapter(
        self, role: str, adapter: LoraSection, *, float32_on_gpu: bool = False
    ) -> None:
        """Raise `ConfigError` for an adapter that the engine cannot have.

        `float32_on_gpu`: the model is on a GPU in float32.
        """

    @abstractmethod
    def uses_gpu(self, section: EngineSection) -> bool:
        """Return whether the engine uses a GPU of a machine that has GPUs."""

    def replicas(self, section: EngineSection) -> int:
        """Return the number of engines per model."""
        return 1

    def gpus_per_replica(self, section: EngineSection) -> int:
        return 1

    def nccl_receivers(self, section: EngineSection) -> int:
        """Return the number of processes per model that receive weights over NCCL."""
        return 0

    @abstractmethod
    def request(
        self, role: GpuUser, section: EngineSection, shape: ModelShape, tokens: int,
        element_bytes: int, adapter: LoraSection | None = None, *, truncated: bool = False,
    ) -> GpuRequest:  # fmt: skip
        """Return the GPUs and the memory of one model's engine.

        `tokens` is the maximum context, `element_bytes` the size of one weight. `adapter` is the
        adapter that a learner trains; None if it trains all weights, or if none trains the model.
        `truncated`: tokens are sampled with top-p or top-k.
        """

    @abstractmethod
    def describe(self, section: EngineSection) -> str:
        """Return the engine's line in the plan of a run."""

    def memory_settings(self, section: EngineSection) -> Iterator[tuple[str, Any]]:
        """Yield (key, value) of settings that save memory, the least harmful to learning first."""
        yield from ()

    @abstractmethod
    async def open(
        self, section: EngineSection, model: ServedModel, assigned: GpuAssignment, *,
        replicas: int, deterministic: bool,
    ) -> Engine:  # fmt: skip
        """Start an engine that serves `model`. Raise `ConfigError` or `EngineError` if it fails."""


class TorchBackend(EngineBackend):
    """`crl.engines.torch.TorchEngine`, in a thread of this process."""

    in_process = True

    def require_installed(self) -> None:
        """Do nothing: torch is part of the base install."""

    def require_servable(self, section: EngineSection, role: str, shape: ModelShape) -> None:
        """Do nothing: sizes do not limit this engine."""

    def require_adapter(
        self, role: str, adapter: LoraSection, *, float32_on_gpu: bool = False
    ) -> None:
        """Do nothing: adapters are merged before they are sent."""

    def uses_gpu(self, section: EngineSection) -> bool:
        return section.device != "cpu"

    def request(
        self, role: GpuUser, section: EngineSection, shape: ModelShape, tokens: int,
        element_bytes: int, adapter: LoraSection | None = None, *, truncated: bool = False,
    ) -> GpuRequest:  # fmt: skip
        """See `EngineBackend.request`.

        The cache has rows for a full batch, and as much again for stored prefixes. Row lengths are
        powers of two, at least 128, because a row doubles when it is full.
        """
        batch, row_tokens = section.max_batch, max(128, 1 << (tokens - 1).bit_length())
        memory = Memory(
            weights=element_bytes * shape.parameters,
            cache=2 * batch * row_tokens * shape.kv_bytes(element_bytes),
            activations=PREFILL_TOKENS * block_bytes(shape, element_bytes)
            + sampling_bytes(batch, shape.vocabulary, truncated=truncated),
            other=PROCESS_BYTES,
        )
        description = (
            f"{size_text(shape)}, torch, in this process: "
            f"rows for {batch} sequences of {tokens:,} tokens"
        )
        return GpuRequest(role, 1, memory, description, first_gpu=True)

    def describe(self, section: EngineSection) -> str:
        return f"torch on {device_text(section.device)}, {counted(section.threads, 'CPU thread')}"

    def memory_settings(self, section: EngineSection) -> Iterator[tuple[str, Any]]:
        if section.max_batch > 8:
            yield "engine.max_batch", 8

    async def open(
        self, section: EngineSection, model: ServedModel, assigned: GpuAssignment, *,
        replicas: int, deterministic: bool,
    ) -> Engine:  # fmt: skip
        import torch

        from crl.engines.torch import TorchEngine
        from crl.modeling.loading import load_model, resolve_device

        if deterministic:
            # Without this variable CUDA's matrix products refuse to be deterministic.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        device, dtype = resolve_device(section.device, "engine.device"), getattr(torch, model.dtype)
        loaded = load_model(model.path, device, dtype, key=model.key)
        positions = getattr(loaded.config, "max_position_embeddings", None)
        require_context(model.role, model.max_context, positions)
        return TorchEngine(
            loaded,
            max_batch=section.max_batch,
            max_context=model.max_context,
            threads=section.threads,
        )


class VllmBackend(EngineBackend):
    """`crl.engines.vllm.VllmEngine`, in processes of its own."""

    in_process = False
    extra = "vllm"
    receives_adapters = True

    def require_installed(self) -> None:
        require_vllm("engine.kind", "vllm")

    def require_servable(self, section: EngineSection, role: str, shape: ModelShape) -> None:
        require_divisible(role, section.tensor_parallel, shape.attention.heads)

    def require_adapter(
        self, role: str, adapter: LoraSection, *, float32_on_gpu: bool = False
    ) -> None:
        if float32_on_gpu:
            reason = "vLLM's kernels for adapters on GPUs need bfloat16, but the model is float32"
            remedy = "Add --set learner.precision=bfloat16, or use --set engine.kind=torch"
            raise ConfigError(f"{role}.lora.rank", adapter.rank, reason, remedy)
        if adapter.rank > VLLM_RANKS[-1]:
            reason = f"vLLM supports ranks up to {VLLM_RANKS[-1]}"
            remedy = f"Choose at most {VLLM_RANKS[-1]}, or add --set engine.kind=torch"
            raise ConfigError(f"{role}.lora.rank", adapter.rank, reason, remedy)

    def uses_gpu(self, section: EngineSection) -> bool:
        return True

    def replicas(self, section: EngineSection) -> int:
        return section.replicas

    def gpus_per_replica(self, section: EngineSection) -> int:
        return section.tensor_parallel

    def nccl_receivers(self, section: EngineSection) -> int:
        return section.replicas * section.tensor_parallel if section.transfer == "nccl" else 0

    def request(
        self, role: GpuUser, section: EngineSection, shape: ModelShape, tokens: int,
        element_bytes: int, adapter: LoraSection | None = None, *, truncated: bool = False,
    ) -> GpuRequest:  # fmt: skip
        """See `EngineBackend.request`.

        The memory is the minimum, with a cache for one sequence of `tokens`. All memory above it
        becomes cache. The matrices of an adapter are counted whole on every GPU.
        """
        parallel, kv_heads = section.tensor_parallel, shape.attention.kv_heads
        # With fewer KV heads than GPUs, each head is replicated on several GPUs.
        share = max(1, kv_heads // parallel) / kv_heads
        memory = Memory(
            weights=element_bytes * (shape.parameters / parallel + _reserved(shape, adapter)),
            cache=tokens * shape.kv_bytes(element_bytes) * share,
            other=PROCESS_BYTES + VLLM_WORK_BYTES,
        )
        token_bytes = shape.kv_bytes(element_bytes) / min(parallel, kv_heads)
        description = (
            f"{size_text(shape)}{f', an adapter of rank {adapter.rank}' if adapter else ''}, vLLM, "
            f"{counted(section.replicas, 'replica')} of {counted(parallel, 'GPU')}"
        )
        return GpuRequest(
            role,
            section.replicas * parallel,
            memory,
            description,
            key="engine.replicas",
            vllm_cache=VllmCache(takes_free_memory=True, token_bytes=token_bytes),
        )

    def describe(self, section: EngineSection) -> str:
        parallel = section.tensor_parallel
        gpus = f", each on {counted(parallel, 'GPU')}" if parallel > 1 else ""
        initial = ", random initial weights" if section.load_format == "dummy" else ""
        return (
            f"vllm, {counted(section.replicas, 'replica')} of each model{gpus}; "
            f"weight transfer by {section.transfer}{initial}"
        )

    def memory_settings(self, section: EngineSection) -> Iterator[tuple[str, Any]]:
        if section.transfer == "nccl":
            yield "engine.transfer", "file"
        if section.replicas > 1:
            yield "engine.replicas", 1
        if section.memory_fraction:
            yield from (("engine.memory_fraction", share) for share in ALTERNATIVE_FRACTIONS)

    async def open(
        self, section: EngineSection, model: ServedModel, assigned: GpuAssignment, *,
        replicas: int, deterministic: bool,
    ) -> Engine:  # fmt: skip
        prepare_vllm("engine.kind", "vllm")
        from crl.engines.vllm import VllmEngine, VllmSettings, WeightSettings

        parallel = section.tensor_parallel
        settings = VllmSettings(
            placements=tuple(
                assigned.gpus[parallel * i : parallel * (i + 1)] for i in range(replicas)
            ),
            weights=WeightSettings(
                dtype=model.dtype,
                load_format=section.load_format,
                transfer=section.transfer,
                adapter=model.adapter,
            ),
            tensor_parallel=parallel,
            memory_fraction=assigned.fraction,
            max_batch=section.max_batch,
            max_context=model.max_context,
            threads=section.threads,
            structured_outputs=model.structured_outputs,
        )
        return await VllmEngine.start(model.path, settings, model.key)


def vllm_rank(rank: int) -> int:
    """Return the rank of the matrices that vLLM reserves for an adapter of this rank."""
    return next(reserved for reserved in VLLM_RANKS if reserved >= rank)


def _reserved(shape: ModelShape, adapter: LoraSection | None) -> int:
    """Return the number of elements that vLLM reserves for an adapter.

    Query, key and value projections are one layer in vLLM, and so are gate and up projection. All
    parts of such a layer have matrices if one has.
    """
    if adapter is None:
        return 0
    names = set(adapter.target_names)
    for packed in PACKED_LAYERS:
        if names & packed:
            names |= packed
    reserved = {"rank": vllm_rank(adapter.rank), "targets": ",".join(sorted(names))}
    return adapter_size(shape, adapter.model_copy(update=reserved)).parameters


ENGINES: dict[str, EngineBackend] = {"torch": TorchBackend(), "vllm": VllmBackend()}
"""Kinds of engines by `EngineSection.kind`."""


async def open_engine(
    section: EngineSection, model: ServedModel, assigned: GpuAssignment, *,
    replicas: int, deterministic: bool,
) -> Engine:  # fmt: skip
    """Start the configured engine; see `EngineBackend.open`."""
    return await ENGINES[section.kind].open(
        section, model, assigned, replicas=replicas, deterministic=deterministic
    )

"""Kinds of learners, with their requirements, their memory and their start.

A new kind is a subclass of `LearnerBackend` in `LEARNERS`, and a value of `LearnerSection.kind`.
`SETTINGS_OF_KINDS` in `crl/config/schema.py` lists the settings that only some kinds use. Checks of
settings against each other are in `crl/config/schema.py`. Torch is imported only to open a learner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from crl.config.models.shapes import ModelShape
from crl.config.schema import LearnerSection, OptimizerSection
from crl.errors import ConfigError
from crl.extras import require_package
from crl.modeling import Precision
from crl.modeling.memory import (
    NO_ADAPTER,
    PROCESS_BYTES,
    AdapterSize,
    GpuAssignment,
    GpuRequest,
    GpuUser,
    Memory,
    dtype_bytes,
    gib_text,
    size_text,
    training_bytes,
)
from crl.protocols import Learner, Loss
from crl.types import RoleName
from crl.wording import counted, device_text

if TYPE_CHECKING:
    from crl.learners.step import TrainSettings
    from crl.modeling.lora import Adapter

OFFLOADED_PARAMETER_BYTES = 20
"""Bytes per parameter in the machine's memory if the optimizer is offloaded.

They are: fp32 weights 4, the optimizer's two moments 8, gradients 4, DeepSpeed's buffer at most 4.
"""

REDUCE_BUCKET = 500_000_000
"""Elements of DeepSpeed's bucket for reducing gradients.

The bucket for gathering updated parameters has the same size.
"""

MAX_LIVE_PARAMETERS = 1_000_000_000
"""Parameters that ZeRO-3 holds gathered at a time (stage3_max_live_parameters)."""


@dataclass(frozen=True)
class TrainedModel:
    """Model that a learner trains."""

    role: RoleName
    path: Path
    """Directory of the model."""
    dtype: Precision
    """Precision of the weights in forward and backward passes."""
    optimizer: OptimizerSection
    loss: Loss
    settings: TrainSettings
    adapter: Adapter | None = None
    """Adapter that is trained; None if all weights are."""

    @property
    def key(self) -> str:
        """Setting that names the model; used in error messages."""
        return f"{self.role}.model"


class LearnerBackend(ABC):
    """Kind of learner."""

    in_process: ClassVar[bool]
    """True if the learner is part of this process. Other learners use the GPUs assigned to them."""
    extra: ClassVar[str] = ""
    """Extra that installs the learner; empty if the base install does."""

    @abstractmethod
    def require_installed(self) -> None:
        """Raise `ConfigError` if the learner is not installed."""

    @abstractmethod
    def require_trainable(
        self, section: LearnerSection, *, cuda: bool, bfloat16: bool, receivers: int
    ) -> None:
        """Raise `ConfigError` if a model cannot be trained with these settings.

        `cuda`: the learner is on GPUs. `bfloat16`: the model is trained in bfloat16. `receivers` is
        as in `open`.
        """

    @abstractmethod
    def memory(
        self, section: LearnerSection, shape: ModelShape, tokens: int, *, reference: bool = False,
        adapter: AdapterSize = NO_ADAPTER, merged: bool = True,
    ) -> Memory:  # fmt: skip
        """Return the memory of one rank.

        `tokens` is the size of a micro-batch; it must cover the longest sequence. With `reference`
        a whole frozen copy of the model is included, for the KL term. `adapter` is the adapter that
        is trained; without parameters, all weights are trained. `merged` is true if the base model
        with the adapter merged is published, and false if the adapter alone is.
        """

    def host_bytes(
        self, section: LearnerSection, shape: ModelShape, adapter: AdapterSize = NO_ADAPTER
    ) -> float:  # fmt: skip
        """Return the bytes of the machine's memory that all ranks take together.

        `adapter` is as in `memory`.
        """
        return 0.0

    def starting_bytes(
        self, section: LearnerSection, shape: ModelShape, *, reference: bool = False,
        adapter: AdapterSize = NO_ADAPTER,
    ) -> float:  # fmt: skip
        """Return the bytes of the machine's memory that all ranks take while they start.

        `host_bytes` is not included. `reference` and `adapter` are as in `memory`.
        """
        return 0.0

    @abstractmethod
    def state_bytes(
        self, section: LearnerSection, shape: ModelShape, adapter: AdapterSize = NO_ADAPTER
    ) -> float:  # fmt: skip
        """Return the bytes of weights, gradients and optimizer of all ranks together.

        GPU memory and the machine's memory are included. Each state is counted once. `adapter` is
        as in `memory`.
        """

    @abstractmethod
    def request(
        self, role: GpuUser, section: LearnerSection, shape: ModelShape, tokens: int, *,
        reference: bool, adapter: AdapterSize = NO_ADAPTER, merged: bool = True,
    ) -> GpuRequest:  # fmt: skip
        """Return the GPUs and the memory of one model's learner; see `memory`."""

    @abstractmethod
    def describe(self, section: LearnerSection) -> str:
        """Return the learner's line in the plan of a run."""

    def memory_settings(self, section: LearnerSection, gpus: int) -> Iterator[tuple[str, Any]]:
        """Yield (key, value) of settings that save memory, the least harmful to learning first.

        `gpus` is the number of GPUs of the run.
        """
        if not section.activation_checkpointing:
            yield "learner.activation_checkpointing", True

    @abstractmethod
    async def open(
        self, section: LearnerSection, model: TrainedModel, assigned: GpuAssignment, *,
        receivers: int, deterministic: bool,
    ) -> Learner:  # fmt: skip
        """Start a learner of `model`.

        `receivers` is the number of engine processes that receive the weights over NCCL. Raise
        `ConfigError` or `LearnerError` if the start fails.
        """


class LocalBackend(LearnerBackend):
    """`crl.learners.local.LocalLearner`, in a thread of this process."""

    in_process = True

    def require_installed(self) -> None:
        """Do nothing: torch is part of the base install."""

    def require_trainable(
        self, section: LearnerSection, *, cuda: bool, bfloat16: bool, receivers: int
    ) -> None:
        """Do nothing: the learner trains on every device and in every precision."""

    def memory(
        self, section: LearnerSection, shape: ModelShape, tokens: int, *, reference: bool = False,
        adapter: AdapterSize = NO_ADAPTER, merged: bool = True,
    ) -> Memory:  # fmt: skip
        """See `LearnerBackend.memory`. The learner publishes a copy of the weights.

        The reference of an adapter is its base model, which needs no copy.
        """
        n, element_bytes = shape.parameters, dtype_bytes(shape, section)
        adapted = adapter.parameters
        trained, trained_bytes = (adapted, 4) if adapted else (n, element_bytes)
        copies = 1 + (reference and not adapted)
        published = adapted if adapted and not merged else n
        return Memory(
            weights=n * element_bytes * copies + 4.0 * adapted,
            gradients=trained * 4.0,
            optimizer=float(trained * _optimizer_bytes(0, trained_bytes)),
            activations=training_bytes(
                shape,
                tokens,
                element_bytes,
                checkpointing=section.activation_checkpointing,
                adapter=adapter,
                adapter_bytes=4,
            ),
            other=PROCESS_BYTES + published * element_bytes,
        )

    def state_bytes(
        self, section: LearnerSection, shape: ModelShape, adapter: AdapterSize = NO_ADAPTER
    ) -> float:  # fmt: skip
        element_bytes = dtype_bytes(shape, section)
        if adapter.parameters:
            states = adapter.parameters * (4 + 4 + _optimizer_bytes(0, 4))
            return float(shape.parameters * element_bytes + states)
        return float(shape.parameters * (element_bytes + 4 + _optimizer_bytes(0, element_bytes)))

    def request(
        self, role: GpuUser, section: LearnerSection, shape: ModelShape, tokens: int, *,
        reference: bool, adapter: AdapterSize = NO_ADAPTER, merged: bool = True,
    ) -> GpuRequest:  # fmt: skip
        states = gib_text(self.state_bytes(section, shape, adapter))
        description = (
            f"{size_text(shape)}{_adapter_text(adapter)}, in this process: {states} GiB of states; "
            f"{tokens:,} tokens at a time"
        )
        memory = self.memory(
            section, shape, tokens, reference=reference, adapter=adapter, merged=merged
        )
        return GpuRequest(role, 1, memory, description, first_gpu=True)

    def describe(self, section: LearnerSection) -> str:
        return f"local {_device_and_threads(section)}{_options(section)}"

    async def open(
        self, section: LearnerSection, model: TrainedModel, assigned: GpuAssignment, *,
        receivers: int, deterministic: bool,
    ) -> Learner:  # fmt: skip
        import torch

        from crl.learners.local import LocalLearner
        from crl.modeling.loading import load_model, require_packing, resolve_device
        from crl.modeling.lora import add_adapter, shared_base

        device = resolve_device(section.device, "learner.device")
        dtype = getattr(torch, model.dtype)
        if model.adapter:
            loaded = shared_base(model.path, device, dtype, key=model.key)
        else:
            loaded = load_model(model.path, device, dtype, key=model.key)
        require_packing(loaded, model.path, model.key)
        if model.adapter:
            add_adapter(loaded, model.adapter, f"{model.role}.lora")
        return LocalLearner(
            loaded,
            model.loss,
            model.optimizer,
            model.settings,
            threads=section.threads,
            adapter=model.adapter,
            key=model.key,
        )


class DeepSpeedBackend(LearnerBackend):
    """`crl.learners.deepspeed.DeepSpeedLearner`, with one process per rank."""

    in_process = False
    extra = "deepspeed"

    def require_installed(self) -> None:
        require_package("deepspeed", "learner.kind", "deepspeed")

    def require_trainable(
        self, section: LearnerSection, *, cuda: bool, bfloat16: bool, receivers: int
    ) -> None:
        if bfloat16 and not section.zero:
            reason = "keeps no float32 weights, but training in bfloat16 needs them"
            raise ConfigError(
                "learner.zero", 0, reason, "Choose 1, 2 or 3, or learner.precision=float32"
            )
        if receivers and not cuda:
            raise ConfigError(
                "engine.transfer",
                "nccl",
                "NCCL sends from GPU to GPU, but the learner runs on the CPU",
                "Use engine.transfer=file",
            )

    def memory(
        self, section: LearnerSection, shape: ModelShape, tokens: int, *, reference: bool = False,
        adapter: AdapterSize = NO_ADAPTER, merged: bool = True,
    ) -> Memory:  # fmt: skip
        """See `LearnerBackend.memory`.

        An offloaded optimizer takes no GPU memory. At ZeRO stage 2 or 3 its gradients take none
        either. A reference model is whole on every rank. The reference of an adapter is its base
        model, which needs no copy.
        """
        n, element_bytes, zero = shape.parameters, dtype_bytes(shape, section), section.zero
        adapted = adapter.parameters
        trained = adapted or n
        reference = reference and not adapted

        def shards(stage: int) -> int:
            return section.ranks if zero >= stage else 1

        return Memory(
            weights=(n + adapted) * element_bytes / shards(3) + n * element_bytes * reference,
            gradients=0.0 if section.offload and zero >= 2 else trained * 4 / shards(2),
            optimizer=0.0
            if section.offload
            else trained * _optimizer_bytes(zero, element_bytes) / shards(1),
            activations=training_bytes(
                shape,
                tokens,
                element_bytes,
                checkpointing=section.activation_checkpointing,
                adapter=adapter,
                adapter_bytes=element_bytes,
            ),
            other=PROCESS_BYTES + _bucket_bytes(n, trained, zero, element_bytes),
        )

    def host_bytes(
        self, section: LearnerSection, shape: ModelShape, adapter: AdapterSize = NO_ADAPTER
    ) -> float:  # fmt: skip
        """See `LearnerBackend.host_bytes`. Return 0 without offload.

        The bytes are the offloaded states, the gradients, and a buffer of DeepSpeed. The buffer is
        a second copy of the fp32 gradients at stage 3, and a copy of the weights at lower stages.
        """
        trained = float(adapter.parameters or shape.parameters)
        return OFFLOADED_PARAMETER_BYTES * trained if section.offload else 0.0

    def starting_bytes(
        self, section: LearnerSection, shape: ModelShape, *, reference: bool = False,
        adapter: AdapterSize = NO_ADAPTER,
    ) -> float:  # fmt: skip
        """See `LearnerBackend.starting_bytes`.

        Ranks map the files of a model into memory and share their pages, so these need no memory of
        their own. Two kinds of weights are copied by every rank: those that are converted to
        another precision, and those of a reference model for the KL term.
        """
        element_bytes = dtype_bytes(shape, section)
        copied_reference = reference and not adapter.parameters
        copies = ((element_bytes == 2) != shape.half_precision) + copied_reference
        return float(copies * section.ranks * element_bytes * shape.parameters)

    def state_bytes(
        self, section: LearnerSection, shape: ModelShape, adapter: AdapterSize = NO_ADAPTER
    ) -> float:  # fmt: skip
        element_bytes, trained = dtype_bytes(shape, section), adapter.parameters or shape.parameters
        on_gpus = trained * (4.0 + _optimizer_bytes(section.zero, element_bytes))
        states = self.host_bytes(section, shape, adapter) or on_gpus
        return element_bytes * (shape.parameters + adapter.parameters) + states

    def request(
        self, role: GpuUser, section: LearnerSection, shape: ModelShape, tokens: int, *,
        reference: bool, adapter: AdapterSize = NO_ADAPTER, merged: bool = True,
    ) -> GpuRequest:  # fmt: skip
        host_bytes = self.host_bytes(section, shape, adapter)
        offloaded = f", {gib_text(host_bytes)} of them in host memory" if host_bytes else ""
        states = gib_text(self.state_bytes(section, shape, adapter))
        description = (
            f"{size_text(shape)}{_adapter_text(adapter)}, DeepSpeed ZeRO-{section.zero}, "
            f"{counted(section.ranks, 'rank')}: {states} GiB of states{offloaded}; "
            f"{tokens:,} tokens at a time"
        )
        return GpuRequest(
            role,
            section.ranks,
            self.memory(
                section, shape, tokens, reference=reference, adapter=adapter, merged=merged
            ),
            description,
            key="learner.ranks",
            host_bytes=host_bytes,
        )

    def describe(self, section: LearnerSection) -> str:
        offload = ", optimizer offloaded" if section.offload else ""
        return (
            f"deepspeed {_device_and_threads(section)} each; "
            f"{counted(section.ranks, 'rank')} of each model, ZeRO-{section.zero}{offload}"
            f"{_options(section)}"
        )

    def memory_settings(self, section: LearnerSection, gpus: int) -> Iterator[tuple[str, Any]]:
        yield from super().memory_settings(section, gpus)
        if section.zero < 3:
            yield "learner.zero", 3
        if not section.offload:
            yield "learner.offload", True
        if section.ranks != gpus:
            yield "learner.ranks", gpus

    async def open(
        self, section: LearnerSection, model: TrainedModel, assigned: GpuAssignment, *,
        receivers: int, deterministic: bool,
    ) -> Learner:  # fmt: skip
        from crl.learners.deepspeed import (
            ComputeSettings,
            DeepSpeedLearner,
            RankModel,
            RankSettings,
            ZeroSettings,
        )
        from crl.modeling.loading import resolve_device

        cuda = resolve_device(section.device, "learner.device").type == "cuda"
        self.require_trainable(
            section, cuda=cuda, bfloat16=model.dtype == "bfloat16", receivers=receivers
        )
        ranks = RankSettings(
            model=RankModel(model.path, model.key, model.adapter),
            loss=model.loss,
            optimizer=model.optimizer,
            train=model.settings,
            compute=ComputeSettings(
                device="cuda" if cuda else "cpu",
                precision=model.dtype,
                threads=section.threads,
                deterministic=deterministic,
            ),
            zero=ZeroSettings(section.zero, section.offload),
            timeout=section.timeout,
        )
        gpus = assigned.gpus if cuda else ()
        return await DeepSpeedLearner.start(ranks, section.ranks, gpus=gpus, receivers=receivers)


LEARNERS: dict[str, LearnerBackend] = {"local": LocalBackend(), "deepspeed": DeepSpeedBackend()}
"""Kinds of learners by `LearnerSection.kind`."""


async def open_learner(
    section: LearnerSection, model: TrainedModel, assigned: GpuAssignment, *,
    receivers: int, deterministic: bool,
) -> Learner:  # fmt: skip
    """Start the configured learner; see `LearnerBackend.open`."""
    return await LEARNERS[section.kind].open(
        section, model, assigned, receivers=receivers, deterministic=deterministic
    )


def _device_and_threads(section: LearnerSection) -> str:
    return f"on {device_text(section.device)}, {counted(section.threads, 'CPU thread')}"


def _options(section: LearnerSection) -> str:
    options = f", {section.precision}" if section.precision != "auto" else ""
    return options + (", activation checkpointing" if section.activation_checkpointing else "")


def _optimizer_bytes(zero: int, element_bytes: int) -> int:
    """Return the bytes per parameter of the optimizer.

    They are the two moments (8), plus fp32 weights (4) if the model is in 16 bits or DeepSpeed
    makes a flat copy of the weights (ZeRO stage 1 and 2).
    """
    return 12 if element_bytes == 2 or zero in (1, 2) else 8


def _adapter_text(adapter: AdapterSize) -> str:
    return f", an adapter of {adapter.parameters:,} parameters" if adapter.parameters else ""


def _bucket_bytes(parameters: int, trained: int, zero: int, element_bytes: int) -> float:
    """Return the bytes of DeepSpeed's buckets. `trained`: parameters that the optimizer updates."""
    reduced = min(REDUCE_BUCKET, trained)
    gathered = min(MAX_LIVE_PARAMETERS, parameters) if zero == 3 else reduced
    return float(element_bytes * (reduced + gathered)) if zero else 0.0

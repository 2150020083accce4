"""Receiving side of a weight sync, in vLLM's worker processes.

vLLM imports this module in every worker process, because the engine names `Receiver` as its worker
extension. The module adds two backends to vLLM's weight transfer: `crl-file` reads a safetensors
file, and `crl-nccl` is vLLM's own NCCL backend. Both backends:

* compute a checksum of the received tensors, which the engine compares with the sender's checksum;
* repack the output head of models with tied embeddings, which vLLM does not update on the CPU.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from crl.engines.vllm_owner import unlink_shared_memory
from crl.modeling.loading import checksum


class Receiver:
    """Worker extension of vLLM. Its methods are called over `collective_rpc`."""

    weight_transfer_engine: Any
    model_runner: Any

    def received_checksum(self) -> int:
        """Return the checksum of the tensors that this worker received in the last sync.

        The checksum is computed before vLLM splits and packs the tensors for its kernels.
        """
        return self.weight_transfer_engine.load.crc

    def add_initial_adapter(self, name: str, number: int) -> None:
        """Add an adapter whose matrices are 0."""
        request = LoRARequest(name, number, "/")
        self.model_runner.lora_manager.add_dummy_lora(request, rank=1)

    def received_adapter(self, path: str, names: list[str], number: int) -> int:
        """Return the checksum of the adapter in the file `path`, which this worker has loaded.

        `names` are its tensors, in the order of their checksum. Raise `RuntimeError` if the model
        has no layer for one of them, because vLLM would ignore the layer's matrices.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        if unknown := sorted(set(manager.get_adapter(number).loras) - set(manager.modules)):
            raise RuntimeError(
                f"vLLM's model has no layer {unknown[0]} with an adapter ({len(unknown)} in total)"
            )
        with safe_open(path, "pt") as file:
            return checksum({name: file.get_tensor(name) for name in names})


@dataclass
class LoadProgress:
    """Progress of one weight sync in a worker."""

    crc: int = 0
    """Checksum of the tensors received so far."""
    loaded: set[str] = field(default_factory=set)
    """Names of the parameters loaded so far, as named in vLLM's model."""

    def begin(self, model: torch.nn.Module) -> None:
        """Start a new sync."""
        self.crc, self.loaded = 0, set()
        initialize_layerwise_reload(model)

    def load_tensors(
        self, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Load tensors into the model and add them to the checksum."""
        self.loaded |= model.load_weights(  # pyright: ignore[reportCallIssue]
            self._checksummed(weights)
        )

    def end(self, model: torch.nn.Module, model_config: Any) -> None:
        """Finish the sync.

        Raise `RuntimeError` if a parameter was not loaded, because it would still have its old
        value.
        """
        finalize_layerwise_reload(model, model_config)
        if missing := sorted({name for name, _ in model.named_parameters()} - self.loaded):
            raise RuntimeError(
                f"the published weights lack parameters: {missing[0]} ({len(missing)} in total)"
            )
        head = getattr(model, "lm_head", None)
        if getattr(model_config.hf_config, "tie_word_embeddings", False) and head is not None:
            # The packed copy in the head still holds the old embeddings.
            head.quant_method.process_weights_after_loading(head)

    def _checksummed(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.crc = checksum({name: tensor}, self.crc)
            yield name, tensor


@dataclass
class FileInit(WeightTransferInitInfo):
    """Empty initialisation of `FileTransfer`, which needs no connection."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """Description of one transfer of a weight file."""

    path: str
    """Path of the safetensors file."""
    names: list[str]
    """Names of the tensors, in the order of their checksum."""


class FileTransfer(WeightTransferEngine[FileInit, FileUpdate]):
    """Backend `crl-file`: every worker reads the whole file and loads its share of the model."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.load = LoadProgress()
        unlink_shared_memory()

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Do nothing; a file needs no connection."""

    def start_weight_update(self) -> None:
        self.load.begin(self.model)

    def receive_weights(self, update_info: FileUpdate) -> None:
        with safe_open(update_info.path, "pt") as file:
            self.load.load_tensors(
                self.model, ((name, file.get_tensor(name)) for name in update_info.names)
            )

    def finish_weight_update(self) -> None:
        self.load.end(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing; there is no resource to release."""


class NcclTransfer(NCCLWeightTransferEngine):
    """Backend `crl-nccl`: vLLM's broadcast from the trainer's rank 0, with a checksum.

    The trainer and vLLM need separate GPUs.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.load = LoadProgress()

    def start_weight_update(self) -> None:
        self.load.begin(self.model)

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        model: Any = self.model
        self.model: Any = _ChecksummedModel(model, self.load)
        try:
            super().receive_weights(update_info)
        finally:
            self.model = model

    def finish_weight_update(self) -> None:
        self.load.end(self.model, self.model_config)


@dataclass
class _ChecksummedModel:
    """Stand-in for the model during a transfer. It adds the tensors to the checksum.

    vLLM's NCCL backend calls only `load_weights` of the model.
    """

    model: torch.nn.Module
    load: LoadProgress

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.load.load_tensors(self.model, weights)


WeightTransferEngineFactory.register_engine("crl-file", FileTransfer)
WeightTransferEngineFactory.register_engine("crl-nccl", NcclTransfer)

"""What runs in vLLM's worker processes: the receiving end of a weight sync.

vLLM imports this file in every worker because the engine names `Receiver` as its worker extension. It adds two backends to vLLM's
weight transfer: `crl-file` reads a safetensors file, `crl-nccl` is vLLM's own NCCL backend. Both count what they received, so that the
engine can compare it with what was sent, and pack the output head of tied models again, which vLLM leaves as it was on the CPU. A thread
ends vLLM's processes when the one that started them is gone, which vLLM itself does not notice, and removes what that left behind.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
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
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from crl.engines.vllm_replica import OWNER, start_time
from crl.modeling import checksum
from crl.scratch import sweep_all

WATCH_S = 2.0
"""Seconds between two looks at the owner."""

GRACE_S = 10.0
"""Seconds that a process has to end by itself before it is killed."""


class Receiver:
    """vLLM's worker extension; its methods are called over `collective_rpc`."""

    weight_transfer_engine: Any

    def received_checksum(self) -> int:
        """Of the weights that the last sync brought this worker, before they were cut and packed for its kernels."""
        return self.weight_transfer_engine.load.crc


@dataclass
class Load:
    """One sync as a worker sees it: crc of the tensors so far; loaded: the model's own names of what they filled."""

    crc: int = 0
    loaded: set[str] = field(default_factory=set)

    def begin(self, model: torch.nn.Module) -> None:
        self.crc, self.loaded = 0, set()
        initialize_layerwise_reload(model)

    def take(self, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loaded |= model.load_weights(self._counted(weights))  # pyright: ignore[reportCallIssue]

    def end(self, model: torch.nn.Module, model_config: Any) -> None:
        """Raises `RuntimeError` when the weights do not fill the model: the rest would be those of before."""
        finalize_layerwise_reload(model, model_config)
        if missing := sorted({name for name, _ in model.named_parameters()} - self.loaded):
            raise RuntimeError(
                f"the published weights lack {missing[0]} ({len(missing)} missing in all)"
            )
        head = getattr(model, "lm_head", None)
        if getattr(model_config.hf_config, "tie_word_embeddings", False) and head is not None:
            head.quant_method.process_weights_after_loading(
                head
            )  # its packed copy is of the old embeddings

    def _counted(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.crc = checksum({name: tensor}, self.crc)
            yield name, tensor


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing has to be agreed on before the first file."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """path: of a safetensors file; names: of its tensors, in the order of their checksum."""

    path: str
    names: list[str]


class FileTransfer(WeightTransferEngine[FileInit, FileUpdate]):
    """The backend `crl-file`: every worker reads the whole file and keeps its share."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.load = Load()

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        self.load.begin(self.model)

    def receive_weights(self, update_info: FileUpdate) -> None:
        with safe_open(update_info.path, "pt") as file:
            self.load.take(
                self.model, ((name, file.get_tensor(name)) for name in update_info.names)
            )

    def finish_weight_update(self) -> None:
        self.load.end(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing to release."""


class NcclTransfer(NCCLWeightTransferEngine):
    """The backend `crl-nccl`: vLLM's broadcast from the trainer's rank 0, counted like a file. Needs GPUs of its own on either side."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.load = Load()

    def start_weight_update(self) -> None:
        self.load.begin(self.model)

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        model: Any = self.model
        self.model: Any = _Counting(model, self.load)
        try:
            super().receive_weights(update_info)
        finally:
            self.model = model

    def finish_weight_update(self) -> None:
        self.load.end(self.model, self.model_config)


@dataclass
class _Counting:
    """Stands for the model while vLLM's NCCL backend hands it tensors: that calls `load_weights` and nothing else."""

    model: torch.nn.Module
    load: Load

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.load.take(self.model, weights)


WeightTransferEngineFactory.register_engine("crl-file", FileTransfer)
WeightTransferEngineFactory.register_engine("crl-nccl", NcclTransfer)


def follow_owner() -> None:
    """Ends the engine's process, which a worker is a child of or is itself, and its workers, once its owner is gone.

    What the owner left in shared memory and among temporary files is removed then. A zombie is gone, and so is one whose number is another
    process's now.
    """
    owner, started = map(int, os.environ[OWNER].split())
    parent = multiprocessing.parent_process()  # also if it is gone already
    assert parent is not None
    assert parent.pid is not None
    engine = parent.pid if parent.pid != owner else os.getpid()

    def watch() -> None:
        while start_time(owner) == started:
            time.sleep(WATCH_S)
        sweep = threading.Thread(
            target=sweep_all, name="sweep"
        )  # no daemon: a process that ends waits for it
        sweep.start()
        _end(engine, signal.SIGTERM)
        time.sleep(GRACE_S)
        _end(engine, signal.SIGKILL)  # whose workers end then, unless they cannot
        sweep.join()
        time.sleep(GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="owner watch").start()


def _end(engine: int, number: signal.Signals) -> None:
    if engine in (os.getppid(), os.getpid()):  # else it is gone
        with suppress(ProcessLookupError):
            os.kill(engine, number)


if OWNER in os.environ:
    follow_owner()

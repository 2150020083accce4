"""In-process learner: one model, one AdamW optimizer, one worker thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import safe_open

from crl.errors import CrlError, LearnerError
from crl.learners.heap import release_freed_memory
from crl.learners.master import MasterWeights
from crl.learners.optimizer_file import (
    MOMENTS,
    OPTIMIZER_FILE,
    optimizer_metadata,
    optimizer_path,
    restore_schedule,
)
from crl.learners.step import Trainer, TrainSettings, adamw
from crl.modeling.loading import InProcessWeights, load_model
from crl.modeling.lora import Adapter, adapter_parameters, load_adapter, write_adapter
from crl.modeling.weights import manifest_of, write_tensors
from crl.protocols import Loss, State
from crl.types import Minibatch, StepStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from crl.config.schema import OptimizerSection

T = TypeVar("T")
Tensors = dict[str, torch.Tensor]


class LocalLearner:
    """`crl.protocols.Learner` in this process.

    A model in half precision is trained with float32 master weights (`MasterWeights`). If the model
    has an adapter (`crl.modeling.lora`), only the adapter is trained and saved.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        loss: Loss,
        optimizer: OptimizerSection,
        settings: TrainSettings,
        *,
        threads: int = 1,
        adapter: Adapter | None = None,
        key: str = "actor.model",
    ) -> None:
        """Prepare training of the model.

        `adapter` is the adapter that the model has, `key` the setting that names the model.
        """
        self.model = model
        self._key = key
        self.version = 0
        """Number of steps that changed the weights."""
        self._adapter = adapter
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        half = any(parameter.dtype != torch.float32 for parameter in trained)
        self._masters = MasterWeights(model) if half else None
        parameters = self._masters.parameters if self._masters else trained
        cuda = model.device.type == "cuda"
        # The fused update needs no temporary memory of the size of the weights.
        optim, schedule = adamw(parameters, optimizer, fused=cuda)
        if self._masters:
            self._masters.attach(optim)
        self._trainer = Trainer(model, optim, schedule, loss, settings)
        self._thread = ThreadPoolExecutor(
            1, "learner", initializer=torch.set_num_threads, initargs=(threads,)
        )

    async def step(self, minibatches: Sequence[Minibatch]) -> StepStats:
        """Run one training step. See `crl.protocols.Learner`. Raise `LearnerError` on failure."""
        return await self._compute(self._step, minibatches)

    async def publish(self) -> InProcessWeights:
        return await self._compute(self._publish)

    async def save(self, directory: Path) -> None:
        """Write the model in Hugging Face format and the optimizer state to `directory`."""
        await asyncio.to_thread(await self.prepare_save(directory))

    async def prepare_save(
        self, directory: Path, *, optimizer: bool = True
    ) -> Callable[[], None]:  # fmt: skip
        """Copy the weights and the optimizer to host memory. See `crl.protocols.Learner`."""
        weights, state = await self._compute(self._copied, optimizer)
        return lambda: self._write(directory, weights, state)

    async def load(self, directory: Path) -> None:
        await self._compute(self._load, directory)

    async def watch(self) -> None:
        """Wait forever, because a thread cannot be lost while it is idle."""
        await asyncio.Event().wait()

    def state(self) -> State:
        return {"version": self.version}

    def load_state(self, state: State) -> None:
        self.version = state["version"]

    def details(self) -> list[str]:
        return []

    async def aclose(self) -> None:
        self._thread.shutdown()

    def _step(self, minibatches: Sequence[Minibatch]) -> StepStats:
        stats = self._trainer.step(minibatches, self.version)
        # On the worker thread, because a cancelled caller must not separate the version from the
        # weights.
        self.version += stats.updates > 0
        release_freed_memory()
        return stats

    def _publish(self) -> InProcessWeights:
        if not self._adapter or self._adapter.merged:
            return InProcessWeights.snapshot(self.model, self.version)
        # The engine computes in this precision.
        matrices = {
            name: matrix.detach().to(self.model.dtype)
            for name, matrix in adapter_parameters(self.model).items()
        }
        return InProcessWeights.copies(matrices, self.version)

    def _copied(
        self, with_optimizer: bool
    ) -> tuple[Tensors, tuple[Tensors, Mapping[str, str]] | None]:
        """Return copies of the weights, and of the optimizer if wanted, between two steps."""
        return self._copied_weights(), self._copied_optimizer() if with_optimizer else None

    def _copied_weights(self) -> Tensors:
        """Return copies of the weights."""
        weights = adapter_parameters(self.model) if self._adapter else self.model.state_dict()
        # Tied weights are one tensor under several names, and must remain one.
        copies = {tensor.data_ptr(): _host_copy(tensor) for tensor in weights.values()}
        return {name: copies[tensor.data_ptr()] for name, tensor in weights.items()}

    def _copied_optimizer(self) -> tuple[Tensors, Mapping[str, str]]:
        """Return copies of the optimizer's tensors, and the metadata of its file."""
        optimizer, schedule = self._trainer.optimizer, self._trainer.schedule
        tensors: Tensors = {}
        for name, parameter in self._optimized():
            if self._masters:
                tensors[f"weight.{name}"] = _host_copy(parameter)
            for kind in MOMENTS:  # AdamW creates them at its first update
                moment = optimizer.state[parameter].get(kind)
                tensors[f"{kind}.{name}"] = (
                    torch.zeros_like(parameter.detach(), device="cpu")
                    if moment is None
                    else _host_copy(moment)
                )
        return tensors, optimizer_metadata(schedule.last_epoch)

    def _write(
        self, directory: Path, weights: Tensors, optimizer: tuple[Tensors, Mapping[str, str]] | None
    ) -> None:
        """Write copied weights and a copied optimizer. Raise `LearnerError` on failure."""
        try:
            if self._adapter:
                write_adapter(self.model, weights, self._adapter.base, directory)
            else:
                self.model.save_pretrained(directory, state_dict=weights)
            if optimizer:
                tensors, metadata = optimizer
                write_tensors(
                    directory / OPTIMIZER_FILE, manifest_of(tensors), tensors.values(), metadata
                )
        except Exception as error:  # such as a full disk; safetensors has errors of its own
            raise _failure(error) from error

    def _optimized(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the value of each weight that the optimizer updates."""
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        if not self._masters:
            yield from named
            return
        for (name, _), master in zip(named, self._masters.parameters, strict=True):
            yield name, master

    def _load(self, directory: Path) -> None:
        if self._adapter:
            load_adapter(self.model, directory)
        else:
            loaded = load_model(directory, self.model.device, self.model.dtype, key=self._key)
            self.model.load_state_dict(loaded.state_dict())
        path = optimizer_path(directory)
        optimizer, device = self._trainer.optimizer, str(self.model.device)
        with safe_open(path, "pt", device=device) as file:
            updates = restore_schedule(self._trainer.schedule, file.metadata())
            saved_names = set(file.keys())
            weights = dict(self.model.named_parameters())
            masters = []
            for name, parameter in self._optimized():
                moments = {kind: file.get_tensor(f"{kind}.{name}") for kind in MOMENTS}
                optimizer.state[parameter] = {
                    "step": _step_tensor(optimizer, updates, parameter),
                    **moments,
                }
                masters.append(
                    file.get_tensor(f"weight.{name}")
                    if f"weight.{name}" in saved_names
                    else weights[name].detach().float()
                )
        if self._masters:
            self._masters.load(masters)

    async def _compute(self, work: Callable[..., T], *args: Any) -> T:
        """Return the result of `work(*args)`, run on the worker thread.

        Raise every error except a `CrlError` as `LearnerError`.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        except CrlError:
            raise
        except Exception as error:  # such as out of memory; the weights may be damaged
            raise _failure(error) from error


def _failure(error: Exception) -> LearnerError:
    return LearnerError(f"the learner failed: {type(error).__name__}: {error}")


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _step_tensor(
    optimizer: torch.optim.Optimizer, updates: int, parameter: torch.Tensor
) -> torch.Tensor:
    """Return AdamW's counter of updates. A fused AdamW keeps it on the device of the weight."""
    fused = optimizer.param_groups[0]["fused"]
    return torch.tensor(float(updates), device=parameter.device if fused else "cpu")

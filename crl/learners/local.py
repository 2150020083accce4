"""In-process learner: one model, one AdamW optimizer, one worker thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from crl.errors import CrlError, LearnerError
from crl.learners.master import MasterWeights
from crl.learners.step import Trainer, TrainSettings, adamw
from crl.modeling.loading import InProcessWeights, load_model
from crl.protocols import Loss, State
from crl.types import Minibatch, StepStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from crl.config.schema import OptimizerSection

T = TypeVar("T")

OPTIMIZER_FILE = "optimizer.pt"
"""File name of the optimizer and schedule state in the directory of a saved model."""


class LocalLearner:
    """`crl.protocols.Learner` in this process.

    A model in half precision is trained with float32 master weights (`MasterWeights`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        loss: Loss,
        optimizer: OptimizerSection,
        settings: TrainSettings,
        *,
        threads: int = 1,
    ) -> None:
        self.model = model
        self.version = 0
        """Number of steps that changed the weights."""
        self._masters = None if model.dtype == torch.float32 else MasterWeights(model)
        parameters = self._masters.parameters if self._masters else model.parameters()
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
        return await self._compute(InProcessWeights.snapshot, self.model, self.version)

    async def save(self, directory: Path) -> None:
        await self._compute(self._save, directory)

    async def load(self, directory: Path) -> None:
        await self._compute(self._load, directory)

    async def watch(self) -> None:
        """Wait forever, because a thread cannot be lost while it is idle."""
        await asyncio.Event().wait()

    def state(self) -> State:
        return {"version": self.version}

    def load_state(self, state: State) -> None:
        self.version = state["version"]

    async def aclose(self) -> None:
        self._thread.shutdown()

    def _step(self, minibatches: Sequence[Minibatch]) -> StepStats:
        stats = self._trainer.step(minibatches, self.version)
        # On the worker thread, because a cancelled caller must not separate the version from the
        # weights.
        self.version += stats.updates > 0
        return stats

    def _save(self, directory: Path) -> None:
        self.model.save_pretrained(directory)
        state: State = {
            "optimizer": self._trainer.optimizer.state_dict(),
            "schedule": self._trainer.schedule.state_dict(),
        }
        if self._masters:
            state["masters"] = [master.detach() for master in self._masters.parameters]
        torch.save(state, directory / OPTIMIZER_FILE)

    def _load(self, directory: Path) -> None:
        loaded = load_model(directory, self.model.device, self.model.dtype)
        if not (directory / OPTIMIZER_FILE).is_file():
            raise LearnerError(
                f"{directory} contains no {OPTIMIZER_FILE}: another kind of learner saved it. "
                "Use the learner.kind with which the checkpoint was saved"
            )
        self.model.load_state_dict(loaded.state_dict())
        saved = torch.load(
            directory / OPTIMIZER_FILE, map_location=self.model.device, weights_only=True
        )
        self._trainer.optimizer.load_state_dict(saved["optimizer"])
        self._trainer.schedule.load_state_dict(saved["schedule"])
        if self._masters:
            self._masters.load(saved["masters"])

    async def _compute(self, work: Callable[..., T], *args: Any) -> T:
        """Return the result of `work(*args)`, run on the worker thread.

        Raise every error except a `CrlError` as `LearnerError`.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        except CrlError:
            raise
        except Exception as error:  # such as out of memory; the weights may be damaged
            raise LearnerError(f"the learner failed: {type(error).__name__}: {error}") from error

"""Training in half precision: the model's weights are rounded copies of float32 ones, which the optimizer updates."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MasterWeights:
    """float32 weights of a model in half precision. An update of 1e-6 would vanish in the rounding of the model's own.

    `parameters` are the optimizer's. The model's gradients are added up there, in float32, as they come; after every step of the
    optimizer the model gets the new weights, rounded.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = [p for p in model.parameters() if p.requires_grad]
        self.parameters = [p.detach().float().clone().requires_grad_() for p in self._model]
        for parameter, master in zip(self._model, self.parameters, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(_hand_over, master))

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_post_hook(lambda *_: self._round())

    def load(self, saved: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for master, tensor in zip(self.parameters, saved, strict=True):
                master.copy_(tensor)
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for parameter, master in zip(self._model, self.parameters, strict=True):
            parameter.copy_(master)


def _hand_over(master: torch.Tensor, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    master.grad = (
        parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
    )
    parameter.grad = None

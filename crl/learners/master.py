"""Training in half precision with float32 master weights.

The optimizer updates the master weights. The model's weights are rounded copies of them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MasterWeights:
    """Float32 copies of the weights of a model in half precision.

    Rounding to half precision would lose an update of 1e-6. During a backward pass, the gradients
    of the model are added to the gradients of `parameters` in float32. After every optimizer step,
    the new weights are rounded and copied to the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = [p for p in model.parameters() if p.requires_grad]
        self.parameters = [p.detach().float().clone().requires_grad_() for p in self._model]
        """Master weights, which are the parameters of the optimizer."""
        for parameter, master in zip(self._model, self.parameters, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master))

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the model's weights after every step of `optimizer`."""
        optimizer.register_step_post_hook(lambda *_: self._copy_rounded())

    def load(self, saved: list[torch.Tensor]) -> None:
        """Load saved master weights and update the model's weights."""
        with torch.no_grad():
            for master, tensor in zip(self.parameters, saved, strict=True):
                master.copy_(tensor)
        self._copy_rounded()

    @torch.no_grad()
    def _copy_rounded(self) -> None:
        """Copy the rounded master weights to the model."""
        for parameter, master in zip(self._model, self.parameters, strict=True):
            parameter.copy_(master)


def _move_gradient(master: torch.Tensor, parameter: torch.Tensor) -> None:
    """Add the gradient of a model parameter to that of its master weight, then delete it."""
    assert parameter.grad is not None
    master.grad = (
        parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
    )
    parameter.grad = None

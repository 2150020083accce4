"""File of an optimizer in a checkpoint. All kinds of learners write and read it.

`optimizer.safetensors` has whole float32 tensors that do not depend on the number of ranks:
`exp_avg.NAME` and `exp_avg_sq.NAME`, AdamW's moments of each weight, and `weight.NAME`, the weight
itself if the model's own is rounded. The metadata has the number of updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from crl.errors import LearnerError

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

OPTIMIZER_FILE = "optimizer.safetensors"

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's moments, in the file and in torch."""


def optimizer_metadata(updates: int) -> dict[str, str]:
    """Return the metadata of the file."""
    return {"updates": str(updates)}


def restore_schedule(schedule: LRScheduler, metadata: Mapping[str, str]) -> int:
    """Set the schedule and its optimizer to the saved number of updates, and return the number.

    The learning rate follows the settings of this process, not those of the process that saved the
    file.
    """
    from torch.optim.lr_scheduler import LambdaLR

    assert isinstance(schedule, LambdaLR)
    updates = schedule.last_epoch = int(metadata["updates"])
    rates = [
        base * factor(updates)
        for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates
    return updates


def optimizer_path(directory: Path) -> Path:
    """Return the path of the file in a checkpoint. Raise `LearnerError` if it is missing."""
    path = directory / OPTIMIZER_FILE
    if not path.is_file():
        raise LearnerError(
            f"{directory} contains no {OPTIMIZER_FILE}: it is not a checkpoint of this version"
        )
    return path

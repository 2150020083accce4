"""Monitor that sends metrics to a Weights & Biases project."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crl.errors import ConfigError
from crl.monitor.files import series
from crl.protocols import Metrics, Monitor


class WandbMonitor(Monitor):
    """`Monitor` that starts a W&B run with the name of the run directory.

    Raise `ConfigError` if wandb is not installed.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            reason, remedy = (
                f"wandb cannot be imported ({error})",
                "Install it with pip install 'crl[wandb]'",
            )
            raise ConfigError("monitor.wandb", project, reason, remedy) from error
        self._run = wandb.init(
            project=project, name=folder.name, dir=str(folder), config=dict(config)
        )
        # W&B's own step counter refuses a second line for the same step.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, kind: str, metrics: Metrics) -> None:
        self._run.log({"step": step} | series(kind, metrics))

    def close(self) -> None:
        self._run.finish()

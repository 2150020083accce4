"""Sinks: destinations of metrics in addition to the run directory.

A new sink is a module with a `Monitor`, a setting of `MonitorSection`, and an entry in `SINKS`. The
module of a sink is imported only to open the sink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

from crl.config.schema import MonitorSection, RunConfig
from crl.extras import require_package
from crl.monitor.run_dir import RunDir
from crl.protocols import Monitor


def _open_tensorboard(config: RunConfig, run: RunDir, completed_steps: int | None) -> Monitor:
    from crl.monitor.tensorboard import TensorBoardMonitor

    return TensorBoardMonitor(run.path / "tensorboard", completed_steps)


def _open_wandb(config: RunConfig, run: RunDir, completed_steps: int | None) -> Monitor:
    from crl.monitor.wandb import WandbMonitor

    return WandbMonitor(config.monitor.wandb, run.path, config.model_dump())


SINKS: Mapping[str, Callable[[RunConfig, RunDir, int | None], Monitor]] = MappingProxyType(
    {"tensorboard": _open_tensorboard, "wandb": _open_wandb}
)
"""Function that opens each sink, by name.

Its last argument is the step at which the run is resumed; None for a new run.

The name is that of the setting in `MonitorSection`, of the extra and of its package. An empty or
false setting means that the sink is off.
"""


def require_sinks(section: MonitorSection) -> None:
    """Raise `ConfigError` if a sink of the run needs an extra that is not installed."""
    for name in _chosen(section):
        require_package(name, f"monitor.{name}", getattr(section, name))


def sinks(
    config: RunConfig, run: RunDir, completed_steps: int | None = None
) -> dict[str, Callable[[], Monitor]]:
    """Return a function for each of the run's sinks, by name. It opens the sink.

    `completed_steps` is the step at which the run is resumed; None for a new run. The functions
    raise `ConfigError` if the sink cannot be imported, and other errors of its library.
    """
    return {
        name: partial(SINKS[name], config, run, completed_steps) for name in _chosen(config.monitor)
    }


def _chosen(section: MonitorSection) -> Iterator[str]:
    """Yield the names of the sinks that are on."""
    yield from (name for name in SINKS if getattr(section, name))

"""Sinks: destinations of metrics in addition to the run directory.

A new sink is a module with a `Monitor`, a setting of `MonitorSection`, and an entry in `SINKS`. The
module of a sink is imported only to open the sink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from crl.config.schema import MonitorSection, RunConfig
from crl.extras import require_package
from crl.monitor.run_dir import RunDir
from crl.protocols import Monitor


def _open_tensorboard(config: RunConfig, run: RunDir) -> Monitor:
    from crl.monitor.tensorboard import TensorBoardMonitor

    return TensorBoardMonitor(run.path / "tensorboard")


def _open_wandb(config: RunConfig, run: RunDir) -> Monitor:
    from crl.monitor.wandb import WandbMonitor

    return WandbMonitor(config.monitor.wandb, run.path, config.model_dump())


SINKS: Mapping[str, Callable[[RunConfig, RunDir], Monitor]] = MappingProxyType(
    {"tensorboard": _open_tensorboard, "wandb": _open_wandb}
)
"""Function that opens each sink, by name.

The name is that of the setting in `MonitorSection`, of the extra and of its package. An empty or
false setting means that the sink is off.
"""


def require_sinks(section: MonitorSection) -> None:
    """Raise `ConfigError` if a sink of the run needs an extra that is not installed."""
    for name in _chosen(section):
        require_package(name, f"monitor.{name}", getattr(section, name))


def open_sinks(config: RunConfig, run: RunDir) -> dict[str, Monitor]:
    """Return the monitors of the run's sinks by name.

    Raise `ConfigError` if one cannot be imported.
    """
    return {name: SINKS[name](config, run) for name in _chosen(config.monitor)}


def _chosen(section: MonitorSection) -> Iterator[str]:
    """Yield the names of the sinks that are on."""
    yield from (name for name in SINKS if getattr(section, name))

"""Monitor that forwards to several monitors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from crl.protocols import Metrics, Monitor
from crl.types import Experience, Trajectory


class FanOut(Monitor):
    """`Monitor` that forwards every call to each of its monitors, in order.

    `close` closes all of them, even if one fails.
    """

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self._monitors = tuple(monitors)

    def log(self, step: int, kind: str, metrics: Metrics) -> None:
        for monitor in self._monitors:
            monitor.log(step, kind, metrics)

    def trajectories(self, trajectories: Sequence[Trajectory]) -> None:
        for monitor in self._monitors:
            monitor.trajectories(trajectories)

    def experiences(self, experiences: Sequence[Experience]) -> None:
        for monitor in self._monitors:
            monitor.experiences(experiences)

    def note(self, text: str) -> None:
        for monitor in self._monitors:
            monitor.note(text)

    def close(self) -> None:
        with ExitStack() as stack:
            for monitor in self._monitors:
                stack.callback(monitor.close)

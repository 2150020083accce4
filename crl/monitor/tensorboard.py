"""Monitor that writes metrics as TensorBoard scalars.

It uses TensorBoard's own event writer and needs no torch.
"""

from __future__ import annotations

import time
from pathlib import Path

from crl.errors import ConfigError
from crl.monitor.files import series
from crl.protocols import Metrics, Monitor


class TensorBoardMonitor(Monitor):
    """`Monitor` that writes event files under `folder`.

    `completed_steps`: step at which a run is resumed; TensorBoard hides later points of earlier
    files. None for a new run.

    Raise `ConfigError` if TensorBoard is not installed.
    """

    def __init__(self, folder: Path, completed_steps: int | None = None) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import (
                Event,  # pyright: ignore[reportAttributeAccessIssue]
                SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
            )
            from tensorboard.compat.proto.summary_pb2 import (
                Summary,  # pyright: ignore[reportAttributeAccessIssue]
            )
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            reason, remedy = (
                f"TensorBoard cannot be imported ({error})",
                "Install it with pip install 'crl[tensorboard]'",
            )
            raise ConfigError("monitor.tensorboard", True, reason, remedy) from error
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))
        if completed_steps is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(
                Event(wall_time=time.time(), step=completed_steps + 1, session_log=start)
            )

    def log(self, step: int, kind: str, metrics: Metrics) -> None:
        scalars = [
            self._summary.Value(tag=n, simple_value=v)
            for n, v in series(kind, metrics).items()
            if isinstance(v, int | float)
        ]
        self._writer.add_event(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars))
        )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

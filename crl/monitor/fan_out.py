"""Monitor that forwards to several monitors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from crl.errors import ConfigError
from crl.protocols import Metrics, Monitor
from crl.types import Experience, Trajectory


class FanOut(Monitor):
    """`Monitor` that forwards every call to each of its monitors, in order.

    * `files`: files of the run. Their errors are raised.
    * `sinks`: other monitors by name, such as the screen. A sink that raises an error is closed and
      gets no further calls. A warning says so; it is written once.
    """

    def __init__(self, files: Monitor, sinks: Mapping[str, Monitor]) -> None:
        self._files, self._sinks = files, dict(sinks)

    def add(self, name: str, open_sink: Callable[[], Monitor]) -> None:
        """Open a sink and add it. One that cannot be opened is dropped with the same warning.

        Raise `ConfigError` if the user has to fix the cause.
        """
        try:
            self._sinks[name] = open_sink()
        except ConfigError:
            raise
        except Exception as error:  # its type depends on the library of the sink
            self._warn(name, error)

    def log(self, step: int, kind: str, metrics: Metrics) -> None:
        self._forward(lambda monitor: monitor.log(step, kind, metrics))

    def trajectories(self, trajectories: Sequence[Trajectory]) -> None:
        self._forward(lambda monitor: monitor.trajectories(trajectories))

    def experiences(self, experiences: Sequence[Experience]) -> None:
        self._forward(lambda monitor: monitor.experiences(experiences))

    def progress(self, stage: str, done: int, total: int) -> None:
        self._forward(lambda monitor: monitor.progress(stage, done, total))

    def note(self, text: str) -> None:
        self._forward(lambda monitor: monitor.note(text))

    def close(self) -> None:
        """Close the sinks, then the files, which have the warnings about sinks."""
        try:
            self._forward_to_sinks(lambda monitor: monitor.close())
        finally:
            self._files.close()

    def _forward(self, call: Callable[[Monitor], None]) -> None:
        call(self._files)
        self._forward_to_sinks(call)

    def _forward_to_sinks(self, call: Callable[[Monitor], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:  # its type depends on the library of the sink
                self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        sink = self._sinks.pop(name)
        with suppress(Exception):
            sink.close()
        self._warn(name, error)

    def _warn(self, name: str, error: Exception) -> None:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        self.note(
            f"warning: the sink {name} failed and gets no further metrics ({reason}). The files of "
            "the run are complete"
        )

"""Clock of calls to a model: of the model that writes the bank, or of the agents' model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CallClock:
    """Number of calls, and the time in which at least one of them was in progress.

    Calls overlap with each other and with rollouts, so the sum of their durations would exceed the
    time of a step. `now` returns the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._open = self._calls = 0
        self._busy, self._last, self._taken = 0.0, now(), 0.0

    @contextmanager
    def __call__(self, *, counted: bool = True) -> Iterator[None]:
        """Time the block, and count it as one call if `counted`."""
        self._advance()
        self._calls += counted
        self._open += 1
        try:
            yield
        finally:
            self._advance()
            self._open -= 1

    def seconds(self) -> float:
        """Return the seconds so far in which at least one call was in progress."""
        self._advance()
        return self._busy

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call of this method."""
        seconds = self.seconds()
        metrics = {"perf/distil_calls": self._calls, "perf/distil_s": seconds - self._taken}
        self._calls, self._taken = 0, seconds
        return metrics

    def _advance(self) -> None:
        now = self._now()
        self._busy += (now - self._last) if self._open else 0.0
        self._last = now

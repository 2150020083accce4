"""Supervisor of a run: failing episodes, warnings and stalls."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from crl.config.schema import RunSection
from crl.errors import CrlError, RolloutError
from crl.failures import reported
from crl.protocols import State
from crl.rollout.episode import Report
from crl.run.supervision.health import EpisodeHealth, Warnings
from crl.run.supervision.watchdog import Watchdog
from crl.types import Trajectory


class Supervisor:
    """Supervisor of a run.

    * `note`: writes a line for readers, to screen and log.
    * `log`: writes a text to the log alone.
    """

    def __init__(
        self, settings: RunSection, note: Callable[[str], object], log: Callable[[str], object]
    ) -> None:
        self._note = note
        self.health = EpisodeHealth(settings.max_error_rate)
        self.warnings = Warnings(note)
        self.watchdog = Watchdog(
            settings.stall_seconds, ends_run=settings.stall_ends_run, note=note, log=log
        )

    @contextmanager
    def episode(self, task: str) -> Iterator[Report]:
        """Observe an episode of any kind.

        The yielded function raises `CrlError` as that of `EpisodeHealth` does, after a note with
        the traceback of its cause. The error is reported before the episode's environment is
        released.
        """
        with noted_episode(self.health, self._note, task) as finish:

            def report(error: RolloutError | None) -> None:
                self.watchdog.progress()
                finish(error)

            yield report

    def batch_finished(self, batch: Sequence[Trajectory]) -> None:
        """Observe the batch of a step. Raise `CrlError` as `EpisodeHealth` does, after a note."""
        with noted(self._note):
            self.health.batch_finished(batch)

    def state(self) -> State:
        """Return the state for a checkpoint, as JSON."""
        return {"health": self.health.state(), "warnings": self.warnings.state()}

    def load_state(self, state: State) -> None:
        """Continue from a state of `state`. It may be empty."""
        if state:
            self.health.load_state(state["health"])
            self.warnings.load_state(state["warnings"])


@contextmanager
def noted_episode(
    health: EpisodeHealth, note: Callable[[str], object], task: str
) -> Iterator[Report]:
    """Observe an episode as `EpisodeHealth` does, with a note before its `CrlError` is raised.

    The note is the traceback of the error's cause.
    """
    with health.episode(task) as finish:

        def report(error: RolloutError | None) -> None:
            with reported(), noted(note):
                finish(error)

        yield report


@contextmanager
def noted(note: Callable[[str], object]) -> Iterator[None]:
    """Write a note with the traceback of the cause of a `CrlError`."""
    try:
        yield
    except CrlError as failure:
        cause = failure.__cause__ or failure
        note("".join(traceback.format_exception(cause)).rstrip())
        raise

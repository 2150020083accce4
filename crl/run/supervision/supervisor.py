"""Supervisor of a run: failing episodes, warnings and stalls."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from crl.config.schema import RunSection
from crl.errors import CrlError, RolloutError
from crl.run.supervision.health import EpisodeHealth, Warnings
from crl.run.supervision.watchdog import Watchdog


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

    def episode_finished(self, task: str, error: RolloutError | None) -> None:
        """Observe a finished episode of any kind.

        Raise `CrlError` as `EpisodeHealth` does, after a note with the traceback of its cause.
        """
        self.watchdog.progress()
        try:
            self.health.observe(task, error)
        except CrlError as failure:
            cause = failure.__cause__ or failure
            self._note("".join(traceback.format_exception(cause)).rstrip())
            raise

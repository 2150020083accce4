"""Errors that are raised across package boundaries, with their exit codes.

A `RolloutError` does not end a run: the rollout turns it into an error trajectory, which is data.
Every other error ends the run. `crl play`, which has no run, ends with a `RolloutError` too.
"""

from __future__ import annotations

import errno

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CrlError(Exception):
    """Base class of the errors that are shown to the user as one line."""

    exit_code = 1
    """Exit code of the process."""


class ConfigError(CrlError):
    """Invalid value in the user's input. The message has the key, value, reason and remedy."""

    exit_code = 2

    def __init__(self, key: str, value: object, reason: str, remedy: str) -> None:
        super().__init__(f"{key} = {value!r}: {reason}. {remedy.rstrip('.')}.")
        self.key, self.value, self.reason, self.remedy = key, value, reason, remedy

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        return type(self), (
            self.key,
            self.value,
            self.reason,
            self.remedy,
        )  # errors are sent between processes


class Interrupted(KeyboardInterrupt):
    """Interrupt of a command that has already told the user what was interrupted."""


class EngineError(CrlError):
    """Failure of a whole inference engine. Running requests are lost."""


class LearnerError(CrlError):
    """Failure of a learner. Its state may be damaged; the last checkpoint is still valid."""


class CheckpointError(CrlError):
    """Failure to write a checkpoint. All existing checkpoints are complete."""


class StallError(CrlError):
    """Nothing in a run has finished for a long time, and the run is to end then."""


class StoreError(CrlError):
    """Failure to read or write the experience store."""


class RolloutError(CrlError):
    """Failure of one episode. The episode becomes an error trajectory and the run continues."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        """Part that failed, such as `engine` or `env`."""


class TransientError(RolloutError):
    """Failure that a retry may fix.

    Examples are a temporary refusal of an engine, a timeout and a broken connection.
    """


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error of a write means that there is no space.

    The disk is full or over its quota, or the file has the greatest size that the system allows.
    safetensors raises an error of its own. Its text ends with the number of the system's error.
    """
    if isinstance(error, OSError):
        return error.errno in _DISK_FULL
    return any(f"(os error {number})" in str(error) for number in _DISK_FULL)

"""The errors that cross room boundaries, and the exit code of each.

`RolloutError` never leaves the rollout: it becomes an error trajectory (data). Every other one ends the run. Only `crl play`, which has no
run, ends with it.
"""

from __future__ import annotations


class CrlError(Exception):
    """Base of every error that a user sees as one line. `exit_code` is the process's."""

    exit_code = 1


class ConfigError(CrlError):
    """A bad value in the user's input: what key, what value, why it is refused and what to do about it."""

    exit_code = 2

    def __init__(self, key: str, value: object, reason: str, remedy: str) -> None:
        super().__init__(f"{key} = {value!r}: {reason}. {remedy.rstrip('.')}.")
        self.key, self.value, self.reason, self.remedy = key, value, reason, remedy

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        return type(self), (self.key, self.value, self.reason, self.remedy)  # it crosses processes


class EngineError(CrlError):
    """An inference engine failed as a whole; requests in flight are lost."""


class LearnerError(CrlError):
    """A learner failed: its state can no longer be trusted, the last checkpoint can."""


class StoreError(CrlError):
    """The experience store cannot be read or written."""


class RolloutError(CrlError):
    """One episode failed. `kind` says where; the episode becomes an error trajectory and the run goes on."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class TransientError(RolloutError):
    """What failed may go well when it is tried again: an engine that refuses for now, a deadline, a connection that broke."""

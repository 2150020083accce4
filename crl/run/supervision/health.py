"""Detection of runs that cannot learn: failing episodes end a run, other signs are warnings."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping

from crl.errors import CrlError, RolloutError
from crl.protocols import Metrics
from crl.wording import counted

FIRST_EPISODES = 16
"""A run ends if the first episodes of a task, this many, all fail with an error."""

ERROR_WINDOW = 256
"""Number of a task's last episodes among which the share of errors is computed."""

MIN_ERROR_WINDOW = 64
"""Number of a task's episodes from which the share of errors can end a run."""

CONSECUTIVE_STEPS = 5
"""Number of successive steps with the same sign before a warning."""

REPEAT_STEPS = 50
"""Number of steps between two warnings about the same sign."""


class EpisodeHealth:
    """Observer of all episodes of a run, evaluations included, for each task.

    `max_error_rate`: largest share of the last episodes of a task that may fail with an error.
    """

    def __init__(self, max_error_rate: float) -> None:
        self._max_error_rate = max_error_rate
        self._failed: defaultdict[str, deque[bool]] = defaultdict(
            lambda: deque(maxlen=ERROR_WINDOW)
        )
        self._working: set[str] = set()
        """Tasks of which an episode has been played without an error."""

    def observe(self, task: str, error: RolloutError | None) -> None:
        """Record a finished episode.

        Raise `CrlError`, caused by `error`, if the first episodes of the task have all failed, or
        if too many of its last episodes have.
        """
        failed = self._failed[task]
        failed.append(error is not None)
        if error is None:
            self._working.add(task)
            return
        share = sum(failed) / len(failed)
        if task not in self._working and len(failed) >= FIRST_EPISODES:
            reason = f"the first {len(failed)} episodes all failed"
        elif len(failed) >= MIN_ERROR_WINDOW and share > self._max_error_rate:
            reason = (
                f"{share:.0%} of the last {len(failed)} episodes failed, more than "
                f"run.max_error_rate = {self._max_error_rate:g}"
            )
        else:
            return
        raise CrlError(f"task {task}: {reason}. The last error: {error}") from error


NO_EXPERIENCE = "no experience guided an episode"

NO_EXPERIENCE_STEPS = 20
"""The same number for `NO_EXPERIENCE`. A young bank has experiences of few places."""

Signs = Mapping[str, Callable[[Metrics, Metrics], bool]]
"""Functions of a step's metrics and those of the step before, by the text of their warning."""

SIGNS: Signs = {
    "no sample could be trained on": lambda now, before: not now.get("actor/updates", 1),
    "most actions were invalid": lambda now, before: _number(now, "rollout/invalid_actions") > 0.5,
    "all answers of the extractor were dropped": lambda now, before: (
        _increase("queue/done", now, before) > 0
        and not any(_increase(f"ops/{op}", now, before) for op in ("add", "update", "return"))
    ),
    NO_EXPERIENCE: lambda now, before: (
        _number(before, "bank/size") > 0 and now.get("rollout/used") == 0
    ),
}
"""Signs of a run that may learn nothing. A sign whose metrics are missing is not seen."""


class Warnings:
    """Warnings of a run about signs that are seen in several successive steps."""

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note = note
        self._before: Metrics = {}
        self._steps = 0
        self._streaks: Counter[str] = Counter()
        self._seen: Counter[str] = Counter()
        self._next_note: dict[str, int] = {}

    def observe(self, step: int, metrics: Metrics) -> None:
        """Observe the metrics of a completed step, and write the warnings that are due."""
        self._steps += 1
        for text, is_seen in SIGNS.items():
            if not is_seen(metrics, self._before):
                self._streaks[text] = 0
                continue
            self._seen[text] += 1
            self._streaks[text] += 1
            enough = NO_EXPERIENCE_STEPS if text == NO_EXPERIENCE else CONSECUTIVE_STEPS
            if self._streaks[text] >= enough and step >= self._next_note.get(text, 0):
                self._next_note[text] = step + REPEAT_STEPS
                self._note(f"warning: in the last {self._streaks[text]} steps {text}")
        self._before = metrics

    def lines(self) -> list[str]:
        """Return one line for each sign of which a warning was written."""
        return [
            f"warning: in {self._seen[text]} of {counted(self._steps, 'step')} {text}"
            for text in self._next_note
        ]


def _number(metrics: Metrics, name: str) -> float:
    value = metrics.get(name)
    return value if isinstance(value, int | float) else 0.0


def _increase(name: str, now: Metrics, before: Metrics) -> float:
    return _number(now, name) - _number(before, name)

"""Detection of runs that cannot learn: failing episodes end a run, other signs are warnings."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from crl.errors import CrlError, RolloutError
from crl.protocols import Metrics, State
from crl.rollout.episode import Report
from crl.types import Trajectory
from crl.wording import counted, percent

FIRST_EPISODES = 16
"""Number of first episodes of a task. A run ends if all of them fail with an error."""

ERROR_WINDOW = 256
"""Number of a task's last episodes among which the share of errors is computed."""

MIN_ERROR_WINDOW = 64
"""Number of a task's episodes from which the share of errors can end a run."""

CONSECUTIVE_STEPS = 5
"""Number of successive steps with the same sign before a warning."""

REPEAT_STEPS = 50
"""Number of steps between two warnings about the same sign."""


@dataclass(eq=False)
class _Episode:
    """Episode that has started and is not in the window yet."""

    ended: bool = False
    failed: bool = False


class EpisodeHealth:
    """Observer of all episodes of a run, evaluations included, for each task.

    Episodes are counted in the order of their starts. Failing episodes often end before others, so
    the order of the ends would overstate their share.

    `max_error_rate`: largest share of the last episodes of a task that may fail with an error.
    """

    def __init__(self, max_error_rate: float) -> None:
        self._max_error_rate = max_error_rate
        self._started: defaultdict[str, deque[_Episode]] = defaultdict(deque)
        """Episodes of a task, from the first one that has not ended."""
        self._failed: defaultdict[str, deque[bool]] = defaultdict(
            lambda: deque(maxlen=ERROR_WINDOW)
        )
        """True for each failed episode among the last ones of a task."""
        self._working: set[str] = set()
        """Tasks of which an episode has been played without an error."""
        self._last_error: dict[str, RolloutError] = {}

    @contextmanager
    def episode(self, task: str) -> Iterator[Report]:
        """Register an episode at its start. Yield the function that records its end.

        This function takes the error of the episode, or None. It raises `CrlError`, caused by the
        last error, if the first episodes of the task have all failed, or if too many of its last
        episodes have. An episode that leaves the context without an end, because it was cancelled,
        does not count.
        """
        episode, started = _Episode(), self._started[task]
        started.append(episode)
        try:
            yield partial(self._finish, task, episode)
        finally:
            if not episode.ended:
                started.remove(episode)

    def batch_finished(self, batch: Sequence[Trajectory]) -> None:
        """Raise `CrlError` if a task has only failed episodes in `batch`, and none has ever worked.

        A small run may end before `FIRST_EPISODES` have been played. A single group does not count
        if other tasks work, because its members play the same game.
        """
        failed = all(t.error for t in batch)
        for task in sorted({t.task.name for t in batch} - self._working):
            errors = [t.error for t in batch if t.task.name == task]
            groups = {t.address.group for t in batch if t.task.name == task}
            if all(errors) and (failed or len(groups) > 1):
                reason = f"no episode has worked so far, and all {len(errors)} of this step failed"
                raise self._failure(task, reason)

    def evaluation_finished(self) -> None:
        """Raise `CrlError` if a task has only failed episodes, also if there are few of them."""
        for task in sorted(self._last_error.keys() - self._working):
            raise self._failure(task, "all episodes failed")

    def state(self) -> State:
        """Return the tasks with at least one episode without an error, as JSON."""
        return {"working": sorted(self._working)}

    def load_state(self, state: State) -> None:
        self._working |= set(state["working"])

    def _finish(self, task: str, episode: _Episode, error: RolloutError | None) -> None:
        episode.ended, episode.failed = True, error is not None
        if error is None:
            self._working.add(task)
        else:
            self._last_error[task] = error
        started = self._started[task]
        while started and started[0].ended:
            self._count(task, is_failed=started.popleft().failed)

    def _count(self, task: str, *, is_failed: bool) -> None:
        """Move the outcome of an episode into the window, and apply both rules."""
        failed = self._failed[task]
        failed.append(is_failed)
        if not is_failed:
            return
        share = sum(failed) / len(failed)
        if len(failed) == FIRST_EPISODES and all(failed):
            raise self._failure(task, f"the first {FIRST_EPISODES} episodes all failed")
        if len(failed) >= MIN_ERROR_WINDOW and share > self._max_error_rate:
            raise self._failure(
                task,
                f"{percent(share)} of the last {len(failed)} episodes failed, more than "
                f"run.max_error_rate = {self._max_error_rate:g}",
            )

    def _failure(self, task: str, reason: str) -> CrlError:
        error = self._last_error[task]
        failure = CrlError(f"task {task}: {reason}. The last error: {error}")
        failure.__cause__ = error
        return failure


NO_EXPERIENCE = "no experience guided an episode"

NO_EXPERIENCE_STEPS = 20
"""`CONSECUTIVE_STEPS` for the sign `NO_EXPERIENCE`. A new bank has experiences of few places."""

Signs = Mapping[str, Callable[[Metrics, Metrics], bool]]
"""Functions of a step's metrics and those of the step before, by the text of their warning."""

SIGNS: Signs = {
    "no sample could be trained on": lambda now, before: not now.get("actor/updates", 1),
    "most actions were invalid": lambda now, before: _number(now, "rollout/invalid_actions") > 0.5,
    "all answers about episodes were dropped": lambda now, before: (
        _increase("queue/done", now, before) > 0
        and not any(_increase(f"ops/{op}", now, before) for op in ("add", "update", "return"))
    ),
    NO_EXPERIENCE: lambda now, before: (
        _number(before, "bank/size") > 0 and now.get("rollout/used") == 0
    ),
}
"""Signs of a run that may learn nothing. A sign whose metrics are missing is not seen."""

COMPARED = ("bank/size", "queue/done", "ops/add", "ops/update", "ops/return")
"""Metrics that `SIGNS` read of the step before."""


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
        self._before = {name: _number(metrics, name) for name in COMPARED if name in metrics}

    def lines(self) -> list[str]:
        """Return one line for each sign with a warning or seen in at least half of the steps.

        The second condition does not apply to `NO_EXPERIENCE`.
        """
        return [
            f"warning: in {seen} of {counted(self._steps, 'step')} {text}"
            for text, seen in self._seen.items()
            if text in self._next_note or (2 * seen >= self._steps and text != NO_EXPERIENCE)
        ]

    def state(self) -> State:
        """Return the observations, as JSON."""
        return {
            "before": dict(self._before),
            "steps": self._steps,
            "streaks": dict(self._streaks),
            "seen": dict(self._seen),
            "next_note": dict(self._next_note),
        }

    def load_state(self, state: State) -> None:
        """Continue from a state of `state`."""
        self._before, self._steps = state["before"], state["steps"]
        self._streaks, self._seen = Counter(state["streaks"]), Counter(state["seen"])
        self._next_note = dict(state["next_note"])


def _number(metrics: Metrics, name: str) -> float:
    value = metrics.get(name)
    return value if isinstance(value, int | float) else 0.0


def _increase(name: str, now: Metrics, before: Metrics) -> float:
    return _number(now, name) - _number(before, name)

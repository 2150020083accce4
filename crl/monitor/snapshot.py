"""Contents of the dashboard, folded from the lines that a run logs. Nothing in this module draws.

`fold` returns the next `Snapshot` for a snapshot and a line. `SnapshotMonitor` stores the newest
snapshot and measures time.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from crl.config.schema import RunConfig
from crl.monitor.plain import EVAL_SUCCESS
from crl.monitor.stages import Stage, Stages
from crl.protocols import LoggedLine, Metrics, Monitor
from crl.types import Experience, Trajectory, lift_order

HISTORY = 120
"""Maximum number of values in a series. Older values are dropped."""

NOTES = 500
"""Maximum number of lines of notes in a snapshot. Older lines are dropped."""

NOTE_CHARS = 2_000
"""Maximum number of characters of a line of notes. The rest is dropped."""

WARNINGS = 20
"""Maximum number of different warnings in a snapshot. Older ones are dropped."""

EXPERIENCES = 60
"""Maximum number of experiences in a snapshot."""

EPISODE_CHARS = 20_000
"""Maximum number of characters of a segment of an episode in a snapshot."""

EPISODE_SEGMENTS = 200
"""Maximum number of segments of an episode in a snapshot."""

UPDATES = "actor/updates"
"""Metric that is a sum since the start in a snapshot."""

KINDS = 20
"""Maximum number of kinds of lines in a snapshot."""

METRICS = 1_000
"""Maximum number of metrics of one kind of line in a snapshot."""

WARNING = re.compile(r"warning: (.+)|\S{1,500}?:\d+: (\w*Warning: .+)")
"""Line of a note that is a warning: of crl, or of Python's module `warnings`."""

_PROBE = re.compile(r"probe/([^/]+)/(none|right|wrong)")

# ── contents ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Series:
    """Last values of one metric."""

    values: tuple[float | None, ...] = ()
    """Values, the oldest first. None for a line that contained the metric without a number."""

    @property
    def last(self) -> float | None:
        """Newest value. None if there is none."""
        return self.values[-1] if self.values else None

    def appended(self, value: float | None) -> Series:
        """Return the series with one more value."""
        return Series((*self.values, value)[-HISTORY:])


EMPTY = Series()


@dataclass(frozen=True)
class RunInfo:
    """Information that is known before the first line."""

    name: str
    method: str
    tasks: tuple[str, ...]
    steps: int
    """Number of actor steps in the whole run."""
    path: str = ""
    """Run directory, for commands that are shown. Empty = unknown."""

    @classmethod
    def of(cls, config: RunConfig, path: Path) -> RunInfo:
        """Return the information about the run with this config and directory."""
        name = path.name or path.resolve().name
        return cls(name, config.spec.name, tuple(config.tasks), config.run.steps, str(path))


@dataclass(frozen=True)
class RateView:
    """Success rate with its interval."""

    value: float | None
    low: float | None = None
    high: float | None = None
    first: float | None = None
    """Value in the first evaluation of the run; None if there is no earlier evaluation."""


@dataclass(frozen=True)
class EvalSet:
    """Last evaluation of one eval set."""

    step: int
    """Number of completed actor steps."""
    rates: Mapping[str, RateView]
    """Success rates by condition."""


@dataclass(frozen=True)
class Probe:
    """Success rates without advice, with right advice and with wrong advice."""

    none: float | None = None
    right: float | None = None
    wrong: float | None = None


@dataclass(frozen=True)
class Evaluations:
    """Last results of evaluations and advice probes."""

    sets: Mapping[str, EvalSet] = field(default_factory=dict)
    """Last evaluations by TASK/SPLIT."""
    probes: Mapping[str, Probe] = field(default_factory=dict)
    """Last advice probe of each task."""


@dataclass(frozen=True)
class Progress:
    """Progress of the run."""

    step: int = 0
    """Number of completed steps."""
    elapsed: float | None = 0.0
    """Seconds since the start. None if unknown."""
    remaining: float | None = None
    """Estimated seconds until the end. None before there is an estimate."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each part of the last step, in order."""
    stages: tuple[Stage, ...] = ()
    """Stages under way."""
    status: str = ""
    """State of a run that is not under way. Empty = under way."""


@dataclass(frozen=True, eq=False)
class Episodes:
    """Episodes of one group, without their token columns and with shortened texts.

    Two values are equal only if they are the same object, so that a drawing can be kept.
    """

    members: tuple[Trajectory, ...] = ()

    @classmethod
    def of_last_group(cls, trajectories: Sequence[Trajectory]) -> Episodes:
        """Return the members of the group of the last trajectory."""
        if not trajectories:
            return cls()
        last = trajectories[-1].address
        return cls(
            tuple(
                shortened(t)
                for t in trajectories
                if (t.address.step, t.address.group) == (last.step, last.group)
            )
        )


def shortened(trajectory: Trajectory) -> Trajectory:
    """Return an episode without token columns, with at most `EPISODE_CHARS` of each text."""
    task, outcome = trajectory.task, trajectory.outcome
    segments = tuple(
        segment
        if len(segment.text) <= EPISODE_CHARS
        else replace(segment, text=segment.text[:EPISODE_CHARS] + "…")
        for segment in trajectory.segments[:EPISODE_SEGMENTS]
    )
    return replace(
        trajectory,
        task=replace(task, goal=task.goal[:EPISODE_CHARS]),
        outcome=replace(outcome, error=outcome.error and outcome.error[:EPISODE_CHARS]),
        segments=segments,
        traces=(),
    )


@dataclass(frozen=True)
class Snapshot:
    """Complete contents of the dashboard."""

    run: RunInfo
    progress: Progress = Progress()
    evaluations: Evaluations = Evaluations()
    experiences: tuple[Experience, ...] = ()
    """Bank entries with a lift among those of the last searches, the best lift first."""
    episodes: Episodes = Episodes()
    """Last group of training episodes."""
    metrics: Mapping[str, Mapping[str, Series]] = field(default_factory=dict)
    """Histories of all metrics by the kind of their line and their name."""
    notes: tuple[str, ...] = ()
    """Lines of notes, the oldest first."""
    warnings: tuple[str, ...] = ()
    """Different warnings, the one that was repeated last at the end."""

    def series(self, kind: str, name: str) -> Series:
        """Return the history of a metric in lines of a kind. It is empty for an unknown metric."""
        return self.metrics.get(kind, {}).get(name, EMPTY)

    def last(self, kind: str, name: str) -> float | None:
        """Return the newest value of a metric. None if there is none."""
        return self.series(kind, name).last

    def with_times(
        self, elapsed: float | None, remaining: float | None, stages: tuple[Stage, ...]
    ) -> Snapshot:
        """Return the snapshot with stages, and with the elapsed and the remaining seconds.

        `remaining`: time until the end of the last step. The last evaluation is added to it.
        """
        if self.progress.step >= self.run.steps:
            remaining = max((stage.remaining or 0.0 for stage in stages), default=0.0)
        elif remaining is not None:
            remaining += self.last("eval", "time/eval") or 0.0
        progress = replace(self.progress, elapsed=elapsed, remaining=remaining, stages=stages)
        return replace(self, progress=progress)


# ── folding ─────────────────────────────────────────────────────────────────────────────────────


def fold(snapshot: Snapshot, step: int, kind: str, metrics: Metrics) -> Snapshot:
    """Return the snapshot after one more line.

    A line of an unknown kind only extends the histories.
    """
    known = snapshot.metrics.get(kind, {})
    if kind == "train" and UPDATES in metrics:  # the line has the updates of its own step only
        before = snapshot.series("train", UPDATES).last or 0.0
        metrics = {**metrics, UPDATES: before + (to_float(metrics[UPDATES]) or 0.0)}
    values = {name: known.get(name, EMPTY).appended(to_float(metrics[name])) for name in metrics}
    histories = dict(list({**known, **values}.items())[:METRICS])
    if kind in snapshot.metrics or len(snapshot.metrics) < KINDS:
        snapshot = replace(snapshot, metrics={**snapshot.metrics, kind: histories})
    fold_line = _FOLD_BY_KIND.get(kind)
    return fold_line(snapshot, step, metrics) if fold_line else snapshot


def to_float(value: Any) -> float | None:
    """Return a metric as a finite float, or None if it is not a finite number."""
    try:
        converted = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return converted if math.isfinite(converted) else None


def _fold_train(s: Snapshot, step: int, metrics: Metrics) -> Snapshot:
    """Return the snapshot after a line about an actor step."""
    seconds = {
        name.removeprefix("time/"): to_float(value) or 0.0
        for name, value in metrics.items()
        if name.startswith("time/")
    }
    return replace(s, progress=replace(s.progress, step=step, seconds=seconds))


def _fold_eval(s: Snapshot, step: int, metrics: Metrics) -> Snapshot:
    """Return the snapshot after a line about an evaluation."""
    sets = dict(s.evaluations.sets)
    for name in metrics:
        if match := EVAL_SUCCESS.fullmatch(name):
            task, split, condition = match.groups()
            previous = sets.get(f"{task}/{split}", EvalSet(step, {}))
            value, low, high = (
                to_float(metrics.get(f"{name}{end}")) for end in ("", "/low", "/high")
            )
            last = previous.rates.get(condition, RateView(None))
            first = last.value if last.first is None else last.first
            sets[f"{task}/{split}"] = EvalSet(
                step, {**previous.rates, condition: RateView(value, low, high, first)}
            )
    return replace(
        s,
        evaluations=replace(s.evaluations, sets=sets),
        progress=_with_seconds(s.progress, step, metrics, "eval"),
    )


def _fold_probe(s: Snapshot, step: int, metrics: Metrics) -> Snapshot:
    """Return the snapshot after a line about an advice probe."""
    probes = dict(s.evaluations.probes)
    for name, value in metrics.items():
        if match := _PROBE.fullmatch(name):
            task, advice = match.groups()
            probes[task] = replace(probes.get(task, Probe()), **{advice: to_float(value)})
    return replace(
        s,
        evaluations=replace(s.evaluations, probes=probes),
        progress=_with_seconds(s.progress, step, metrics, "probe"),
    )


def _with_seconds(progress: Progress, step: int, metrics: Metrics, part: str) -> Progress:
    """Return the progress with the seconds of `part`, if the line is about the last step."""
    seconds = to_float(metrics.get(f"time/{part}"))
    if seconds is None or step != progress.step:
        return progress
    return replace(progress, seconds={**progress.seconds, part: seconds})


_FOLD_BY_KIND: Mapping[str, Callable[[Snapshot, int, Metrics], Snapshot]] = {
    "train": _fold_train,
    "eval": _fold_eval,
    "probe": _fold_probe,
}


# ── the monitor ─────────────────────────────────────────────────────────────────────────────────


class SnapshotMonitor(Monitor):
    """`Monitor` that stores the newest snapshot.

    Any thread may write to it, and may read a snapshot without waiting.

    `clock`: returns the time in seconds.
    """

    def __init__(self, run: RunInfo, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        # Times at which the last steps were trained.
        self._train_times: deque[float] = deque(maxlen=HISTORY)
        self._stages = Stages(clock)
        self._snapshot = Snapshot(run)
        self._lock = threading.RLock()

    def snapshot(self) -> Snapshot:
        """Return the current snapshot with the elapsed and the remaining time."""
        elapsed = self._clock() - self._start
        return self._snapshot.with_times(elapsed, self.remaining(), self._stages.now())

    def log(self, step: int, kind: str, metrics: Metrics) -> None:
        with self._lock:
            if kind == "train":
                self._train_times.append(self._clock())
            self._snapshot = fold(self._snapshot, step, kind, metrics)

    def resumed(self, lines: Sequence[LoggedLine], seconds: float) -> None:
        with self._lock:
            self._start = self._clock() - seconds
            for line in lines:
                if line.kind == "train" and line.seconds is not None:
                    self._train_times.append(self._start + line.seconds)
                self._snapshot = fold(self._snapshot, line.step, line.kind, line.metrics)

    def experiences(self, experiences: Sequence[Experience]) -> None:
        tried = [experience for experience in experiences if experience.counters.lift]
        tried.sort(key=lambda experience: lift_order(experience.counters.lift))
        with self._lock:
            self._snapshot = replace(self._snapshot, experiences=tuple(tried[:EXPERIENCES]))

    def trajectories(self, trajectories: Sequence[Trajectory]) -> None:
        episodes = Episodes.of_last_group(trajectories)
        with self._lock:
            self._snapshot = replace(self._snapshot, episodes=episodes)

    def progress(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            self._stages.update(stage, done, total)

    def note(self, text: str) -> None:
        lines = [line[:NOTE_CHARS] for line in text.splitlines() if line.strip()]
        found = [match[1] or match[2] for line in lines if (match := WARNING.fullmatch(line))]
        with self._lock:
            s = self._snapshot
            kept = [warning for warning in s.warnings if warning not in found]
            self._snapshot = replace(
                s,
                notes=(*s.notes, *lines)[-NOTES:],
                warnings=(*kept, *dict.fromkeys(found))[-WARNINGS:],
            )

    def remaining(self) -> float | None:
        """Return the estimated seconds until the end of the last step.

        The estimate assumes the mean pace of the last steps. Return None before two steps are
        trained.
        """
        times = tuple(self._train_times)
        if len(times) < 2:
            return None
        pace = (times[-1] - times[0]) / (len(times) - 1)
        steps = self._snapshot.run.steps - self._snapshot.progress.step
        return max(0.0, times[-1] + pace * steps - self._clock()) if steps > 0 else 0.0

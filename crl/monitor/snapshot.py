"""Contents of the dashboard, folded from the lines that a run logs. Nothing in this module draws.

`fold` returns the next `Snapshot` for a snapshot and a line. `SnapshotMonitor` stores the newest
snapshot and measures time. The annotation of a series is the name of its metric; {} in the name is
replaced by the model or the task of the record.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

from crl.monitor.plain import EVAL_SUCCESS
from crl.protocols import Metrics, Monitor
from crl.types import Experience

HISTORY = 60
"""Maximum number of values in a series. Older values are dropped."""

NOTES = 50
"""Maximum number of lines of notes in a snapshot. Older lines are dropped."""

EXPERIENCES = 60
"""Maximum number of experiences in a snapshot."""

_BANK_TASK = re.compile(r"bank/size/(.+)")
_PROBE = re.compile(r"probe/([^/]+)/(none|right|wrong)")

R = TypeVar("R")


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


@dataclass(frozen=True)
class TaskRollout:
    """Metrics of the training episodes of one task, in a run with several tasks."""

    success: Annotated[Series, "rollout/{}/success"] = EMPTY
    turns: Annotated[Series, "rollout/{}/turns"] = EMPTY
    """Actions per episode."""
    used: Annotated[Series, "rollout/{}/used"] = EMPTY
    """Share of guided episodes that received an experience."""


@dataclass(frozen=True)
class RolloutSuccess:
    """Success rates of the training episodes."""

    mean: Annotated[Series, "rollout/success"] = EMPTY
    """Success rate of all episodes."""
    guided: Annotated[Series, "rollout/success/guided"] = EMPTY
    free: Annotated[Series, "rollout/success/free"] = EMPTY
    used: Annotated[Series, "rollout/success/used"] = EMPTY
    """Success rate of the episodes that received an experience."""
    gap: Annotated[Series, "rollout/gap"] = EMPTY
    """Success rate of guided minus free members."""


@dataclass(frozen=True)
class Staleness:
    """Age of the sampled tokens, in policy versions."""

    mean: Annotated[Series, "staleness/mean"] = EMPTY
    max: Annotated[Series, "staleness/max"] = EMPTY


@dataclass(frozen=True)
class Speed:
    """Speed of the rollouts."""

    tokens_per_s: Annotated[Series, "perf/sampled_tokens_per_s"] = EMPTY
    episodes_per_s: Annotated[Series, "perf/episodes_per_s"] = EMPTY


@dataclass(frozen=True)
class Rollout:
    """Metrics of the training episodes, one value per step."""

    success: RolloutSuccess = RolloutSuccess()
    errors: Annotated[Series, "rollout/errors"] = EMPTY
    """Number of episodes that failed with an error."""
    staleness: Staleness = Staleness()
    speed: Speed = Speed()
    tasks: Mapping[str, TaskRollout] = field(default_factory=dict)
    """Metrics by task. Empty in a run with one task."""


@dataclass(frozen=True)
class RatioMetrics:
    """Importance ratios and KL divergences of an update."""

    mean: Annotated[Series, "{}/ratio_mean"] = EMPTY
    clip_fraction: Annotated[Series, "{}/clip_fraction"] = EMPTY
    approx_kl: Annotated[Series, "{}/approx_kl"] = EMPTY
    mismatch_kl: Annotated[Series, "{}/mismatch_kl"] = EMPTY


@dataclass(frozen=True)
class UpdateMetrics:
    """Progress of the training of one model."""

    count: Annotated[Series, "{}/updates"] = EMPTY
    """Number of updates since the start of the run."""
    version: Annotated[Series, "{}/version"] = EMPTY
    learning_rate: Annotated[Series, "{}/learning_rate"] = EMPTY
    seconds: Annotated[Series, "time/train"] = EMPTY
    """Duration of the training step, in seconds."""


@dataclass(frozen=True)
class Model:
    """Metrics of one trained model.

    The actor has one value per step, the extractor one per update.
    """

    loss: Annotated[Series, "{}/loss"] = EMPTY
    entropy: Annotated[Series, "{}/entropy"] = EMPTY
    reward: Annotated[Series, "{}/reward"] = EMPTY
    """Mean reward of the samples. Only the extractor has this metric."""
    ratio: RatioMetrics = RatioMetrics()
    updates: UpdateMetrics = UpdateMetrics()


@dataclass(frozen=True)
class Models:
    """Metrics of the trained models."""

    actor: Model = Model()
    extractor: Model | None = None
    """Metrics of the extractor; None before the first line about it."""


@dataclass(frozen=True)
class OpCounts:
    """Number of operations of the extractor by kind."""

    added: Annotated[Series, "ops/add"] = EMPTY
    updated: Annotated[Series, "ops/update"] = EMPTY
    returned: Annotated[Series, "ops/return"] = EMPTY
    dropped: Annotated[Series, "ops/drop"] = EMPTY


@dataclass(frozen=True)
class QueueMetrics:
    """Number of episodes in the distillation queue by state."""

    pending: Annotated[Series, "queue/pending"] = EMPTY
    leased: Annotated[Series, "queue/leased"] = EMPTY
    dead: Annotated[Series, "queue/dead"] = EMPTY

    @property
    def size(self) -> float | None:
        """Number of episodes that wait for distillation or are being distilled. None if unknown."""
        known = [value for value in (self.pending.last, self.leased.last) if value is not None]
        return sum(known) if known else None


@dataclass(frozen=True)
class RetrievalMetrics:
    """Metrics of searches and their results."""

    hit_rate: Annotated[Series, "retrieval/hit_rate"] = EMPTY
    """Share of searches that returned an experience."""
    same_goal: Annotated[Series, "retrieval/same_goal"] = EMPTY
    """Share of returned experiences whose goal is the goal of the episode."""
    p50_ms: Annotated[Series, "perf/search_p50_ms"] = EMPTY
    p95_ms: Annotated[Series, "perf/search_p95_ms"] = EMPTY
    cache_hits: Annotated[Series, "perf/embed_cache_hits"] = EMPTY
    """Share of embedded texts that were in the cache."""


@dataclass(frozen=True)
class BankMetrics:
    """Metrics of the bank, the distillation queue and retrieval."""

    size: Annotated[Series, "bank/size"] = EMPTY
    size_by_task: Mapping[str, float] = field(default_factory=dict)
    """Number of active entries of each task."""
    ops: OpCounts = OpCounts()
    queue: QueueMetrics = QueueMetrics()
    ready: Annotated[Series, "buffer/ready"] = EMPTY
    """Number of credit units that are ready for training."""
    retrieval: RetrievalMetrics = RetrievalMetrics()
    correct: Annotated[Series, "lessons/correct"] = EMPTY
    """Share of answers of the extractor with a correct lesson."""


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
    elapsed: float = 0.0
    """Seconds since the start."""
    remaining: float | None = None
    """Estimated seconds until the end. None before there is an estimate."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each part of the last step, in order."""


@dataclass(frozen=True)
class Snapshot:
    """Complete contents of the dashboard."""

    run: RunInfo
    progress: Progress = Progress()
    rollout: Rollout = Rollout()
    models: Models = Models()
    bank: BankMetrics | None = None
    """Metrics of the bank; None before the first line about it."""
    evaluations: Evaluations = Evaluations()
    experiences: tuple[Experience, ...] = ()
    """Bank entries, the most recently retrieved first."""
    notes: tuple[str, ...] = ()
    """Lines of notes, the oldest first."""


# ── folding ─────────────────────────────────────────────────────────────────────────────────────


def fold(snapshot: Snapshot, step: int, kind: str, metrics: Metrics) -> Snapshot:
    """Return the snapshot after one more line.

    A line of a kind that is not shown changes nothing.
    """
    fold_line = _FOLD_BY_KIND.get(kind)
    return fold_line(snapshot, step, metrics) if fold_line else snapshot


def to_float(value: Any) -> float | None:
    """Return a metric as a finite float, or None if it is not a finite number."""
    try:
        converted = float(value)
    except (TypeError, ValueError):
        return None
    return converted if math.isfinite(converted) else None


def _fold_train(s: Snapshot, step: int, metrics: Metrics) -> Snapshot:
    """Return the snapshot after a line about an actor step."""
    # The line contains the updates of its own step only.
    before = s.models.actor.updates.count.last or 0.0
    updates = before + (to_float(metrics.get("actor/updates")) or 0.0)
    seconds = {
        name.removeprefix("time/"): to_float(value) or 0.0
        for name, value in metrics.items()
        if name.startswith("time/")
    }
    actor = _extend(s.models.actor, {**metrics, "actor/updates": updates}, "actor")
    played = [task for task in s.run.tasks if f"rollout/{task}/success" in metrics]
    old = s.rollout.tasks
    tasks = {task: _extend(old.get(task, TaskRollout()), metrics, task) for task in played}
    return replace(
        s,
        progress=replace(s.progress, step=step, seconds=seconds),
        rollout=replace(_extend(s.rollout, metrics), tasks={**old, **tasks}),
        models=replace(s.models, actor=actor),
    )


def _fold_extractor(s: Snapshot, step: int, metrics: Metrics) -> Snapshot:
    """Return the snapshot after a line about an update of the extractor."""
    extractor = _extend(s.models.extractor or Model(), metrics, "extractor")
    return replace(s, models=replace(s.models, extractor=extractor))


def _fold_bank(s: Snapshot, step: int, metrics: Metrics) -> Snapshot:
    """Return the snapshot after a line about the bank."""
    sizes = {
        m.group(1): to_float(metrics[name]) for name in metrics if (m := _BANK_TASK.fullmatch(name))
    }
    bank = _extend(s.bank or BankMetrics(), metrics)
    known = {task: size for task, size in sizes.items() if size is not None}
    return replace(s, bank=replace(bank, size_by_task={**bank.size_by_task, **known}))


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
    "extractor": _fold_extractor,
    "bank": _fold_bank,
    "eval": _fold_eval,
    "probe": _fold_probe,
}


def _extend(record: R, metrics: Metrics, subject: str = "") -> R:
    """Return the record with the values of the metrics appended to their series.

    Parts of the record that are records themselves are extended too. `subject`: replaces {} in the
    names of metrics.
    """
    updated = {}
    for name, hint in _field_types(type(record)).items():
        value = getattr(record, name)
        if is_dataclass(hint):
            updated[name] = _extend(value, metrics, subject)
        elif get_origin(hint) is Annotated:
            metric = hint.__metadata__[0].format(subject)
            if metric in metrics:
                updated[name] = value.appended(to_float(metrics[metric]))
    return replace(
        record,  # pyright: ignore[reportArgumentType, reportCallIssue, reportType]
        **updated,
    )


@cache
def _field_types(record: type) -> dict[str, Any]:
    """Return the types of a record's fields, with the names of metrics."""
    return get_type_hints(record, include_extras=True)


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
        self._snapshot = Snapshot(run)
        self._lock = threading.RLock()

    def snapshot(self) -> Snapshot:
        """Return the current snapshot with the elapsed and the remaining time."""
        elapsed, snapshot = self._clock() - self._start, self._snapshot
        progress = replace(snapshot.progress, elapsed=elapsed, remaining=self._remaining())
        return replace(snapshot, progress=progress)

    def log(self, step: int, kind: str, metrics: Metrics) -> None:
        with self._lock:
            if kind == "train":
                self._train_times.append(self._clock())
            self._snapshot = fold(self._snapshot, step, kind, metrics)

    def experiences(self, experiences: Sequence[Experience]) -> None:
        with self._lock:
            self._snapshot = replace(self._snapshot, experiences=tuple(experiences[:EXPERIENCES]))

    def note(self, text: str) -> None:
        lines = [line for line in text.splitlines() if line.strip()]
        with self._lock:
            self._snapshot = replace(self._snapshot, notes=(*self._snapshot.notes, *lines)[-NOTES:])

    def _remaining(self) -> float | None:
        """Return the estimated seconds until the end, at the mean pace of the last steps.

        Return None before two steps are trained.
        """
        times = tuple(self._train_times)
        if len(times) < 2:
            return None
        pace = (times[-1] - times[0]) / (len(times) - 1)
        steps = self._snapshot.run.steps - self._snapshot.progress.step
        return max(0.0, times[-1] + pace * steps - self._clock()) if steps > 0 else 0.0

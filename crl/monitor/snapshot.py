"""What a dashboard shows of a run, folded from the lines that the run logs. Pure: nothing here draws.

`fold` makes the next `Snapshot` of the last one and a line; `SnapshotMonitor` keeps the newest and the time. The annotation of
a series names the figure that it follows; {} in it is the model, or the task, that the record is about.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

from crl.monitor.plain import EVAL_SUCCESS, Figures
from crl.types import Experience, Trajectory

HISTORY = 60
"""Values that a series remembers: the last steps of a figure."""

NOTES = 50
"""Lines of notes that a snapshot holds, the last ones."""

EXPERIENCES = 60
"""Experiences that a snapshot holds, the newest ones."""

_BANK_TASK = re.compile(r"bank/size/(.+)")
_PROBE = re.compile(r"probe/([^/]+)/(none|right|wrong)")

R = TypeVar("R")


# ── what is shown ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Series:
    """The last values of one figure, oldest first; None where a line named the figure without a number."""

    values: tuple[float | None, ...] = ()

    @property
    def last(self) -> float | None:
        return self.values[-1] if self.values else None

    def then(self, value: float | None) -> Series:
        return Series((*self.values, value)[-HISTORY:])


EMPTY = Series()


@dataclass(frozen=True)
class RunInfo:
    """What is known before the first line. steps: actor steps of the whole run."""

    name: str
    method: str
    tasks: tuple[str, ...]
    steps: int


@dataclass(frozen=True)
class Rollout:
    """The training episodes, a value a step. used: the success rate where an experience was used; gap: guided − free."""

    success: Annotated[Series, "rollout/success"] = EMPTY
    guided: Annotated[Series, "rollout/success/guided"] = EMPTY
    free: Annotated[Series, "rollout/success/free"] = EMPTY
    used: Annotated[Series, "rollout/success/used"] = EMPTY
    gap: Annotated[Series, "rollout/gap"] = EMPTY
    errors: Annotated[Series, "rollout/errors"] = EMPTY
    stale_mean: Annotated[Series, "staleness/mean"] = EMPTY
    stale_max: Annotated[Series, "staleness/max"] = EMPTY
    tokens_per_s: Annotated[Series, "perf/sampled_tokens_per_s"] = EMPTY
    episodes_per_s: Annotated[Series, "perf/episodes_per_s"] = EMPTY


@dataclass(frozen=True)
class TaskRollout:
    """The training episodes of one of several tasks. turns: actions an episode; used: share of the guided that were guided by something."""

    success: Annotated[Series, "rollout/{}/success"] = EMPTY
    turns: Annotated[Series, "rollout/{}/turns"] = EMPTY
    used: Annotated[Series, "rollout/{}/used"] = EMPTY


@dataclass(frozen=True)
class Model:
    """One trained model: the actor a value a step, the extractor a value an update. updates: since the start of the run."""

    loss: Annotated[Series, "{}/loss"] = EMPTY
    ratio_mean: Annotated[Series, "{}/ratio_mean"] = EMPTY
    clip_fraction: Annotated[Series, "{}/clip_fraction"] = EMPTY
    approx_kl: Annotated[Series, "{}/approx_kl"] = EMPTY
    entropy: Annotated[Series, "{}/entropy"] = EMPTY
    learning_rate: Annotated[Series, "{}/learning_rate"] = EMPTY
    updates: Annotated[Series, "{}/updates"] = EMPTY
    version: Annotated[Series, "{}/version"] = EMPTY
    reward: Annotated[Series, "{}/reward"] = EMPTY
    mismatch_kl: Annotated[Series, "{}/mismatch_kl"] = EMPTY
    seconds: Annotated[Series, "time/train"] = EMPTY


@dataclass(frozen=True)
class Bank:
    """The experience bank, the queue of episodes to distil, and retrieval. by_task: active entries of each task."""

    size: Annotated[Series, "bank/size"] = EMPTY
    added: Annotated[Series, "ops/add"] = EMPTY
    updated: Annotated[Series, "ops/update"] = EMPTY
    returned: Annotated[Series, "ops/return"] = EMPTY
    dropped: Annotated[Series, "ops/drop"] = EMPTY
    pending: Annotated[Series, "queue/pending"] = EMPTY
    leased: Annotated[Series, "queue/leased"] = EMPTY
    dead: Annotated[Series, "queue/dead"] = EMPTY
    refused: Annotated[Series, "queue/refused"] = EMPTY
    buffer: Annotated[Series, "buffer/ready"] = EMPTY
    hit_rate: Annotated[Series, "retrieval/hit_rate"] = EMPTY
    right_place: Annotated[Series, "retrieval/right_place"] = EMPTY
    correct: Annotated[Series, "lessons/correct"] = EMPTY
    search_p50_ms: Annotated[Series, "perf/search_p50_ms"] = EMPTY
    search_p95_ms: Annotated[Series, "perf/search_p95_ms"] = EMPTY
    cache_hits: Annotated[Series, "perf/embed_cache_hits"] = EMPTY
    by_task: Mapping[str, float] = field(default_factory=dict)

    @property
    def waiting(self) -> float | None:
        """Episodes that are not distilled yet, those in work included."""
        known = [value for value in (self.pending.last, self.leased.last) if value is not None]
        return sum(known) if known else None


@dataclass(frozen=True)
class Rate:
    """A success rate with its interval, and what it was in the run's first evaluation."""

    value: float | None
    low: float | None = None
    high: float | None = None
    first: float | None = None


@dataclass(frozen=True)
class EvalSet:
    """The last evaluation of one set (TASK/SPLIT), after `step` steps: rates by condition."""

    step: int
    rates: Mapping[str, Rate]


@dataclass(frozen=True)
class Probe:
    """Success rates without advice, with right and with wrong advice."""

    none: float | None = None
    right: float | None = None
    wrong: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """All of it. step: finished steps; elapsed, left: seconds, `left` None until it can be told; tasks: each, where there are several;
    seconds: parts of the last step's time in order; extractor, bank: None until a line speaks of them; experiences: those first that
    guided an episode last; notes: lines, oldest first.
    """

    run: RunInfo
    step: int = 0
    elapsed: float = 0.0
    left: float | None = None
    rollout: Rollout = Rollout()
    tasks: Mapping[str, TaskRollout] = field(default_factory=dict)
    actor: Model = Model()
    extractor: Model | None = None
    bank: Bank | None = None
    evals: Mapping[str, EvalSet] = field(default_factory=dict)
    probes: Mapping[str, Probe] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    experiences: tuple[Experience, ...] = ()
    notes: tuple[str, ...] = ()


# ── folding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def fold(snapshot: Snapshot, step: int, kind: str, figures: Figures) -> Snapshot:
    """The snapshot after one more line; the same for a kind of line that is not shown."""
    follow = _FOLDS.get(kind)
    return follow(snapshot, step, figures) if follow else snapshot


def number(value: Any) -> float | None:
    """A figure as a finite float; None for what is no number."""
    try:
        converted = float(value)
    except (TypeError, ValueError):
        return None
    return converted if math.isfinite(converted) else None


def _train(s: Snapshot, step: int, figures: Figures) -> Snapshot:
    total = (s.actor.updates.last or 0.0) + (
        number(figures.get("actor/updates")) or 0.0
    )  # the line counts those of its step
    seconds = {
        name.removeprefix("time/"): number(value) or 0.0
        for name, value in figures.items()
        if name.startswith("time/")
    }
    actor = _extend(s.actor, {**figures, "actor/updates": total}, "actor")
    played = [task for task in s.run.tasks if f"rollout/{task}/success" in figures]
    tasks = {
        **s.tasks,
        **{task: _extend(s.tasks.get(task, TaskRollout()), figures, task) for task in played},
    }
    return replace(
        s, step=step, rollout=_extend(s.rollout, figures), tasks=tasks, actor=actor, seconds=seconds
    )


def _extractor(s: Snapshot, step: int, figures: Figures) -> Snapshot:
    return replace(s, extractor=_extend(s.extractor or Model(), figures, "extractor"))


def _bank(s: Snapshot, step: int, figures: Figures) -> Snapshot:
    sizes = {
        m.group(1): number(figures[name]) for name in figures if (m := _BANK_TASK.fullmatch(name))
    }
    bank = _extend(s.bank or Bank(), figures)
    by_task = {**bank.by_task, **{task: size for task, size in sizes.items() if size is not None}}
    return replace(s, bank=replace(bank, by_task=by_task))


def _eval(s: Snapshot, step: int, figures: Figures) -> Snapshot:
    evals = dict(s.evals)
    for name in figures:
        if match := EVAL_SUCCESS.fullmatch(name):
            task, split, condition = match.groups()
            known = evals.get(f"{task}/{split}", EvalSet(step, {}))
            value, low, high = (
                number(figures.get(f"{name}{end}")) for end in ("", "/low", "/high")
            )
            first = known.rates[condition].first if condition in known.rates else value
            evals[f"{task}/{split}"] = EvalSet(
                step, {**known.rates, condition: Rate(value, low, high, first)}
            )
    return replace(s, evals=evals, seconds=_with_seconds(s, step, figures, "eval"))


def _probe(s: Snapshot, step: int, figures: Figures) -> Snapshot:
    probes = dict(s.probes)
    for name, value in figures.items():
        if match := _PROBE.fullmatch(name):
            task, advice = match.groups()
            probes[task] = replace(probes.get(task, Probe()), **{advice: number(value)})
    return replace(s, probes=probes, seconds=_with_seconds(s, step, figures, "probe"))


def _with_seconds(s: Snapshot, step: int, figures: Figures, part: str) -> Mapping[str, float]:
    """The parts of the last step's time, with the one that a line about that step tells of."""
    took = number(figures.get(f"time/{part}"))
    return {**s.seconds, part: took} if took is not None and step == s.step else s.seconds


_FOLDS: Mapping[str, Callable[[Snapshot, int, Figures], Snapshot]] = {
    "train": _train,
    "extractor": _extractor,
    "bank": _bank,
    "eval": _eval,
    "probe": _probe,
}


def _extend(record: R, figures: Figures, subject: str = "") -> R:
    """`record` with the figures that are there appended to the series that follow them."""
    there = {}
    for name, template in _followed(type(record)).items():
        if (figure := template.format(subject)) in figures:
            there[name] = getattr(record, name).then(number(figures[figure]))
    return replace(record, **there)  # pyright: ignore[reportArgumentType, reportCallIssue, reportType]


@cache
def _followed(record: type) -> dict[str, str]:
    """Which figure each series of a record follows."""
    hints = get_type_hints(record, include_extras=True)
    return {
        name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")
    }


# ── the monitor ─────────────────────────────────────────────────────────────────────────────────────────────────────


class SnapshotMonitor:
    """Keeps the newest snapshot. Any thread may write to it, and take a snapshot without waiting. clock: seconds."""

    def __init__(self, run: RunInfo, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begin = clock()
        self._trained: deque[float] = deque(maxlen=HISTORY)  # when the last steps were trained
        self._snapshot = Snapshot(run)
        self._writing = threading.RLock()

    def snapshot(self) -> Snapshot:
        """The run as it is now."""
        return replace(self._snapshot, elapsed=self._clock() - self._begin, left=self._left())

    def log(self, step: int, kind: str, figures: Figures) -> None:
        with self._writing:
            if kind == "train":
                self._trained.append(self._clock())
            self._snapshot = fold(self._snapshot, step, kind, figures)

    def trajectories(self, trajectories: Sequence[Trajectory]) -> None:
        pass

    def experiences(self, experiences: Sequence[Experience]) -> None:
        with self._writing:
            self._snapshot = replace(self._snapshot, experiences=tuple(experiences[:EXPERIENCES]))

    def note(self, text: str) -> None:
        lines = [line for line in text.splitlines() if line.strip()]
        with self._writing:
            self._snapshot = replace(self._snapshot, notes=(*self._snapshot.notes, *lines)[-NOTES:])

    def close(self) -> None:
        pass

    def _left(self) -> float | None:
        """Seconds to the end at the mean pace of the last steps, of which it takes two."""
        trained = tuple(self._trained)
        if len(trained) < 2:
            return None
        pace = (trained[-1] - trained[0]) / (len(trained) - 1)
        steps = self._snapshot.run.steps - self._snapshot.step
        return max(0.0, trained[-1] + pace * steps - self._clock()) if steps > 0 else 0.0

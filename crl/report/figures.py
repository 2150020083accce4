"""Charts of runs by subject: success, time, training of both models, the bank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from crl.config.schema import OVERALL
from crl.evaluation.comparison import arms_of
from crl.evaluation.evaluate import CONDITION_LABELS, EvalKey
from crl.report.charts import (
    BarChart,
    Chart,
    Line,
    LineChart,
    Point,
    averaged,
    over_seeds,
    thinned,
)
from crl.report.lessons import read_counts
from crl.report.run_record import RunRecord
from crl.wording import OPERATION_WORDS

WINDOW = 10
"""Steps over which the success of training episodes is averaged."""

SINGLE_ARM = "run"
"""Name of the only arm."""

MOST_POINTS = 200
"""Maximum number of points of a line."""


@dataclass(frozen=True)
class ArmRuns:
    """Runs whose settings agree but for the seed."""

    name: str
    runs: Sequence[RunRecord]

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(run.name for run in self.runs)}"


Arms = Sequence[ArmRuns]

Curve = Callable[[RunRecord], Sequence[Point]]
"""Function that returns the points of a run."""


def arms_of_runs(runs: Sequence[RunRecord]) -> list[ArmRuns]:
    """Return the arms of runs, in the order of their first runs. A single arm has no letter."""
    by_path = {run.dir.path: run for run in runs}
    arms = arms_of([run.result for run in runs])
    return [
        ArmRuns(arm.name if len(arms) > 1 else SINGLE_ARM, [by_path[one.path] for one in arm.runs])
        for arm in arms
    ]


def success(arms: Arms) -> list[Chart]:
    """Return the success in evaluations, for each task and split, then that of training."""
    return [*_evaluated(arms), *_trained(arms)]


def time_spent(arms: Arms) -> list[Chart]:
    """Return the seconds of each part per step, one chart per arm: means over its runs.

    Runs without a completed step are left out.
    """
    charts = []
    for arm in arms:
        seconds: dict[str, float] = defaultdict(float)
        trained = [run for run in arm.runs if run.of("train")]
        for run in trained:
            steps = len(run.of("train")) * len(trained)
            for line in run.lines:
                if line["kind"] not in ("train", "extractor", "eval", "probe", "warmup"):
                    continue
                for name, value in line.items():
                    if name.startswith("time/") and _is_finite(value):
                        seconds[_part(name, line["kind"])] += value / steps
        if seconds:
            ordered = sorted(seconds.items(), key=lambda item: -item[1])
            title = _titled("Wall time by part", arm, arms)
            charts.append(BarChart(title, "s per step", dict(ordered), TIME_NOTE))
    return charts


TIME_NOTE = (
    "All seconds of a part, divided by the completed steps. wait: for the episodes of a step. "
    "train: the actor's update. sync: new weights to the engine. "
    "bank: step of the bank. eval and probe: measurements. The extractor trains beside the steps."
)


def _part(name: str, kind: str) -> str:
    part = name.removeprefix("time/")
    return part if kind == "train" or part == kind else f"{kind} {part}"


def actor(arms: Arms) -> list[Chart]:
    """Return the metrics of the actor's training."""
    return list(_training(arms, "train", "actor")) + list(
        _metric_charts(arms, "train", {"staleness/mean": ("Staleness", "versions")})
    )


def extractor(arms: Arms) -> list[Chart]:
    """Return the metrics of the extractor's training."""
    return list(_training(arms, "extractor", "extractor"))


TRAINING: Mapping[str, tuple[str, str]] = {
    "reward": ("Reward", ""),
    "loss": ("Loss", ""),
    "approx_kl": ("KL of the update", "nats"),
    "reference_kl": ("KL to the first weights", "nats"),
    "clip_fraction": ("Clipped tokens", "share"),
    "entropy": ("Entropy", "nats"),
    "grad_norm": ("Norm of the gradient", ""),
    "mismatch_kl": ("Mismatch of engine and trainer", "nats"),
}
"""Title and unit of the metrics of training, by name."""

POSSIBLE: Mapping[str, tuple[float, float]] = dict.fromkeys(
    (
        "KL of the update", "KL to the first weights", "Entropy", "Norm of the gradient",
        "Mismatch of engine and trainer", "Staleness", "Experiences in the bank",
    ),
    (0.0, math.inf),
)  # fmt: skip
"""Ranges of metrics that cannot be negative, by title."""


def _training(arms: Arms, kind: str, role: str) -> Iterator[Chart]:
    names = {f"{role}/{name}": title for name, title in TRAINING.items()}
    yield from _metric_charts(arms, kind, names)


def bank(arms: Arms) -> list[Chart]:
    """Return the size of the bank, its operations, and the success with experiences."""
    charts = list(_metric_charts(arms, "bank", {"bank/size": ("Experiences in the bank", "")}))
    charts += _operations(arms)
    shares = {
        "retrieval/hit_rate": ("Searches that found an experience", "share"),
        "lessons/correct": ("Right lessons among the extractor's answers", "share"),
    }
    charts += _metric_charts(arms, "bank", shares, low=0.0, high=1.0)
    gap = {"rollout/gap": ("Success of guided minus free members", "")}
    return charts + list(_metric_charts(arms, "train", gap, window=WINDOW))


OPERATIONS = ("add", "update", "return", "drop", "merge", "evict")
"""Operations of the bank that are drawn."""

OPERATIONS_NOTE = "returned: answers that change nothing. refused: invalid operations of answers."


def _operations(arms: Arms) -> list[Chart]:
    """Return the counts of the bank's operations since the start, one chart per arm."""
    charts = []
    for arm in arms:
        lines = [
            Line(OPERATION_WORDS[name], points, number)
            for number, name in enumerate(OPERATIONS)
            if (points := _mean(arm, lambda run, name=name: metric(run, "bank", f"ops/{name}")))
            and points[-1].y > 0
        ]
        if lines:
            title = _titled("Operations of the bank since the start", arm, arms)
            charts.append(LineChart(title, "", lines, low=0.0, note=OPERATIONS_NOTE))
    return charts


def credit(arms: Arms) -> list[Chart]:
    """Return the success and the lift of the experiences of each run's bank."""
    charts: list[Chart] = []
    for run in (run for arm in arms for run in arm.runs):
        if lessons := read_counts(run.dir.bank):
            name = run.name if len(arms) > 1 or len(arms[0].runs) > 1 else ""
            charts += [
                replace(chart, title=f"{chart.title}: {name}" if name else chart.title)
                for chart in lessons.charts
            ]
    return charts


FIGURES: Mapping[str, Callable[[Arms], list[Chart]]] = {
    "success": success,
    "time": time_spent,
    "actor": actor,
    "extractor": extractor,
    "bank": bank,
    "credit": credit,
}
"""Charts by subject."""


# ── success ───────────────────────────────────────────────────────────────────────────────────────


def _evaluated(arms: Arms) -> Iterator[Chart]:
    keys = dict.fromkeys(
        key for arm in arms for run in arm.runs for rates in run.evaluations.values()
        for key in rates
    )  # fmt: skip
    if len(arms) > 1:
        for task, split, condition in keys:
            key = (task, split, condition)
            lines = _arm_lines(arms, lambda run, key=key: _rates(run, key), UNIT)
            yield LineChart(
                f"{_task(task)}, {split} places, {CONDITION_LABELS.get(condition, condition)}",
                "success", lines, 0.0, 1.0, _band(arms, [lambda run, key=key: _rates(run, key)]),
            )  # fmt: skip
        return
    for task, split in dict.fromkeys((task, split) for task, split, _ in keys):
        lines, curves = [], []
        for number, (condition, label) in enumerate(CONDITION_LABELS.items()):

            def curve(run: RunRecord, key: EvalKey = (task, split, condition)) -> list[Point]:
                return _rates(run, key)

            curves.append(curve)
            if points := _mean(arms[0], curve, UNIT):
                lines.append(Line(label, points, number))
        band = _band(arms, curves)
        yield LineChart(f"{_task(task)}, {split} places", "success", lines, 0.0, 1.0, band)


def _trained(arms: Arms) -> Iterator[Chart]:
    tasks = dict.fromkeys(task for arm in arms for run in arm.runs for task in run.tasks)
    note = f"Mean of the last {WINDOW} steps."
    for task in tasks:
        single, curves = [], []
        for number, which in enumerate(("free", "guided")):

            def points(run: RunRecord, task: str = task, which: str = which) -> list[Point]:
                return _rollouts(run, task, which)

            curves.append(points)
            if len(arms) == 1:
                if curve := _mean(arms[0], points, UNIT):
                    single.append(Line(f"{which} members", curve, number))
            elif lines := _arm_lines(arms, points, UNIT):
                title = f"{task}, training episodes, {which} members"
                yield LineChart(title, "success", lines, 0.0, 1.0, note + _uneven(arms, [points]))
        if single:
            title = f"{task}, training episodes"
            yield LineChart(title, "success", single, 0.0, 1.0, note + _uneven(arms, curves))


def _rates(run: RunRecord, key: EvalKey) -> list[Point]:
    return [
        Point(step, rates[key].value, rates[key].low, rates[key].high)
        for step, rates in run.evaluations.items()
        if key in rates and math.isfinite(rates[key].value)
    ]


def _rollouts(run: RunRecord, task: str, condition: str) -> list[Point]:
    if task not in run.tasks:
        return []
    prefix = f"rollout/{task}" if len(run.tasks) > 1 else "rollout"
    return averaged(metric(run, "train", f"{prefix}/success/{condition}"), WINDOW)


def _task(task: str) -> str:
    return "All tasks" if task == OVERALL else task


UNEVEN = "Not all runs have all steps: a mean is over the runs that have the step."


def _band(arms: Arms, curves: Sequence[Curve]) -> str:
    single = all(len(arm.runs) == 1 for arm in arms)
    unit = "over episodes or places" if single else "of the mean over seeds"
    return f"95 % intervals {unit}.{_uneven(arms, curves)}"


def _uneven(arms: Arms, curves: Sequence[Curve]) -> str:
    """Return a note if a curve has points at different steps in the runs of an arm."""
    if all(
        len({tuple(point.x for point in curve(run)) for run in arm.runs}) == 1
        for arm in arms
        for curve in curves
    ):
        return ""
    return f" {UNEVEN}"


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────


def metric(run: RunRecord, kind: str, name: str) -> list[Point]:
    """Return the finite values of a metric in the lines of a kind, one per step: the last one."""
    values = {line["step"]: line[name] for line in run.of(kind) if _is_finite(line.get(name))}
    return [Point(step, value) for step, value in values.items()]


def _is_finite(value: object) -> bool:
    """Return whether a value is a number other than NaN and the infinities."""
    return isinstance(value, int | float) and math.isfinite(value)


ANY = (-math.inf, math.inf)
UNIT = (0.0, 1.0)
"""Range of a rate, to which intervals are cut."""


def _mean(arm: ArmRuns, points: Curve, ends: tuple[float, float] = ANY) -> list[Point]:
    """Return the mean over the runs of an arm that have points."""
    return thinned(over_seeds([points(run) for run in arm.runs], *ends), MOST_POINTS)


def _arm_lines(arms: Arms, points: Curve, ends: tuple[float, float] = ANY) -> list[Line]:
    return [
        Line(arm.name if len(arms) > 1 else "", curve, number)
        for number, arm in enumerate(arms)
        if (curve := _mean(arm, points, ends))
    ]


def _metric_charts(
    arms: Arms, kind: str, titles: Mapping[str, tuple[str, str]], *, window: int = 1,
    low: float | None = None, high: float | None = None,
) -> Iterator[Chart]:  # fmt: skip
    """Yield a chart for each metric that a run has, with one line per arm.

    A single arm's line has no name.
    """
    for name, (title, unit) in titles.items():

        def points(run: RunRecord, name: str = name) -> list[Point]:
            return averaged(metric(run, kind, name), window)

        if lines := _arm_lines(arms, points):
            note = f"Mean of the last {window} steps." if window > 1 else ""
            note += _uneven(arms, [points])
            possible = UNIT if unit == "share" else POSSIBLE.get(title, ANY)
            yield LineChart(title, unit, lines, low, high, note, possible)


def _titled(title: str, arm: ArmRuns, arms: Arms) -> str:
    return f"{title}: {arm.name}" if len(arms) > 1 else title

"""Summary at the end of a run: a text that fits one screen, and all numbers as RUN/summary.json."""

from __future__ import annotations

import json
import math
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crl.config.schema import OVERALL
from crl.evaluation.evaluate import (
    CONDITION_LABELS,
    MAIN_CONDITIONS,
    EvalKey,
    Evaluation,
    MeanSuccessRate,
    Rate,
    SuccessRate,
    difference_interval,
)
from crl.evaluation.judgement import judgements
from crl.evaluation.metrics import GroupGap, mean_gap
from crl.intervals import Mean, interval_text, number_text, wilson_interval
from crl.run.totals import Totals
from crl.types import Experience, RoleName
from crl.wording import counted

if TYPE_CHECKING:
    from crl.run.loop import TrainingLoop

BEST_EXPERIENCES = 5
"""Experiences of the bank in the summary, or a few more, so that every task has an equal share."""

NO_RATE = f"{'–':<20}"
"""Placeholder for a rate with its interval."""

WIDTH, HEIGHT = 80, 24
"""Columns and lines of the terminal that the text fits. Its last line is for the next command."""

BANK_METRICS = (
    "bank/size",
    "queue/done",
    "queue/dead",
    "ops/add",
    "ops/update",
    "ops/return",
    "ops/drop",
    "ops/merge",
    "ops/evict",
)
"""Metrics of the bank in summary.json."""


@dataclass(frozen=True)
class SuccessReport:
    """Success rates of one evaluation, or of two with their difference."""

    temperature: float
    """Sampling temperature of the evaluations."""
    before: Evaluation | None
    """Evaluation before the run, or the only one; None if the run was stopped earlier."""
    after: Evaluation | None = None
    """Evaluation after the run; None if the run was stopped earlier."""
    data_notes: Mapping[str, str] = field(default_factory=dict)
    """Notes by task name, see `crl.planning.tasks.data_notes`."""

    def lines(self) -> list[str]:
        before, after = self.before, self.after
        if before is None:
            return ["stopped before the first evaluation"]
        mode = f"sampled at temperature {self.temperature:g}" if self.temperature else "greedy"
        rates, overall = (after or before).rates, (after or before).overall
        has_online = any(condition == "online" for _, _, condition in rates)
        unit = "; where a bank is built online, over their effective number" if has_online else ""
        lines = [f"success on fixed eval sets, {mode} [95 % Wilson interval over episodes{unit}]:"]
        tasks = list(dict.fromkeys(task for task, _, _ in (*rates, *overall)))
        width = max(map(len, tasks), default=0)
        by_task = sorted(rates, key=lambda key: tasks.index(key[0]))
        lines += [_row(key, before.rates, after.rates if after else None, width) for key in by_task]
        lines += [
            _overall_row(key, before.overall, after.overall if after else None, width)
            for key in overall
        ]
        lines += [f"  {task} is {note}" for task, note in self.data_notes.items()]
        if errors := before.errors + (after.errors if after else 0):
            verb = "counts as a failure" if errors == 1 else "count as failures"
            lines.append(f"  {counted(errors, 'eval episode')} ended with an error and {verb}")
        return lines

    @property
    def last(self) -> Evaluation | None:
        """Last evaluation; None if the run was stopped earlier."""
        return self.after or self.before

    @property
    def errors(self) -> int:
        """Eval episodes that ended with an error."""
        return sum(e.errors for e in (self.before, self.after) if e)

    def short_lines(self) -> list[str]:
        """Return a heading, and the rates of the only task, or the means of all tasks.

        Return nothing if no evaluation had an episode.
        """
        if self.before is None or self.last is None:
            return ["stopped before the first evaluation"]
        first, last = _all_rates(self.before), _all_rates(self.last)
        tasks = {task for task, _, _ in self.last.rates}
        task = OVERALL if len(tasks) > 1 else next(iter(tasks), "")
        width = max(map(len, CONDITION_LABELS.values())) + len("unseen, ")
        rows = []
        for split, condition in MAIN_CONDITIONS:
            key = (task, split, condition)
            if key not in last:
                continue
            label = f"  {f'{split}, {CONDITION_LABELS[condition]}':<{width}} "
            before = number_text(first[key].value, ".3f") if key in first else "–"
            if self.after is None:
                rows.append(f"{label} {interval_text(last[key].value, *last[key].interval)}")
                continue
            change = f"   {_change(first[key], last[key])}" if key in first else ""
            rows.append(f"{label} {before:<5} → {number_text(last[key].value, '.3f')}{change}")
        what = f"success, mean of {counted(len(tasks), 'task')}" if len(tasks) > 1 else "success"
        return [f"{what} [95 % interval]:", *rows] if rows else []

    def record(self) -> list[dict[str, Any]]:
        """Return the rates of both evaluations as JSON, in the order of `lines`."""
        if self.before is None or self.last is None:
            return []
        first, last = _all_rates(self.before), _all_rates(self.last)
        tasks = list(dict.fromkeys(task for task, _, _ in last))
        changes = {
            key: _difference(first[key], last[key]) for key in last if self.after and key in first
        }
        return [
            {
                "task": key[0],
                "split": key[1],
                "condition": key[2],
                "episodes": last[key].episodes,
                "first": _estimate(first[key]) if key in first else None,
                "last": _estimate(last[key]) if self.after else None,
                "change": changes.get(key),
            }
            for key in sorted(last, key=lambda key: tasks.index(key[0]))
        ]


def _all_rates(evaluation: Evaluation) -> Mapping[EvalKey, SuccessRate | MeanSuccessRate]:
    return {**evaluation.rates, **evaluation.overall}


def _change(first: Rate, last: Rate) -> str:
    value = last.value - first.value
    return interval_text(value, *difference_interval(first, last), "+.3f")


def _difference(first: Rate, last: Rate) -> dict[str, float | None]:
    return _interval(last.value - first.value, *difference_interval(first, last))


def _estimate(rate: Rate) -> dict[str, float | None]:
    return _interval(rate.value, *rate.interval)


def _interval(value: float, low: float, high: float) -> dict[str, float | None]:
    ends = {"value": value, "low": low, "high": high}
    return {name: None if math.isnan(end) else end for name, end in ends.items()}


def _around(value: float, half_width: float) -> dict[str, float | None]:
    return _interval(value, value - half_width, value + half_width)


def _mean(mean: Mean) -> dict[str, float | None]:
    return {**_around(mean.value, mean.half_width), "n": mean.n, "places": mean.clusters}


Rates = Mapping[EvalKey, SuccessRate] | Mapping[EvalKey, MeanSuccessRate]


def _overall_row(
    key: EvalKey,
    before: Mapping[EvalKey, MeanSuccessRate],
    after: Mapping[EvalKey, MeanSuccessRate] | None,
    width: int,
) -> str:
    """Return the line of a mean over tasks, with the interval of the difference.

    Runs of several tasks are compared by this difference.
    """
    row = _row(key, before, after, width)
    if after is None or key not in before:
        return row
    low, high = (number_text(end, "+.3f") for end in difference_interval(before[key], after[key]))
    return f"{row} [{low}, {high}]"


def _row(key: EvalKey, before: Rates, after: Rates | None, width: int) -> str:
    """Return the line of one `EvalKey`, with its rates before and after.

    A key without an earlier rate has only the later one. `width` is the column width for task
    names.
    """
    task, split, condition = key
    episodes = (after or before)[key].episodes
    row = (
        f"  {task:<{width}} {split:<6} {CONDITION_LABELS[condition]:<25} {episodes:>4} episodes   "
        f"{before.get(key, NO_RATE)}"
    )
    if after is None:
        return row
    change = f"   {after[key].value - before[key].value:+.3f}" if key in before else ""
    return f"{row} → {after[key]}{change}"


@dataclass(frozen=True)
class ExperienceReport:
    """Results of the experience pipeline of a run."""

    stats: Mapping[str, int]
    """Statistics of the bank, see `ExperienceManager.stats`."""
    best: Sequence[Experience]
    """Experiences to show, in the order of the summary."""
    gaps: Sequence[GroupGap]
    """Gaps (guided − free success) of the groups in the second half of the run."""
    probe_gains: Mapping[str, tuple[tuple[float, float], tuple[float, float]]]
    """Right − none of the probe before and after the run, by task, as (value, half width)."""
    evaluation: Evaluation | None
    """Last evaluation; None if the run was stopped earlier."""
    trained: int | None
    """Optimizer updates of the extractor; None if it is not trained."""
    writer: RoleName = "extractor"
    """Model that writes the bank."""

    @property
    def gap(self) -> Mean | None:
        """Mean gap in the second half of the run; None without a group that has one."""
        return mean_gap(self.gaps) if self.gaps else None

    def line(self) -> str:
        """Return the line of the text."""
        size = counted(self.stats["bank/size"], "experience")
        line = f"bank: {size} of {counted(self.stats.get('queue/done', 0), 'episode')}"
        return f"{line}; guided − free {self.gap}" if self.gap else line

    def record(self) -> dict[str, Any]:
        """Return the report as JSON."""
        evaluation = self.evaluation or Evaluation({}, {}, 0)
        lessons = {
            task: {
                "answers": rate.episodes,
                "correct": _estimate(rate),
                "untrained_answers": untrained.episodes if untrained else None,
                "untrained_correct": _estimate(untrained) if untrained else None,
            }
            for task, rate in evaluation.lessons.items()
            for untrained in [evaluation.untrained_lessons.get(task)]
        }
        return {
            "writer": self.writer,
            "extractor_updates": self.trained,
            "bank": {name: self.stats.get(name, 0) for name in BANK_METRICS},
            "gap": _mean(self.gap) if self.gap else None,
            "probe_gains": {
                task: {"first": _around(*first), "last": _around(*last)}
                for task, (first, last) in self.probe_gains.items()
            },
            "online_gains": {task: _mean(lift) for task, lift in evaluation.lift.items()},
            "lessons": lessons,
            "best": [_experience(experience) for experience in self.best],
        }


def _experience(experience: Experience) -> dict[str, Any]:
    lift, counters = experience.counters.lift, experience.counters
    return {
        "uid": experience.uid,
        "task": experience.task,
        "goal": experience.goal,
        "text": experience.text,
        "lift": _around(lift.mean, lift.half_width) if lift else None,
        "groups": lift.groups if lift else 0,
        "won": counters.won,
        "episodes": counters.credited,
    }


def best_of_each_task(best: Sequence[Experience]) -> list[Experience]:
    """Return the best experiences with an equal share for every task.

    There are `BEST_EXPERIENCES` in total, or a few more so that the shares are equal. `best` holds
    all experiences, the best first.
    """
    tasks = dict.fromkeys(experience.task for experience in best)
    share = math.ceil(BEST_EXPERIENCES / max(1, len(tasks)))
    return [
        experience for task in tasks for experience in [e for e in best if e.task == task][:share]
    ]


async def experience_report(loop: TrainingLoop, writer: RoleName) -> ExperienceReport | None:
    """Return the report on the experience pipeline of a run; None for a run without experience."""
    experience = loop.experience
    if experience is None:
        return None
    start, end = loop.measurements.probes.get(0), loop.measurements.probes.get(loop.completed_steps)
    probe_gains = {}
    if start and end and loop.completed_steps:
        for key in [name for name in start if name.endswith("/right_minus_none")]:
            probe_gains[key.split("/")[1]] = (
                (start[key], start[f"{key}/half_width"]),
                (end[key], end[f"{key}/half_width"]),
            )
    stats = await experience.manager.stats()
    return ExperienceReport(
        stats=stats,
        best=best_of_each_task(experience.manager.best(stats["bank/size"])),
        gaps=[
            gap for gaps in experience.diagnostics.gaps[loop.completed_steps // 2 :] for gap in gaps
        ],
        probe_gains=probe_gains,
        evaluation=loop.measurements.evaluations.get(loop.completed_steps),
        trained=experience.trainer.updates if experience.trainer else None,
        writer=writer,
    )


@dataclass(frozen=True)
class Outcome:
    """Results of a run, and the way in which it ended."""

    run: Path
    """Directory of the run."""
    checkpoint: Path
    """Directory of the last checkpoint."""
    planned_steps: int
    """Steps of the run, if it is not interrupted."""
    interrupted: bool = False
    """True if the run was interrupted: its remaining steps were skipped."""
    actor_updated: bool = True
    """False if the run made no update of the actor."""
    actor_trained: bool = True
    """False if the actor is not trained."""
    deterministic: bool = False
    """True for a deterministic run, whose summary.json has no wall times."""

    def notes(self) -> list[str]:
        """Return sentences on models that were not trained."""
        if self.interrupted:
            return []
        if not self.actor_trained:
            return ["the actor was not trained"]
        if not self.actor_updated:
            return ["no update of the actor was made: its weights are unchanged"]
        return []

    def lines(self) -> list[str]:
        """Return the path of the models, and the next command."""
        run = shlex.quote(str(self.run))
        if self.interrupted:
            return [f"last checkpoint: {self.checkpoint}", f"continue: crl resume {run}"]
        models = "trained models" if self.actor_trained and self.actor_updated else "checkpoint"
        return [f"{models}: {self.checkpoint}", f"report: crl report {run}"]


@dataclass(frozen=True)
class Summary:
    """Content of a run's summary."""

    steps: int
    """Completed steps."""
    seconds: float
    """Wall time of the whole run."""
    totals: Totals
    success: SuccessReport
    skipped_updates: int
    """Skipped updates of actor and extractor."""
    outcome: Outcome
    experience: ExperienceReport | None = None
    """Report on the experience; None for a run without experience."""
    warnings: Sequence[str] = ()
    """Lines about signs that the run did not learn."""

    def text(self) -> str:
        """Return at most `HEIGHT` − 1 lines. Only paths may be wider than `WIDTH` columns.

        Notes that do not fit are counted.
        """
        head, end = self._numbers(), ["", *self.outcome.lines()]
        effects = [line for text in self.judgements for line in _wrapped(text)]
        middle = ["", *effects] if effects else []
        notes = [line for text in self._notes() for line in _wrapped(text)]
        room = HEIGHT - 1 - len(head) - len(middle) - len(end) - 1
        if len(notes) > room:
            more = counted(len(notes) - room + 1, "more line")
            notes = [*notes[: room - 1], f"… {more} of notes: the report has them"]
        return "\n".join([*head, *middle, *(["", *notes] if notes else []), *end])

    def _numbers(self) -> list[str]:
        """Return the lines of numbers, after an empty line."""
        totals, outcome = self.totals, self.outcome
        tokens = totals.actor_tokens + self._writer_tokens
        cost = (
            f"{self.seconds:.0f} s, {counted(totals.env_turns, 'environment turn')}, "
            f"{counted(tokens, 'sampled token')}"
        )
        lines = [f"{counted(self.steps, 'step')}: {cost}"]
        if outcome.interrupted:
            after = f"interrupted after {self.steps} of {counted(outcome.planned_steps, 'step')}"
            lines.insert(0, f"{after}: the final evaluation was skipped")
        lines += [*self.success.short_lines(), *self._attempts()]
        return ["", *lines, *([self.experience.line()] if self.experience else [])]

    def _attempts(self) -> list[str]:
        """Return the line with the success within one and within all attempts, if there are any."""
        if not (tasks := self.totals.attempted):
            return []
        rates = []
        for solved in (self.totals.solved[0], self.totals.solved[-1]):
            low, high = wilson_interval(solved / tasks, tasks)
            rates.append(f"{solved / tasks:.3f} [{low:.3f}, {high:.3f}]")
        attempts = counted(len(self.totals.solved), "attempt")
        return [f"success within 1 attempt {rates[0]}, {attempts} {rates[1]}"]

    @property
    def _writer_tokens(self) -> int:
        """Tokens that the writer of the bank sampled, beside those of the episodes."""
        return self.experience.stats["total/sampled_tokens/extractor"] if self.experience else 0

    def _notes(self) -> list[str]:
        """Return sentences on possible problems of the results."""
        notes = [f"{task} is {note}" for task, note in self.success.data_notes.items()]
        if errors := self.success.errors:
            verb = "counts as a failure" if errors == 1 else "count as failures"
            notes.append(f"{counted(errors, 'eval episode')} ended with an error and {verb}")
        if errors := self.totals.errors:
            verb = "was" if errors == 1 else "were"
            episodes = counted(errors, "training episode")
            notes.append(f"{episodes} failed with an error and {verb} not trained on")
        if self.skipped_updates:
            verb = "was" if self.skipped_updates == 1 else "were"
            updates = counted(self.skipped_updates, "update")
            notes.append(
                f"{updates} {verb} skipped because the loss or its gradient was not finite"
            )
        return [*self.warnings, *self.outcome.notes(), *notes]

    @property
    def judgements(self) -> list[str]:
        """Sentences on the effect of training and of experience; empty before two evaluations."""
        before, after = self.success.before, self.success.after
        if before is None or after is None:
            return []
        gains = [(gain.value, gain.half_width) for gain in after.lift.values()]
        trained = self.outcome.actor_trained
        return judgements(_all_rates(before), _all_rates(after), gains, trained=trained)

    def record(self) -> dict[str, Any]:
        """Return the content of summary.json. Unknown numbers are None."""
        totals = self.totals
        seconds = None if self.outcome.deterministic else [round(s, 3) for s in totals.step_seconds]
        attempts = [n / totals.attempted for n in totals.solved] if totals.attempted else []
        return {
            "steps": self.steps,
            "planned_steps": self.outcome.planned_steps,
            "interrupted": self.outcome.interrupted,
            "seconds": None if self.outcome.deterministic else round(self.seconds, 3),
            "step_seconds": seconds[0] if seconds else None,
            "bank_seconds": seconds[1] if seconds and self.experience else None,
            "totals": {
                **totals.metrics(),
                "total/sampled_tokens/extractor": self._writer_tokens,
            },
            "temperature": self.success.temperature,
            "success": self.success.record(),
            "judgements": self.judgements,
            "experience": self.experience.record() if self.experience else None,
            "attempts": {"tasks": totals.attempted, "success_within": attempts},
            "errors": {
                "training_episodes": totals.errors,
                "eval_episodes": self.success.errors,
                "skipped_updates": self.skipped_updates,
            },
            "notes": self._notes(),
        }

    def write(self, path: Path) -> None:
        """Write summary.json completely or not at all."""
        partial = path.with_name(f".{path.name}.part")
        text = json.dumps(self.record(), indent=1, ensure_ascii=False, allow_nan=False)
        partial.write_text(text + "\n", "utf-8", errors="backslashreplace")
        partial.replace(path)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)

"""Summary at the end of a run: results, cost, output paths and commands for the next steps."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from crl.evaluation.evaluate import (
    CONDITION_LABELS,
    EvalKey,
    Evaluation,
    MeanSuccessRate,
    SuccessRate,
    difference_interval,
)
from crl.evaluation.judgement import judgements
from crl.evaluation.metrics import GroupGap, mean_gap
from crl.intervals import number_text, plus_minus
from crl.run.totals import Totals
from crl.types import Experience, RoleName
from crl.wording import counted

if TYPE_CHECKING:
    from crl.run.loop import TrainingLoop

BEST_EXPERIENCES = 5
"""Experiences of the bank in the summary, or a few more, so that every task has an equal share."""

NO_RATE = f"{'–':<20}"
"""Placeholder for a rate with its interval."""


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

    bank: Path
    """File of the bank."""
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

    def lines(self) -> list[str]:
        lines = ["", "experience [± half a 95 % interval, by Student's t over places]:"]
        if self.gaps:
            gap = mean_gap(self.gaps)
            sample = f"{counted(gap.n, 'group')} in {counted(gap.clusters, 'place')}"
            lines.append(
                "  guided − free success in the same groups, second half of the run: "
                f"{gap} over {sample}"
            )
        for task, ((start, start_half), (end, end_half)) in self.probe_gains.items():
            change = f"{plus_minus(start, start_half)} → {plus_minus(end, end_half)}"
            lines.append(f"  {task}: gain from right advice on the probe: {change}")
        if self.evaluation:
            lines += _online_bank_lines(self.evaluation, self.writer)
        writer = "extractor: not trained"
        if self.writer == "actor":
            writer = "actor, which writes the bank"
        elif self.trained is not None:
            writer = f"extractor: {counted(self.trained, 'update')}"
        stats = self.stats
        distilled = counted(stats.get("queue/done", 0), "episode")
        lines.append(
            f"  {writer}; {distilled} distilled: "
            f"{stats.get('ops/add', 0):,} added, {stats.get('ops/update', 0):,} updated, "
            f"{stats.get('ops/return', 0):,} returned, {stats.get('ops/drop', 0):,} refused; "
            f"{counted(stats.get('queue/dead', 0), 'episode')} failed"
        )
        lines.append(f"  bank: {counted(stats['bank/size'], 'experience')} in {self.bank}")
        if self.best:
            explanation = "guided − free success in the same groups ± half a 95 % credible interval"
            lines.append(f"  best experiences by the lower end of lift ({explanation}):")
        lines += [f"    {_lift(e):<34}   won {_wins(e)}   {e.goal}  {e.text}" for e in self.best]
        return lines


def _online_bank_lines(evaluation: Evaluation, writer: RoleName) -> list[str]:
    """Return lines about the online evaluation: the banks' lift and the lessons of their writer."""
    lines = [
        f"  {task}: gain from a bank built online in unseen places: {lift} "
        f"over {counted(lift.n, 'place')}"
        for task, lift in evaluation.lift.items()
    ]
    for task, rate in evaluation.lessons.items():
        untrained = evaluation.untrained_lessons.get(task)
        comparison = ""
        if untrained:
            comparison = (
                f"; untrained extractor, {counted(untrained.episodes, 'answer')} on the same "
                f"episodes: {untrained}"
            )
        lines.append(
            f"  {task}: right lessons in {counted(rate.episodes, 'answer')} of the {writer}: "
            f"{rate}{comparison}"
        )
    return lines


def _lift(experience: Experience) -> str:
    lift = experience.counters.lift
    return (
        f"lift {plus_minus(lift.mean, lift.half_width)} over {counted(lift.groups, 'group')}"
        if lift
        else "lift unknown"
    )


def _wins(experience: Experience) -> str:
    counters = experience.counters
    return f"{counters.won:>3} of {counted(counters.credited, 'episode'):>12}"


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


async def experience_report(
    loop: TrainingLoop, bank: Path, writer: RoleName
) -> ExperienceReport | None:
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
        bank=bank,
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
class NextSteps:
    """Commands that continue or repeat a run."""

    run: Path
    """Directory of the run."""
    checkpoint: Path
    """Directory of the last checkpoint."""
    command: str
    """Command line that repeats the run with its last settings, without --seed and --run-dir."""
    seed: int
    planned_steps: int
    """Steps of the run, if it is not interrupted."""
    interrupted: bool = False
    """True if the run was interrupted: what remained of it was skipped."""
    actor_updated: bool = True
    """False if the run made no update of the actor."""
    actor_trained: bool = True
    """False if the actor is not trained."""

    def lines(self) -> list[str]:
        """Return lines with the commands. An interrupted run can only be continued."""
        actor, run = self.checkpoint / "actor", shlex.quote(str(self.run))
        files = f"{self.run / 'metrics.jsonl'}, {self.run / 'episodes'}"
        if self.interrupted:
            return [
                f"the last checkpoint: {self.checkpoint}",
                f"  continue the run:  crl resume {run}",
                f"  metrics, episodes: {files}",
            ]
        outcome = [f"the trained models, in Hugging Face format: {self.checkpoint}"]
        if not self.actor_trained:
            outcome = [
                "the actor was not trained",
                f"the last checkpoint: {self.checkpoint}",
            ]
        elif not self.actor_updated:
            outcome = [
                "no update of the actor was made: its weights are unchanged",
                f"the models, in Hugging Face format: {self.checkpoint}",
            ]
        return [
            *outcome,
            f"  look further:      crl report {run}",
            f"  repeat the eval:   crl eval {run}",
            f"  train further:     crl resume {run} --steps {max(1, 2 * self.planned_steps)}",
            f"  another seed:      {self.command} --seed {self.seed + 1}",
            *(
                [f"  in Python:         AutoModelForCausalLM.from_pretrained({str(actor)!r})"]
                if self.actor_trained
                else []
            ),
            f"  metrics, episodes: {files}",
        ]


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
    next_steps: NextSteps
    experience: ExperienceReport | None = None
    """Report on the experience; None for a run without experience."""
    warnings: Sequence[str] = ()
    """Lines about signs that the run learned nothing."""

    def text(self) -> str:
        tokens = None, "extractor"
        if self.experience:
            tokens = self.experience.stats["total/sampled_tokens/extractor"], self.experience.writer
        lines = ["", f"{counted(self.steps, 'step')} in {self.seconds:.0f} s"]
        if self.next_steps.interrupted:
            planned = self.next_steps.planned_steps
            lines = [
                "",
                f"interrupted after {self.steps} of {counted(planned, 'step')}, "
                f"{self.seconds:.0f} s: the final evaluation was skipped, and the numbers below "
                "are not the result of the run",
            ]
        lines += [
            self.totals.line(*tokens),
            *filter(None, [self.totals.time_line() if self.experience else ""]),
            *filter(None, [self.totals.attempts_line()]),
            "",
            *self.success.lines(),
        ]
        if self.experience:
            lines += self.experience.lines()
        if errors := self.totals.errors:
            verb = "was" if errors == 1 else "were"
            lines.append(
                f"  {counted(errors, 'training episode')} failed with an error and {verb} not "
                "trained on"
            )
        if self.skipped_updates:
            verb = "was" if self.skipped_updates == 1 else "were"
            lines.append(
                f"  {counted(self.skipped_updates, 'update')} {verb} skipped because the loss "
                "or its gradient was not finite"
            )
        if judgements := self._judgements():
            lines += ["", "effects in this run [95 % interval, without the spread between seeds]:"]
            lines += [f"  {sentence}" for sentence in judgements]
        lines += ["", *self.warnings] if self.warnings else []
        lines += ["", *self.next_steps.lines()]
        return "\n".join(lines)

    def _judgements(self) -> list[str]:
        """Return sentences on the effect of training and of experience."""
        before, after = self.success.before, self.success.after
        if before is None or after is None:
            return []
        gains = [(gain.value, gain.half_width) for gain in after.lift.values()]
        return judgements(
            {**before.rates, **before.overall},
            {**after.rates, **after.overall},
            gains,
            trained=self.next_steps.actor_trained,
        )

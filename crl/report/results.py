"""Results of a run for readers: the numbers of its summary.json, and commands to continue."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crl.config.command import repeated
from crl.evaluation.evaluate import CONDITION_LABELS
from crl.intervals import interval_text, number_text, plus_minus
from crl.report.run_record import RunRecord
from crl.wording import counted, percent


@dataclass(frozen=True)
class Rate:
    """Line of the table of success rates."""

    task: str
    split: str
    condition: str
    episodes: int
    first: str
    """First rate with its 95 % interval, or a dash."""
    last: str
    change: str
    value: float | None
    """Change as a number, for the order of the rows."""


@dataclass(frozen=True)
class Results:
    """Numbers of a run that has ended."""

    rates: Sequence[Rate]
    facts: Sequence[tuple[str, str]]
    """(title, text) of all other numbers."""
    judgements: Sequence[str]
    notes: Sequence[str]


def read_results(run: RunRecord) -> Results | None:
    """Return the results of a run; None before its end, as it then has no summary.json.

    A damaged file raises errors of many types.
    """
    if run.active or not run.dir.summary.is_file():
        return None
    record = json.loads(run.dir.summary.read_text("utf-8"))
    return Results(
        [_rate(line) for line in record["success"]],
        [*_cost(record), *_experience(record["experience"] or {}), *_errors(record["errors"])],
        [str(text) for text in record["judgements"]],
        [str(text) for text in record["notes"]],
    )


def next_commands(run: RunRecord) -> list[tuple[str, str]]:
    """Return commands that repeat or continue a run: (purpose, command)."""
    path, config = shlex.quote(str(run.dir.path)), run.saved.config
    command = repeated(run.saved.command, config)
    longer = max(1, 2 * config.run.steps)
    commands = [
        ("repeat the run", f"{command} --seed {run.seed}" if command else ""),
        ("another seed", f"{command} --seed {run.seed + 1}" if command else ""),
        ("train further", f"crl resume {path} --steps {longer}"),
        ("repeat the evaluation", f"crl eval {path}"),
    ]
    if config.updates("actor"):
        commands.append(("model in Hugging Face format", f"crl export {path} DIR"))
    return [(purpose, text) for purpose, text in commands if text]


def _rate(line: Mapping[str, Any]) -> Rate:
    change = line["change"]
    return Rate(
        str(line["task"]),
        str(line["split"]),
        CONDITION_LABELS.get(line["condition"], str(line["condition"])),
        int(line["episodes"]),
        _estimate(line["first"]),
        _estimate(line["last"]),
        _estimate(change, "+.3f"),
        change["value"] if change else None,
    )


def _cost(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    totals = record["totals"]
    yield (
        "Cost of the training episodes",
        f"{totals['total/env_turns']:,} environment turns "
        f"({totals['total/env_turns/overtime']:,} in overtime); sampled tokens: "
        f"actor {totals['total/sampled_tokens/actor']:,}, "
        f"writer of the bank {totals['total/sampled_tokens/extractor']:,}; "
        f"tokens trained on: {totals['total/trained_tokens/actor']:,}",
    )
    seconds, bank = record["step_seconds"], record["bank_seconds"]
    if seconds:
        share = ""
        if bank is not None:
            share = (
                "; calls of the model that writes the bank were in progress in "
                f"{percent(bank / seconds, 1)} of it"
            )
        yield "Time of the steps", f"{seconds:.0f} s{share}"
    within = record["attempts"]["success_within"]
    if within:
        tasks = counted(record["attempts"]["tasks"], "task")
        shares = ", ".join(f"{share:.3f}" for share in within)
        title = f"Success within 1 to {counted(len(within), 'attempt')}"
        yield title, f"{shares} ({tasks})"


def _experience(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not record:
        return
    if gap := record["gap"]:
        sample = f"{counted(gap['n'], 'group')} in {counted(gap['places'], 'place')}"
        title = "Guided − free success in the same groups, second half of the run"
        yield title, f"{_half(gap)} over {sample}"
    for task, gain in record["probe_gains"].items():
        yield (
            f"Gain from right advice on the probe, {task}",
            f"{_half(gain['first'])} → {_half(gain['last'])}",
        )
    for task, gain in record["online_gains"].items():
        places = counted(gain["places"], "place")
        title = f"Gain from a bank built online in unseen places, {task}"
        yield title, f"{_half(gain)} over {places}"
    for task, lesson in record["lessons"].items():
        text = f"{_estimate(lesson['correct'])} in {counted(lesson['answers'], 'answer')}"
        if lesson["untrained_correct"]:
            text += (
                f"; untrained extractor: {_estimate(lesson['untrained_correct'])} in "
                f"{counted(lesson['untrained_answers'], 'answer')} on the same episodes"
            )
        yield f"Right lessons of the {record['writer']}, {task}", text
    bank = record["bank"]
    updates = record["extractor_updates"]
    if record["writer"] == "extractor":
        yield "Extractor", "not trained" if updates is None else counted(updates, "update")
    yield (
        "Distillation",
        f"{counted(bank['queue/done'], 'episode')} distilled: {bank['ops/add']:,} added, "
        f"{bank['ops/update']:,} updated, {bank['ops/return']:,} returned, "
        f"{bank['ops/drop']:,} refused; {counted(bank['queue/dead'], 'episode')} failed",
    )
    yield "Bank", counted(bank["bank/size"], "experience")


def _errors(record: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    names = {
        "training_episodes": "training episode",
        "eval_episodes": "eval episode",
        "skipped_updates": "skipped update",
    }
    texts = [counted(record[name], words) for name, words in names.items() if record[name]]
    yield "Errors", ", ".join(texts) or "none"


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _estimate(record: Mapping[str, float | None] | None, spec: str = ".3f") -> str:
    """Return a value with its interval, or a dash."""
    if record is None:
        return "–"
    value, low, high = (_number(record[name]) for name in ("value", "low", "high"))
    return number_text(value, spec) if math.isnan(low) else interval_text(value, low, high, spec)


def _half(record: Mapping[str, Any]) -> str:
    """Return a mean with half its interval."""
    value, high = _number(record["value"]), _number(record["high"])
    return plus_minus(value, high - value)

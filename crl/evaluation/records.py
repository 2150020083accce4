"""Evaluations as JSON, for checkpoints and result files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crl.evaluation.evaluate import Evaluation, SuccessRate
from crl.intervals import Mean

Record = dict[str, Any]


def evaluation_record(evaluation: Evaluation) -> Record:
    """Return an evaluation as JSON. `rates` has one row for each task, split and condition."""
    rows = [
        {
            "task": task,
            "split": split,
            "condition": condition,
            **_rate_record(rate),
            "turns": evaluation.turns[task, split, condition],
            "score": evaluation.scores.get((task, split, condition)),
        }
        for (task, split, condition), rate in evaluation.rates.items()
    ]
    return {
        "rates": rows,
        "errors": evaluation.errors,
        "visits": {
            task: [_rate_record(rate) for rate in rates]
            for task, rates in evaluation.visits.items()
        },
        "lift": {
            task: [lift.value, lift.half_width, lift.n, lift.clusters]
            for task, lift in evaluation.lift.items()
        },
        "lessons": _rate_records(evaluation.lessons),
        "untrained_lessons": _rate_records(evaluation.untrained_lessons),
    }


def read_evaluation(record: Record) -> Evaluation:
    """Return the evaluation of an `evaluation_record`."""
    rows = {(row["task"], row["split"], row["condition"]): row for row in record["rates"]}
    return Evaluation(
        rates={key: _read_rate(row) for key, row in rows.items()},
        turns={key: row["turns"] for key, row in rows.items()},
        errors=record["errors"],
        scores={key: row["score"] for key, row in rows.items() if row["score"] is not None},
        visits={task: list(map(_read_rate, rates)) for task, rates in record["visits"].items()},
        lift={task: Mean(*values) for task, values in record["lift"].items()},
        lessons=_read_rates(record["lessons"]),
        untrained_lessons=_read_rates(record["untrained_lessons"]),
    )


def _rate_records(rates: Mapping[str, SuccessRate]) -> dict[str, Record]:
    return {task: _rate_record(rate) for task, rate in rates.items()}


def _read_rates(records: Mapping[str, Record]) -> dict[str, SuccessRate]:
    return {task: _read_rate(record) for task, record in records.items()}


def _rate_record(rate: SuccessRate) -> Record:
    return {
        "successes": rate.successes,
        "episodes": rate.episodes,
        "effective_episodes": rate.effective_episodes,
    }


def _read_rate(record: Record) -> SuccessRate:
    return SuccessRate(record["successes"], record["episodes"], record["effective_episodes"])

"""Judgements on a run in words, for its summary and its report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from crl.config.schema import OVERALL
from crl.evaluation.evaluate import EvalKey, Rate, difference_interval
from crl.intervals import interval_text

PLACES: Mapping[str, str] = {"seen": "in seen places", "unseen": "in unseen places"}
"""Words for the splits."""

Interval = tuple[float, float, float]
"""(value, low, high) of a difference."""


def judgements(
    before: Mapping[EvalKey, Rate],
    after: Mapping[EvalKey, Rate],
    gains: Sequence[tuple[float, float]],
    *,
    trained: bool,
) -> list[str]:
    """Return at most two sentences, on training and on experience, for one run.

    An effect is stated if the 95 % interval of the difference excludes 0. Otherwise it is "not
    shown", which does not mean that there is none. Nothing is said where an interval is unknown.
    The intervals do not contain the spread between seeds. Both rates of a difference are of the
    same games, but are treated as independent, which makes intervals wider if they are positively
    correlated.

    * `before`, `after`: rates of the first and the last evaluation. Those of `OVERALL` are used if
      there are any, else those of the single task. Several tasks without them give no sentence.
    * `gains`: by task, the gain from a bank built online in unseen places: (value, half width).
    * `trained`: whether the actor is trained.
    """
    changes = {
        PLACES[split]: interval
        for split in PLACES
        if trained and (interval := _difference(before, after, (split, "free"), (split, "free")))
    }
    interval = _difference(after, after, ("seen", "free"), ("seen", "guided"))
    gain = _mean_gain(gains)
    training = _clauses("training", changes)
    used = _clauses("the bank", {PLACES["seen"]: interval} if interval else {})
    built = _clauses("a bank built online", {PLACES["unseen"]: gain} if gain else {})
    sentences = [f"without experience, {'; '.join(training)}" if training else ""]
    sentences.append("; ".join([*used, *built]))
    return [f"{text[0].upper()}{text[1:]}." for text in sentences if text]


def _mean_gain(gains: Sequence[tuple[float, float]]) -> Interval | None:
    """Return the mean over tasks with its interval; None if that of a task is unknown.

    Its ends are at most 1 and at least −1, as differences of rates are.
    """
    if not gains:
        return None
    value = sum(gain for gain, _ in gains) / len(gains)
    half = math.hypot(*(half for _, half in gains)) / len(gains)
    if (known := _known((value, value - half, value + half))) is None:
        return None
    return value, max(-1.0, known[1]), min(1.0, known[2])


def _known(interval: Interval) -> Interval | None:
    """Return an interval, or None if its ends are unknown or equal."""
    _, low, high = interval
    return interval if math.isfinite(low) and math.isfinite(high) and high > low else None


def _difference(
    before: Mapping[EvalKey, Rate],
    after: Mapping[EvalKey, Rate],
    old: tuple[str, str],
    new: tuple[str, str],
) -> Interval | None:
    """Return the difference of the rates with (split, condition) `new` and `old`, if it exists."""
    tasks = {task for task, _, _ in after}
    task = OVERALL if OVERALL in tasks else next(iter(tasks), "") if len(tasks) == 1 else ""
    first, second = before.get((task, *old)), after.get((task, *new))
    if first is None or second is None:
        return None
    return _known((second.value - first.value, *difference_interval(first, second)))


def _clauses(subject: str, effects: Mapping[str, Interval]) -> list[str]:
    """Return the effects of a subject on success, which are given by places, in words."""
    places: dict[str, list[str]] = {}
    for where, (value, low, high) in effects.items():
        effect = (
            f"{subject} raised success" if low > 0
            else f"{subject} lowered success" if high < 0
            else f"no effect of {subject} on success is shown"
        )  # fmt: skip
        number = interval_text(value, low, high, "+.3f")
        places.setdefault(effect, []).append(f"{where} ({number})")
    joints = {effect: " or " if effect.startswith("no ") else " and " for effect in places}
    return [f"{effect} {joints[effect].join(where)}" for effect, where in places.items()]

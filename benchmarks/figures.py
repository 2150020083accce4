"""Figures of the paper (arXiv 2603.17621), and what they need: arms, settings, seeds and metrics.

A run is `crl train` with the tasks of a setting, the settings of an arm, and a seed. Figures share
runs. All of this was fixed before the runs; nothing was tuned on these seeds. Every arm has the
settings of the preset `cpu`, which were tuned for `co-evolved` (seeds 0 to 2), and no setting of
its own beyond those listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rivals import RIVALS

Lines = Sequence[Mapping[str, Any]]
"""Lines of metrics.jsonl of a run."""

Metric = Callable[[Lines, str], float | None]
"""Function from the metrics of a run and a task to a value; None if the run has no such value."""

SETTINGS: Mapping[str, tuple[str, ...]] = {
    "room": ("room",),
    "webshop": ("webshop",),
    "alfworld": ("alfworld",),
    "sokoban": ("sokoban",),
    "three": ("room", "webshop", "alfworld"),
    "six": ("room", "maze", "keyroom", "sokoban", "webshop", "alfworld"),
}
"""Tasks by name of the setting."""

ARMS: Mapping[str, tuple[str, ...]] = {
    "none": ("method=grpo",),
    "static": ("extractor.train=false",),
    "co-evolved": (),
    "experience only": ("actor.optimizer.learning_rate=0.0",),
    "no split": ("complementary.guided_share=1.0", "extractor.baseline=batch"),
    "cross-group": ("complementary.advantages=cross",),
    "merge": ("extractor.merge_every=5",),
    "ask": ("ask.enabled=true",),
    "self-distillation": ("complementary.self_distillation=0.5",),
    "critic": ("critic.enabled=true",),
    "filler": ("method=benchmarks/placebos.py:FILLER", "filler.lift_coef=1.0"),
    "shuffled": ("method=benchmarks/placebos.py:SHUFFLED", "shuffled.lift_coef=1.0"),
    "trajectory": ("method=benchmarks/placebos.py:TRAJECTORY", "trajectory.lift_coef=1.0"),
    "right": ("method=benchmarks/placebos.py:RIGHT", "right.lift_coef=1.0"),
    **RIVALS,
}
"""Settings by name of the arm."""

LAST_STEPS = 10
"""Number of the last training steps over which training metrics are averaged."""

TEN, FIVE, THREE = (tuple(range(20, 20 + count)) for count in (10, 5, 3))
"""Seeds of a figure: at least ten for 3a, five for the mixture and Table 1, three elsewhere."""


@dataclass(frozen=True)
class Figure:
    """Figure or table of the paper with its counterpart."""

    claim: str
    """Claim of the paper."""
    settings: tuple[str, ...]
    """Names of `SETTINGS`. Their tasks are aggregated."""
    arms: tuple[str, ...]
    """Names of `ARMS`. All others are compared with the first one."""
    seeds: tuple[int, ...]
    metrics: tuple[str, ...]
    """Names of `METRICS`. The first one decides whether the claim holds here."""
    lower_is_better: bool = False
    """True for numbers of actions."""


def trained(name: str) -> Metric:
    """Return the mean of a metric of training episodes over the last steps. {}: the task."""

    def mean(lines: Lines, task: str) -> float | None:
        steps = [line for line in lines if line["kind"] == "train"][-LAST_STEPS:]
        tasks = {key.split("/")[1] for step in steps for key in step if key.count("/") > 1}
        own = name.format(f"{task}/" if task in tasks else "")
        values = [step[own] for step in steps if step.get(own) is not None]
        return fmean(values) if values else None

    return mean


def evaluated(name: str) -> Metric:
    """Return a metric of the last evaluation. {}: the task."""

    def last(lines: Lines, task: str) -> float | None:
        return [line for line in lines if line["kind"] == "eval"][-1].get(name.format(task))

    return last


METRICS: Mapping[str, Metric] = {
    "training": trained("rollout/{}success"),
    "guided": trained("rollout/{}success/guided"),
    "free": trained("rollout/{}success/free"),
    "actions": trained("rollout/{}turns"),
    "seen": evaluated("eval/{}/seen/success/free"),
    "seen, bank": evaluated("eval/{}/seen/success/guided"),
    "unseen": evaluated("eval/{}/unseen/success/free"),
    "unseen, bank": evaluated("eval/{}/unseen/success/online"),
}
"""Metrics by name.

* training, guided, free: success of all, guided and free training episodes of the last steps.
* actions: environment turns of these episodes.
* seen, unseen: success of the last evaluation without experience, in places of the training stream
  and in places that are never trained on. With a bank: that of the run, or one that is built during
  the evaluation.
"""

FIGURES: Mapping[str, Figure] = {
    "3a": Figure(
        "Co-evolution is better than a static online bank, and than no experience.",
        ("room",), ("co-evolved", "none", "static"), TEN, ("training", "unseen", "unseen, bank"),
    ),
    "3b-d": Figure(
        "Only guided and free subgroups improve both; without free members or with advantages "
        "across the group, episodes without experience fall behind.",
        ("room",), ("co-evolved", "no split", "cross-group"), THREE, ("free", "guided", "seen"),
    ),
    "5a": Figure(
        "Merging the bank helps.", ("room",), ("merge", "co-evolved"), THREE,
        ("training", "guided"),
    ),
    "5b": Figure(
        "search_and_ask helps.", ("room",), ("ask", "co-evolved"), THREE, ("training", "guided"),
    ),
    "6": Figure(
        "Co-evolution is better than no experience on every single task.",
        ("room", "webshop", "alfworld", "sokoban"), ("co-evolved", "none"), THREE,
        ("training", "seen", "unseen"),
    ),
    "7": Figure(
        "Co-evolution needs fewer actions per task.",
        ("room", "webshop", "alfworld", "sokoban"), ("co-evolved", "none"), THREE, ("actions",),
        lower_is_better=True,
    ),
    "8": Figure(
        "In the mixture, co-evolution is better than no experience and than a static extractor.",
        ("three",), ("co-evolved", "none", "static"), FIVE, ("training",),
    ),
    "table1": Figure(
        "Co-evolution is best with and without experience at test time; the extractor alone gains "
        "little.",
        ("three",), ("co-evolved", "none", "static", "experience only"), FIVE,
        ("seen", "seen, bank", "unseen", "unseen, bank"),
    ),
    "9b": Figure(
        "Self-distillation helps at first and collapses later.", ("room",),
        ("self-distillation", "co-evolved"), THREE, ("training", "seen"),
    ),
    "9d": Figure(
        "The gain is larger with six tasks than with three.", ("three", "six"),
        ("co-evolved", "none"), THREE, ("training", "seen", "unseen"),
    ),
    "10": Figure(
        "In the mixture, co-evolution needs fewer actions.", ("three",),
        ("co-evolved", "none", "static"), FIVE, ("actions",), lower_is_better=True,
    ),
    "14a": Figure(
        "The actor as critic helps, most of all early.", ("room",), ("critic", "co-evolved"), THREE,
        ("training", "guided"),
    ),
    "placebos": Figure(
        "Not in the paper: the content of the lessons helps, not their presence.", ("room",),
        ("co-evolved", "filler", "shuffled", "trajectory", "right"), THREE,
        ("guided", "free", "seen, bank"),
    ),
    "rivals": Figure(
        "Not in the paper: co-evolution is better than rival methods, rerun as in rivals.py.",
        ("room",), ("co-evolved", "evolving-rl", "memrl", "memrl retrieval", "skillos"), THREE,
        ("guided", "free", "seen", "seen, bank", "unseen, bank"),
    ),
}  # fmt: skip
"""Figures by their number in the paper."""

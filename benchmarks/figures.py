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


@dataclass(frozen=True)
class Arm:
    """Settings of a run, and the finished run from which it takes a bank or a model."""

    sets: tuple[str, ...] = ()
    """Settings. {source} is the directory of the finished run, {checkpoint} its last checkpoint."""
    source: str | None = None
    """Arm of the finished run, which has the same setting."""
    source_seed: int = 0
    """Seed of the finished run minus the seed of this run."""


ARMS: Mapping[str, Arm] = {
    "none": Arm(("method=grpo",)),
    "25 groups": Arm(("method=grpo", "rollout.groups=25")),
    "160 steps": Arm(("method=grpo", "run.steps=160")),
    "240 steps": Arm(("method=grpo", "run.steps=240")),
    "static": Arm(("extractor.train=false",)),
    "co-evolved": Arm(),
    "experience only": Arm(("actor.optimizer.learning_rate=0.0",)),
    "offline": Arm(
        ("bank.init={source}/bank.sqlite", "bank.frozen=true"), source="experience only"
    ),
    "no split": Arm(("complementary.guided_share=1.0", "extractor.baseline=batch")),
    "cross-group": Arm(("complementary.advantages=cross",)),
    "merge": Arm(("extractor.merge_every=5",)),
    "ask": Arm(("ask.enabled=true",)),
    "large extractor": Arm(("extractor.model=build/models/large-extractor",)),
    "self-distillation": Arm(("complementary.self_distillation=0.5",)),
    "critic": Arm(("critic.enabled=true",)),
    "filler": Arm(("method=benchmarks/placebos.py:FILLER", "filler.lift_coef=1.0")),
    "shuffled": Arm(("method=benchmarks/placebos.py:SHUFFLED", "shuffled.lift_coef=1.0")),
    "trajectory": Arm(("method=benchmarks/placebos.py:TRAJECTORY", "trajectory.lift_coef=1.0")),
    "right": Arm(("method=benchmarks/placebos.py:RIGHT", "right.lift_coef=1.0")),
    "old bank": Arm(("bank.init={source}/bank.sqlite", "bank.frozen=true"), source="co-evolved"),
    "foreign bank": Arm(
        ("bank.init={source}/bank.sqlite", "bank.frozen=true"), source="co-evolved", source_seed=1
    ),
    "old extractor": Arm(
        ("extractor.model={checkpoint}/extractor", "extractor.train=false"), source="co-evolved"
    ),
    "shared bank": Arm(("bank.scope=shared",)),
    "gigpo": Arm(("method=gigpo",)),
    "role agent": Arm(("method=role_agent", "role_agent.writer=extractor")),
    "empo2": Arm(("method=empo2", "empo2.writer=extractor")),
    "reflexion": Arm(("method=reflexion", "reflexion.writer=extractor")),
    **{name: Arm(sets) for name, sets in RIVALS.items()},
}
"""Arms by name.

* 25 groups, 160 steps, 240 steps: `none` with more rollouts. The preset has 16 groups and 100
  steps.
* offline: a fixed bank. A trained extractor made it from episodes of the untrained actor, in the
  places of the same training stream.
* large extractor: made by `benchmarks/large_extractor.py`.
* old bank, old extractor: of the finished run `co-evolved`, given to an actor that was not trained.
* foreign bank: that of another seed, which has other places.
* empo2, reflexion, role agent: the extractor writes, because the bundled actor was not trained to.
"""

LAST_STEPS = 10
"""Number of the last training steps over which training metrics are averaged."""

TEN, FIVE, THREE = (tuple(range(20, 20 + count)) for count in (10, 5, 3))
"""Seeds of a figure: at least ten for 3a, five for the mixture and Table 1, three elsewhere."""


@dataclass(frozen=True)
class Claim:
    """Inequality between two arms that a claim of the paper implies."""

    better: str
    worse: str
    metric: str
    """Name of `METRICS`. Its value is the mean over the tasks of `settings`."""
    settings: tuple[str, ...] = ()
    """Settings of the comparison. Empty = all settings of the figure."""
    minus: tuple[str, ...] = ()
    """Settings whose difference is subtracted: the claim is that the difference is larger."""


@dataclass(frozen=True)
class Figure:
    """Figure or table of the paper with its counterpart."""

    text: str
    """Claim of the paper, in words."""
    claims: tuple[Claim, ...]
    """What the text implies for the arms here."""
    settings: tuple[str, ...]
    """Names of `SETTINGS`. Their tasks are aggregated."""
    arms: tuple[str, ...]
    """Names of `ARMS`. In the table, all others are compared with the first one."""
    seeds: tuple[int, ...]
    metrics: tuple[str, ...]
    """Names of `METRICS`."""
    lower_is_better: bool = False
    """True for numbers of actions."""
    against: tuple[str, ...] = ()
    """Costs over which the training metrics are drawn, besides the steps."""
    note: str = ""
    """What a reader must know to judge the result."""


@dataclass(frozen=True)
class TrainingMetric:
    """Metric of training episodes."""

    name: str
    """Key in the lines of training steps, with {} for the task and a slash."""

    def __call__(self, lines: Lines, task: str) -> float | None:
        """Return the mean over the last steps."""
        last = [value for value in self.curve(lines, task)[-LAST_STEPS:] if value is not None]
        return fmean(last) if last else None

    def curve(self, lines: Lines, task: str) -> list[float | None]:
        """Return the value of each training step."""
        steps = [line for line in lines if line["kind"] == "train"]
        tasks = {key.split("/")[1] for step in steps for key in step if key.count("/") > 1}
        name = self.name.format(f"{task}/" if task in tasks else "")
        return [step.get(name) for step in steps]


@dataclass(frozen=True)
class Cost:
    """Sum of metrics that count since the start of the run."""

    names: tuple[str, ...]
    """Keys in the lines of any kind."""

    def __call__(self, lines: Lines, task: str) -> float:
        """Return the cost until the end of the last training step."""
        return self.curve(lines)[-1]

    def curve(self, lines: Lines) -> list[float]:
        """Return the cost until the end of each training step."""
        known, values = dict.fromkeys(self.names, 0.0), []
        for line in lines:
            known |= {name: line[name] for name in self.names if name in line}
            if line["kind"] == "train":
                values.append(sum(known.values()))
        return values


def evaluated(name: str) -> Metric:
    """Return a metric of the last evaluation. {}: the task."""

    def last(lines: Lines, task: str) -> float | None:
        return [line for line in lines if line["kind"] == "eval"][-1].get(name.format(task))

    return last


def online(lines: Lines, task: str) -> float | None:
    """Return success on the online set, without a bank if the run has none."""
    name = "eval/{}/unseen/success/"
    with_bank = evaluated(name + "online")(lines, task)
    return evaluated(name + "alone")(lines, task) if with_bank is None else with_bank


class Minutes(Cost):
    """Minutes since the first evaluation."""

    def curve(self, lines: Lines) -> list[float]:
        begin = next(line["time"] for line in lines if line["kind"] == "eval")
        return [(line["time"] - begin) / 60 for line in lines if line["kind"] == "train"]


SAMPLED = ("total/sampled_tokens/actor", "total/sampled_tokens/extractor")
TRAINED = ("total/trained_tokens/actor", "total/trained_tokens/extractor")

METRICS: Mapping[str, Metric] = {
    "training": TrainingMetric("rollout/{}success"),
    "guided": TrainingMetric("rollout/{}success/guided"),
    "free": TrainingMetric("rollout/{}success/free"),
    "actions": TrainingMetric("rollout/{}turns"),
    "seen": evaluated("eval/{}/seen/success/free"),
    "seen, bank": evaluated("eval/{}/seen/success/guided"),
    "unseen": evaluated("eval/{}/unseen/success/free"),
    "unseen, bank": online,
    "unseen, alone": evaluated("eval/{}/unseen/success/alone"),
    "unseen score": evaluated("eval/{}/unseen/score/free"),
    "right lessons": evaluated("eval/{}/lessons/correct"),
    "right lessons, untrained": evaluated("eval/{}/lessons/correct/untrained"),
    "sampled tokens": Cost(SAMPLED),
    "trained tokens": Cost(TRAINED),
    "tokens": Cost((*SAMPLED, *TRAINED)),
    "environment turns": Cost(("total/env_turns",)),
    "minutes": Minutes(("time",)),
}
"""Metrics by name.

* training, guided, free: success of all, guided and free training episodes of the last steps.
* actions: environment turns of these episodes.
* seen, unseen: success of the last evaluation without experience, in places of the training stream
  and in places that are never trained on. With a bank: that of the run, or one that is built during
  the evaluation (the online set). A run without a bank plays the online set without one.
* unseen, alone: success on the online set without experience.
* unseen score: mean score × 100 of `unseen`, in tasks that are graded.
* right lessons: share of right lessons among the extractor's last answers. Untrained: that of the
  untrained extractor on the same episodes.
* tokens, turns, minutes: cost of the training, that of the extractor included. Trained tokens are
  prompts and answers. The minutes exclude evaluations.
"""

COSTS = ("sampled tokens", "trained tokens", "tokens", "environment turns", "minutes")

SINGLE = ("room", "webshop", "alfworld", "sokoban")
"""Settings with a single task (Figures 6 and 7)."""


def _better(better: str, metric: str, *worse: str) -> tuple[Claim, ...]:
    """Return the claims that one arm has a better value of a metric than each of the others."""
    return tuple(Claim(better, other, metric) for other in worse)


FIGURES: Mapping[str, Figure] = {
    "3a": Figure(
        "Co-evolution is better than a static online bank, an offline bank, and no experience.",
        _better("co-evolved", "training", "none", "static", "offline"),
        ("room",), ("co-evolved", "none", "static", "offline"), TEN,
        ("training", "unseen", "unseen, bank"),
        note="The offline bank has lessons for all places of the training stream from the first "
        "step on, by an extractor that was trained for a whole run. The other arms begin with an "
        "empty bank, or have none.",
    ),
    "3b-d": Figure(
        "Only guided and free subgroups improve both. Without free members or with advantages "
        "across the group, episodes without experience fall behind.",
        (*_better("co-evolved", "seen", "no split", "cross-group"),
         *_better("co-evolved", "free", "cross-group")),
        ("room",), ("co-evolved", "no split", "cross-group"), THREE, ("free", "guided", "seen"),
    ),
    "5a": Figure(
        "Merging the bank helps.", _better("merge", "training", "co-evolved"),
        ("room",), ("merge", "co-evolved"), THREE, ("training", "guided"),
    ),
    "5b": Figure(
        "search_and_ask helps.", _better("ask", "training", "co-evolved"),
        ("room",), ("ask", "co-evolved"), THREE, ("training", "guided"),
    ),
    "6": Figure(
        "Co-evolution is better than no experience on every single task.",
        tuple(Claim("co-evolved", "none", "training", (task,)) for task in SINGLE),
        SINGLE, ("co-evolved", "none"), THREE, ("training", "seen", "unseen"),
    ),
    "7": Figure(
        "Co-evolution needs fewer actions on every single task.",
        tuple(Claim("co-evolved", "none", "actions", (task,)) for task in SINGLE),
        SINGLE, ("co-evolved", "none"), THREE, ("actions",), lower_is_better=True,
    ),
    "8": Figure(
        "In the mixture, co-evolution is better than no experience and than a static extractor.",
        _better("co-evolved", "training", "none", "static"),
        ("three",), ("co-evolved", "none", "static"), FIVE, ("training",),
    ),
    "table1": Figure(
        "Co-evolution is best with and without experience at test time. The extractor alone gains "
        "little.",
        (*_better("co-evolved", "seen", "none", "static", "experience only"),
         *_better("co-evolved", "seen, bank", "static", "experience only")),
        ("three",), ("co-evolved", "none", "static", "experience only"), FIVE,
        ("seen", "seen, bank", "unseen", "unseen, bank"),
    ),
    "9a": Figure(
        "A larger extractor is better, also per task (Figure 11).",
        _better("large extractor", "training", "co-evolved"),
        ("three",), ("large extractor", "co-evolved"), THREE,
        ("training", "seen, bank", "unseen, bank"),
    ),
    "9b": Figure(
        "Self-distillation helps at first and collapses later.",
        _better("co-evolved", "training", "self-distillation"),
        ("room",), ("self-distillation", "co-evolved"), THREE, ("training", "seen"),
    ),
    "9d": Figure(
        "The gain is larger with six tasks than with three (curves: Figure 13).",
        (Claim("co-evolved", "none", "training", ("six",), minus=("three",)),),
        ("three", "six"), ("co-evolved", "none"), THREE, ("training", "seen", "unseen"),
    ),
    "10": Figure(
        "In the mixture, co-evolution needs fewer actions.",
        _better("co-evolved", "actions", "none", "static"),
        ("three",), ("co-evolved", "none", "static"), FIVE, ("actions",), lower_is_better=True,
    ),
    "14a": Figure(
        "The actor as critic helps, most of all early.",
        _better("critic", "training", "co-evolved"),
        ("room",), ("critic", "co-evolved"), THREE, ("training", "guided"),
    ),
    "budgets": Figure(
        "Not in the paper: co-evolution is better than GRPO alone that is given all its tokens as "
        "extra rollouts.",
        tuple(
            Claim("co-evolved", other, metric)
            for metric in ("training", "seen", "unseen, bank")
            for other in ("25 groups", "160 steps", "240 steps")
        ),
        ("room",), ("co-evolved", "25 groups", "160 steps", "240 steps", "none"), FIVE,
        ("training", "seen", "unseen", "unseen, bank", *COSTS), against=COSTS[2:],
        note="Two arms were planned from the tokens of one seed: 25 groups, and 160 steps. The "
        "latter took fewer tokens than co-evolution, because many groups of late steps are all won "
        "and are not trained on. 240 steps were added for this reason. The minutes were measured "
        "beside other runs.",
    ),
    "transfer": Figure(
        "Not in the paper: bank and extractor help an actor that did not make them, in the places "
        "of the bank.",
        (*_better("old bank", "training", "none", "foreign bank"),
         *_better("old extractor", "training", "static")),
        ("room",), ("old bank", "old extractor", "static", "foreign bank", "none", "co-evolved"),
        THREE, ("training", "guided", "seen, bank", "unseen, bank"),
    ),
    "shared": Figure(
        "Not in the paper: lessons of other tasks help in a shared bank.",
        _better("shared bank", "unseen, bank", "co-evolved"),
        ("three",), ("shared bank", "co-evolved"), THREE,
        ("training", "seen, bank", "unseen, bank"),
    ),
    "lessons": Figure(
        "Not in the paper: training of the extractor makes more of its lessons right.",
        _better("co-evolved", "right lessons", "static"),
        ("three",), ("co-evolved", "static", "experience only"), FIVE,
        ("right lessons", "right lessons, untrained"),
        note="This comparison was added when the runs, those of Table 1, were finished.",
    ),
    "placebos": Figure(
        "Not in the paper: the content of the lessons helps, not their presence.",
        (*_better("co-evolved", "guided", "filler", "shuffled", "trajectory"),
         *_better("right", "guided", "co-evolved")),
        ("room",), ("co-evolved", "filler", "shuffled", "trajectory", "right"), THREE,
        ("guided", "free", "seen, bank"),
    ),
    "rivals": Figure(
        "Not in the paper: co-evolution is better than rival methods, rerun as in rivals.py.",
        _better("co-evolved", "seen, bank", *RIVALS),
        ("room",), ("co-evolved", *RIVALS), THREE,
        ("guided", "free", "seen", "seen, bank", "unseen, bank"),
    ),
    "methods": Figure(
        "Not in the paper: the methods of the field, by their authors' settings as far as the tiny "
        "models allow.",
        (*_better("co-evolved", "seen", "none", "gigpo", "role agent", "empo2"),
         *_better("co-evolved", "unseen, bank", "empo2", "reflexion")),
        ("room", "webshop", "alfworld"),
        ("co-evolved", "none", "gigpo", "role agent", "empo2", "reflexion", "self-distillation"),
        THREE,
        ("training", "seen", "seen, bank", "unseen", "unseen, bank", "unseen score", "tokens",
         "minutes"),
        note="All arms have the settings of the preset, which were tuned for `co-evolved`, and the "
        "same number of steps. `reflexion` trains nothing, and its training episodes are attempts "
        "until the first success, so its column `training` is not comparable.",
    ),
}  # fmt: skip
"""Figures by their number in the paper."""


StoredRun = Mapping[str, Any]
"""Config and metrics of a finished run, with its command, commit, machine and duration."""


@dataclass(frozen=True)
class Results:
    """Stored runs of a figure."""

    figure: Figure
    runs: Mapping[tuple[str, str], Sequence[StoredRun]]
    """Runs by setting and arm, in the order of seeds."""

    def values(self, metric: str, setting: str, arm: str, task: str) -> list[float | None]:
        """Return a metric of one task by seed."""
        return [METRICS[metric](run["metrics"], task) for run in self.runs[setting, arm]]

    def means(self, metric: str, settings: Sequence[str], arm: str) -> list[float | None]:
        """Return the mean over all tasks of some settings, by seed. None if a value is missing."""
        columns = [
            self.values(metric, setting, arm, task)
            for setting in settings
            for task in SETTINGS[setting]
        ]
        return [
            None if None in values else fmean(value for value in values if value is not None)
            for values in zip(*columns, strict=True)
        ]

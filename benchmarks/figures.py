"""Figures of the paper (arXiv 2603.17621), and what they need: arms, settings, seeds and metrics.

A run is `crl train` with the tasks of a setting, the settings of an arm, and a seed. Figures share
runs. All of this was fixed before the runs, except what is marked as added; nothing was tuned on
these seeds. Every arm has the settings of the preset `cpu`, which were tuned for `co-evolved`
(seeds 0 to 2), the defaults of its method, and no setting of its own beyond those listed here.
`tuned none` is GRPO with a setting that was tuned for it (`benchmarks/switches.py --grpo`, seeds 0
to 2). `methods.py --tune` tries the same changes for each method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    "search_qa": ("search_qa",),
    "three": ("room", "webshop", "alfworld"),
    "six": ("room", "maze", "keyroom", "sokoban", "webshop", "alfworld"),
}
"""Tasks by name of the setting."""


@dataclass(frozen=True)
class Arm:
    """Settings of a run, and the finished run from which it takes a bank or a model."""

    text: str
    """What defines the arm, for readers of the results."""
    sets: tuple[str, ...] = ()
    """Settings. {source} is the directory of the finished run, {checkpoint} its last checkpoint."""
    source: str | None = None
    """Arm of the finished run, which has the same setting."""
    source_seed: int = 0
    """Seed of the finished run minus the seed of this run."""
    made_by: str = ""
    """Command that makes a file that the settings name, if it must be run first."""


_ARMS: Mapping[str, Arm] = {
    "none": Arm("The actor alone (GRPO): no bank, no extractor.", ("method=grpo",)),
    "co-evolved 4 minibatches": Arm(
        "`co-evolved` with the setting of `tuned none`.", ("actor.minibatches=4",)
    ),
    "25 groups": Arm(
        "`none` with 25 groups of episodes per step. The preset has 16.",
        ("method=grpo", "rollout.groups=25"),
    ),
    "160 steps": Arm(
        "`none` with 160 steps. The preset has 100.", ("method=grpo", "run.steps=160")
    ),
    "240 steps": Arm("`none` with 240 steps.", ("method=grpo", "run.steps=240")),
    "tuned none": Arm(
        "`none` with 4 minibatches per step, the best of 12 changes that were tried for it. The "
        "preset has 2.",
        ("method=grpo", "actor.minibatches=4"),
    ),
    "static": Arm("An extractor that is not trained writes the bank.", ("extractor.train=false",)),
    "co-evolved": Arm("Actor and extractor are trained: the preset itself."),
    "experience only": Arm(
        "The extractor is trained. The learning rate of the actor is 0.",
        ("actor.optimizer.learning_rate=0.0",),
    ),
    "offline": Arm(
        "The finished bank of `experience only` with the same seed guides the actor, and is fixed.",
        ("bank.init={source}/bank.sqlite", "bank.frozen=true"),
        source="experience only",
    ),
    "no split": Arm(
        "All members of a group are guided. Rewards of the extractor are therefore relative to the "
        "batch, and the lift advantage, which compares with free members, is 0.",
        ("complementary.guided_share=1.0", "extractor.baseline=batch"),
    ),
    "cross-group": Arm(
        "Advantages are normalised over the whole group, not within its subgroups.",
        ("complementary.advantages=cross",),
    ),
    "merge": Arm(
        "The extractor merges the bank after every fifth step.", ("extractor.merge_every=5",)
    ),
    "ask": Arm("Guided episodes may ask for experience (search_and_ask).", ("ask.enabled=true",)),
    "large extractor": Arm(
        "An extractor of more parameters, made by `benchmarks/large_extractor.py`.",
        ("extractor.model=build/models/large-extractor",),
        made_by="python benchmarks/large_extractor.py",
    ),
    "self-distillation": Arm(
        "The actor also learns to imitate its guided episodes without experience.",
        ("complementary.self_distillation=0.5",),
    ),
    "critic": Arm("The actor judges retrieved experience.", ("critic.enabled=true",)),
    "filler": Arm(
        "A word without meaning, repeated to the length of the lesson, replaces each lesson.",
        ("method=benchmarks/placebos.py:FILLER", "filler.lift_coef=1.0"),
    ),
    "shuffled": Arm(
        "A lesson of another place replaces each lesson.",
        ("method=benchmarks/placebos.py:SHUFFLED", "shuffled.lift_coef=1.0"),
    ),
    "trajectory": Arm(
        "The first eight actions of the best episode of the place replace each lesson.",
        ("method=benchmarks/placebos.py:TRAJECTORY", "trajectory.lift_coef=1.0"),
    ),
    "right": Arm(
        "Advice that is always right replaces each lesson.",
        ("method=benchmarks/placebos.py:RIGHT", "right.lift_coef=1.0"),
    ),
    "old bank": Arm(
        "A new actor with the fixed bank of the finished run `co-evolved` of the same seed.",
        ("bank.init={source}/bank.sqlite", "bank.frozen=true"),
        source="co-evolved",
    ),
    "foreign bank": Arm(
        "A new actor with the fixed bank of another seed, which has other places.",
        ("bank.init={source}/bank.sqlite", "bank.frozen=true"),
        source="co-evolved",
        source_seed=1,
    ),
    "old extractor": Arm(
        "A new actor with the extractor of the finished run `co-evolved`, which is not trained on.",
        ("extractor.model={checkpoint}/extractor", "extractor.train=false"),
        source="co-evolved",
    ),
    "shared bank": Arm("All tasks share one bank.", ("bank.scope=shared",)),
    "gigpo": Arm("GiGPO.", ("method=gigpo",)),
    "role agent": Arm(
        "Role-Agent; the extractor, which is not trained, writes the analyses, because the bundled "
        "actor was not trained to. No analysis names a failure mode, and this actor predicts no "
        "states, so the arm is GiGPO with replay of failed tasks.",
        ("method=role_agent", "role_agent.writer=extractor"),
    ),
    "empo2": Arm(
        "EMPO²; the extractor, which is not trained, writes the tips, because the bundled actor "
        "was not trained to. A search finds one tip, because this actor was taught to read one.",
        ("method=empo2", "empo2.writer=extractor", "empo2.tips=1"),
    ),
    "reflexion": Arm(
        "Reflexion without training; the extractor writes the reflections, because the bundled "
        "actor was not trained to.",
        ("method=reflexion", "reflexion.writer=extractor"),
    ),
    "evolving-rl": Arm(
        "Evolving-RL: each candidate of an episode is rewarded by other episodes that read it.",
        RIVALS["evolving-rl"],
    ),
    "memrl": Arm(
        "MemRL: neither model is trained; retrieval by a learned value of each memory.",
        RIVALS["memrl"],
    ),
    "memrl retrieval": Arm("Co-evolution with the retrieval of MemRL.", RIVALS["memrl retrieval"]),
    "skillos": Arm(
        "SkillOS: the actor is not trained, the extractor is its curator.", RIVALS["skillos"]
    ),
}

CHANGES: Mapping[str, str] = {
    "4 minibatches": "actor.minibatches=4",
    "short warm-up": "actor.optimizer.warmup_steps=20",
}
"""Changes of the preset that are tried for each method, by name."""
TRAINED_METHODS = ("co-evolved", "none", "gigpo", "role agent", "empo2", "self-distillation")
"""Arms of the methods that train an actor."""


def changed(arm: str, change: str) -> str:
    """Return the name of an arm with one of the `CHANGES`. "" = the arm itself."""
    return f"{arm} {change}".rstrip()


ARMS: Mapping[str, Arm] = {
    changed(name, change): replace(
        _ARMS[name],
        text=f"{_ARMS[name].text} With `{setting}`.",
        sets=(*_ARMS[name].sets, setting),
    )
    for change, setting in CHANGES.items()
    for name in (*TRAINED_METHODS, "static")
} | dict(_ARMS)
"""Arms by name."""

LAST_STEPS = 10
"""Number of the last training steps over which training metrics are averaged."""
FIRST_STEPS = 20
"""Number of the first training steps over which early metrics are averaged."""

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
    tasks: tuple[str, ...] = ()
    """Tasks of the comparison. Empty = all tasks of the settings."""
    minus: tuple[str, ...] = ()
    """Settings whose difference is subtracted: the claim is that the difference is larger."""
    than: str = ""
    """Metric of the worse arm. Empty = that of the better one."""
    minus_metric: str = ""
    """Metric in which the difference is subtracted: the claim is that the difference is larger."""
    added: bool = False
    """True if the claim was added when the runs were finished."""


@dataclass(frozen=True)
class Figure:
    """Figure or table of the paper with its counterpart."""

    text: str
    """Claim, in short."""
    claims: tuple[Claim, ...]
    """What the text implies for the arms here."""
    settings: tuple[str, ...]
    """Names of `SETTINGS`. Their tasks are aggregated."""
    arms: tuple[str, ...]
    """Names of `ARMS`. In the table, all others are compared with the first one."""
    seeds: tuple[int, ...]
    metrics: tuple[str, ...]
    """Names of `METRICS`."""
    drawn: tuple[str, ...] = ()
    """Metrics of the picture. Empty = all."""
    lower_is_better: bool = False
    """True for numbers of actions."""
    against: tuple[str, ...] = ()
    """Costs over which the training metrics are drawn, besides the steps."""
    paper: str = ""
    """What the paper says, with its numbers. Empty for comparisons that it does not have."""
    note: str = ""
    """What a reader must know to judge the result: paragraphs, with empty lines between them."""
    folder: str = ""
    """Folder of its runs below that of all runs, if it shares none with the other figures."""


@dataclass(frozen=True)
class TrainingMetric:
    """Metric of training episodes."""

    name: str
    """Key in the lines of training steps, with {} for the task and a slash."""
    steps: tuple[int | None, int | None] = (-LAST_STEPS, None)
    """Begin and end of the steps over which it is averaged, as in a slice."""

    def __call__(self, lines: Lines, task: str) -> float | None:
        """Return the mean over its steps."""
        known = [
            value for value in self.curve(lines, task)[slice(*self.steps)] if value is not None
        ]
        return fmean(known) if known else None

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


@dataclass(frozen=True)
class Evaluated:
    """Metric of the last evaluation."""

    name: str
    """Key in the lines of evaluations, with {} for the task."""

    def __call__(self, lines: Lines, task: str) -> float | None:
        """Return the value."""
        return _last_evaluation(lines).get(self.name.format(task))

    def half_width(self, lines: Lines, task: str) -> float | None:
        """Return half the 95 % interval of the value in this run.

        Places are clusters, except in `SEVERAL_EPISODES_PER_PLACE`.
        """
        name, evaluation = self.name.format(task), _last_evaluation(lines)
        if f"{name}/low" not in evaluation:
            return None
        return (evaluation[f"{name}/high"] - evaluation[f"{name}/low"]) / 2


def _last_evaluation(lines: Lines) -> Mapping[str, Any]:
    return [line for line in lines if line["kind"] == "eval"][-1]


class Minutes(Cost):
    """Minutes since the first evaluation."""

    def curve(self, lines: Lines) -> list[float]:
        begin = next(line["time"] for line in lines if line["kind"] == "eval")
        return [(line["time"] - begin) / 60 for line in lines if line["kind"] == "train"]


SAMPLED = ("total/sampled_tokens/actor", "total/sampled_tokens/extractor")
TRAINED = ("total/trained_tokens/actor", "total/trained_tokens/extractor")

METRICS: Mapping[str, Metric] = {
    "training": TrainingMetric("rollout/{}success"),
    "early training": TrainingMetric("rollout/{}success", (None, FIRST_STEPS)),
    "guided": TrainingMetric("rollout/{}success/guided"),
    "free": TrainingMetric("rollout/{}success/free"),
    "attempt 1": TrainingMetric("rollout/{}success/attempt/1"),
    "attempt 8": TrainingMetric("rollout/{}success/attempt/8"),
    "actions": TrainingMetric("rollout/{}turns"),
    "seen": Evaluated("eval/{}/seen/success/free"),
    "seen with bank": Evaluated("eval/{}/seen/success/guided"),
    "unseen": Evaluated("eval/{}/unseen/success/free"),
    "unseen with online bank": Evaluated("eval/{}/unseen/success/online"),
    "unseen visits alone": Evaluated("eval/{}/unseen/success/alone"),
    "seen score": Evaluated("eval/{}/seen/score/free"),
    "unseen score": Evaluated("eval/{}/unseen/score/free"),
    "seen score with bank": Evaluated("eval/{}/seen/score/guided"),
    "unseen score with online bank": Evaluated("eval/{}/unseen/score/online"),
    "right lessons": Evaluated("eval/{}/lessons/correct"),
    "right lessons, untrained extractor": Evaluated("eval/{}/lessons/correct/untrained"),
    "sampled tokens": Cost(SAMPLED),
    "trained tokens": Cost(TRAINED),
    "tokens": Cost((*SAMPLED, *TRAINED)),
    "environment turns": Cost(("total/env_turns",)),
    "minutes": Minutes(("time",)),
}
"""Metrics by name."""

SEVERAL_EPISODES_PER_PLACE = ("seen", "seen with bank")
"""Metrics of evaluations with few places, whose stored intervals treat episodes as independent."""


def tasks_of(metric: str, setting: str) -> tuple[str, ...]:
    """Return the tasks of a setting whose values differ: a cost is that of the whole run."""
    return SETTINGS[setting][:1] if isinstance(METRICS[metric], Cost) else SETTINGS[setting]


METRIC_TEXTS: Mapping[str, str] = {
    "training, guided, free": "Success of all, of guided and of free training episodes, as a mean "
    f"over the last {LAST_STEPS} steps. Pictures show the whole curve.",
    "early training": f"Success of all training episodes of the first {FIRST_STEPS} steps.",
    "attempt 1, attempt 8": "Share of tasks that Reflexion solves within so many attempts, as "
    f"a mean over the last {LAST_STEPS} steps.",
    "actions": f"Environment turns of the training episodes of the last {LAST_STEPS} steps, "
    "failed episodes included.",
    "seen, unseen": "Success of the last checkpoint without experience, in places of the training "
    "stream and in places that are never trained on.",
    "seen with bank": "Success in the seen places with the run's own bank.",
    "unseen with online bank": "Success in visits 3 to 5 of unseen places, with experience. A copy "
    "of the run's bank receives the lessons of four further episodes after each of the first four "
    "visits. Runs without a bank, or with a fixed one, have no value.",
    "unseen visits alone": "Success in the same visits without experience.",
    "seen score, unseen score, seen score with bank, unseen score with online bank": "Mean score "
    "× 100 of the same episodes, in tasks that are graded.",
    "right lessons": "Share of right lessons in the last answers of the extractor. *Untrained "
    "extractor*: in the answers of the initial extractor about the same episodes.",
    "sampled tokens, trained tokens, tokens, environment turns, minutes": "Cost of the training, "
    "that of the extractor included. *Trained tokens* are prompts and answers, *tokens* are both "
    "sums. The minutes exclude evaluations.",
}
"""What the metrics of the page mean, in the order of the page."""

COSTS = ("sampled tokens", "trained tokens", "tokens", "environment turns", "minutes")

SINGLE = ("room", "webshop", "alfworld", "sokoban")
"""Settings with a single task (Figures 6 and 7)."""

NO_SWE_BENCH = (
    "Sokoban takes the place of the paper's SWE-Bench, which needs containers and a large model. "
    "Its success is near 0 in both arms, so it can hardly show a difference."
)


ONLINE_BANK = (
    "With an online bank, co-evolution also plays further episodes in these places, from which it "
    "writes lessons; the actor alone does not."
)


MIXED_TRAINING = (
    "`training` of co-evolution contains guided and free episodes, that of the actor alone only "
    "free ones. `free` compares the episodes without experience."
)

MIXTURE_COSTS = ("tokens", "environment turns")
"""Costs of mixtures."""

EQUAL_COSTS = (
    "Tokens and environment turns of the arms differ by at most 7 % here, although no arm has "
    "extra rollouts. In the room alone they differ more: see [Budgets](#budgets)."
)

FROZEN_RIVALS = ("memrl", "skillos")
"""Rivals whose actor is not trained."""


def _better(better: str, metric: str, *worse: str) -> tuple[Claim, ...]:
    """Return the claims that one arm has a better value of a metric than each of the others."""
    return tuple(Claim(better, other, metric) for other in worse)


def _budget_claims(*arms: str) -> tuple[Claim, ...]:
    """Return the claims that co-evolution is better than GRPO with more rollouts."""
    return (
        *(Claim("co-evolved", arm, metric) for metric in ("training", "seen") for arm in arms),
        *(
            Claim("co-evolved", arm, "unseen with online bank", than="unseen visits alone")
            for arm in arms
        ),
    )


def _added(*claims: Claim) -> tuple[Claim, ...]:
    """Mark claims that were added when the runs were finished."""
    return tuple(replace(claim, added=True) for claim in claims)


TUNED: Mapping[str, str] = dict.fromkeys(TRAINED_METHODS, "4 minibatches")
"""Change that was best for a method in `methods.py --tune`, if one was better than the preset."""


def tuned(arm: str) -> str:
    """Return the name of the arm of a method with its tuned setting."""
    return changed(arm, TUNED.get("co-evolved" if arm == "static" else arm, ""))


FIGURES: Mapping[str, Figure] = {
    "3a": Figure(
        "Co-evolution is better than a static online bank, an offline bank, and no experience.",
        (*_better("co-evolved", "training", "none", "static", "offline"),
         *_added(
             Claim("offline", "none", "early training"),
             Claim("offline", "none", "early training", minus_metric="training"),
             Claim("static", "none", "training"))),
        ("room",), ("co-evolved", "none", "static", "offline", "experience only"), TEN,
        ("training", "early training", "unseen", "unseen with online bank", "unseen visits alone"),
        paper="\"Co-evolving the actor and experience extractor consistently outperforms static "
        "alternatives.\" Offline experience \"provides an initial performance boost\"; its "
        "benefit decays. Static online experience \"yields only marginal gains\".",
        note="The offline bank has lessons for all places of the training stream from the first "
        "step on, by an extractor that was trained for a whole run. The other arms begin with an "
        "empty bank, or have none. The paper's offline bank is by an external extractor. The arm "
        "`experience only` makes the offline banks; no claim of this figure is about it. "
        f"{ONLINE_BANK} The runs were made again, and all new means are within the stored "
        "intervals. With the new runs, the claim about `none` agrees, and the claim about "
        "`offline` is not shown: see [Reproductions](reproductions.md#figure-3a-again).",
    ),
    "3b-d": Figure(
        "Subgroups are better than no split and than advantages across the group.",
        (*_better("co-evolved", "seen", "no split", "cross-group"),
         *_better("co-evolved", "free", "cross-group"),
         *_added(*_better("co-evolved", "guided", "no split", "cross-group"))),
        ("room",), ("co-evolved", "no split", "cross-group"), THREE, ("free", "guided", "seen"),
        paper="If all members are guided, the actor \"converges prematurely\" and \"fails to "
        "internalize experience\". Advantages across subgroups cause \"training to collapse\". "
        "Advantages within subgroups yield \"consistent improvement across both subgroups\".",
        note="The figure was run again twice, and the claim about `seen` that agrees was not "
        "shown there: see [Reproductions](reproductions.md#reproductions).",
    ),
    "5a": Figure(
        "Merging the bank helps.", _better("merge", "training", "co-evolved"),
        ("room",), ("merge", "co-evolved"), THREE, ("training", "guided"),
        paper="Redundant experiences degrade retrieval, which \"impairs the actor's learning\". "
        "The figure has no numbers in the text.",
        note="The paper removes merging from the complete method. Here it is added to the preset, "
        "which has neither merging nor questions.",
    ),
    "5b": Figure(
        "search_and_ask helps.", _better("ask", "training", "co-evolved"),
        ("room",), ("ask", "co-evolved"), THREE, ("training", "guided"),
        paper="search_and_ask gives more specific guidance, \"further improving learning "
        "efficiency\".",
        note="The paper removes search_and_ask from the complete method. Here it is added to the "
        "preset, which has neither merging nor questions.",
    ),
    "6": Figure(
        "Co-evolution is better than no experience on every single task.",
        (*(Claim("co-evolved", "none", "training", (task,)) for task in SINGLE),
         *_added(*(Claim("co-evolved", "none", "seen", (task,)) for task in SINGLE))),
        SINGLE, ("co-evolved", "none"), THREE, ("training", "free", "guided", "seen", "unseen"),
        paper="Co-evolution \"consistently outperforms the baseline across all four tasks\": 1.3 "
        "times its success in MiniHack Room and ALFWorld, +3.0 % on SWE-Bench. Its scores are of "
        "evaluations.",
        note=f"{NO_SWE_BENCH} {MIXED_TRAINING} The runs were made again: see "
        "[Reproductions](reproductions.md#figure-6-again).",
    ),
    "7": Figure(
        "Co-evolution needs fewer actions.",
        tuple(Claim("co-evolved", "none", "actions", (task,)) for task in SINGLE),
        SINGLE, ("co-evolved", "none"), THREE, ("actions",), lower_is_better=True,
        paper="It requires \"1.5× fewer actions on MiniHack Room and 2× fewer actions on "
        "ALFWorld\", and more on SWE-Bench.",
        note=f"{NO_SWE_BENCH} The figure was run again: see "
        "[Reproductions](reproductions.md#reproductions).",
    ),
    "8": Figure(
        "In the mixture, co-evolution is better than no experience and than a static extractor.",
        (*_better("co-evolved", "training", "none", "static"),
         *_added(*_better("none", "training", "static"),
                 *_better("co-evolved", "free", "none", "static"))),
        ("three",), ("co-evolved", "none", "static"), FIVE,
        ("training", "free", "guided", *MIXTURE_COSTS),
        paper="The curves of the static extractor \"are dominated by the baseline across nearly "
        "all tasks\", those of co-evolution are above it (+6.6 %, Figure 9d).",
        note=f"{MIXED_TRAINING} Against the GRPO of [Tuned](#tuned), higher training success is "
        f"not shown (0.026 ± 0.043). {EQUAL_COSTS} The runs were made again, and all verdicts are "
        "the same: see [Reproductions](reproductions.md#figure-8-again).",
    ),
    "table1": Figure(
        "Co-evolution is best with and without experience at test time. A static extractor or the "
        "extractor alone does not reach the actor alone.",
        (*_better("co-evolved", "seen", "none", "static", "experience only"),
         *_better("co-evolved", "seen with bank", "static", "experience only"),
         *_added(
             *_better("co-evolved", "unseen", "none", "static", "experience only"),
             *_better("co-evolved", "unseen with online bank", "static", "experience only"),
             Claim("co-evolved", "none", "unseen with online bank", than="unseen visits alone"),
             Claim("co-evolved", "none", "seen with bank", than="seen"),
             Claim("co-evolved", "co-evolved", "seen with bank", than="seen"),
             Claim("static", "static", "seen with bank", than="seen"),
             Claim("none", "static", "seen", than="seen with bank"),
             Claim("none", "experience only", "seen", than="seen with bank"))),
        ("three",), ("co-evolved", "none", "static", "experience only"), FIVE,
        ("seen", "seen with bank", "unseen", "unseen with online bank", "unseen visits alone"),
        paper="Experience at test time adds 5 % to co-evolution and to the static extractor. "
        "Co-evolution exceeds the baseline by 7 % with experience and by 2 % without. The static "
        "extractor \"fails to surpass the baseline even with experience\" (by over 10 %). The "
        "extractor alone \"yields marginal actor improvement\".",
        note="The paper tests ALFWorld on 134 held-out instances, and does not say whether the "
        "places of the other tasks were trained on. Claims with a bank are about `seen`, the "
        "places of the bank. Claims without one are about `seen` and `unseen`. "
        "[Missed aims](tiny-models.md#missed-aims) compares co-evolution and the actor alone on "
        "other seeds. "
        "Against the GRPO of [Tuned](#tuned), co-evolution is worse without its bank in seen "
        "places (-0.151 ± 0.087). That the extractor alone does not reach the actor alone is our "
        "reading of the paper; with [other runs of "
        "`none`](reproductions.md#none-in-the-mixture-again), the last "
        "claim is not shown. With the [new runs of Figure 8](reproductions.md#other-figures), "
        "two verdicts change: "
        "co-evolution is better than a static extractor with the bank in seen places, and worse "
        "than the actor alone in unseen places. In the room, success with the bank is higher with "
        "a static extractor. "
        f"{ONLINE_BANK}",
    ),
    "9a": Figure(
        "A larger extractor is better.",
        (*_better("large extractor", "training", "co-evolved"),
         *_added(*(
             Claim("large extractor", "co-evolved", metric)
             for metric in ("seen with bank", "unseen with online bank")))),
        ("three",), ("large extractor", "co-evolved"), THREE,
        ("training", "seen with bank", "unseen with online bank", "right lessons",
         "right lessons, untrained extractor"),
        paper="An extractor of 30B parameters \"yields consistent improvement across tasks (+5 % "
        "on average)\" over one of 4B.",
        note="The larger extractor has 2.7 times the parameters. It is not stored, and took an "
        "hour to make. It is larger, but not shown to write more right lessons before RL; the "
        "extractor of the paper is larger and better. The settings of its training are those that "
        "were tuned for the bundled one. With the [new runs of Figure "
        "8](reproductions.md#other-figures), the "
        "claim that disagrees is not shown. Per task: [Figure 11](#figure-11).",
    ),
    "9b": Figure(
        "Self-distillation helps at first and collapses later.",
        (*_better("co-evolved", "training", "self-distillation"),
         *_added(Claim("self-distillation", "co-evolved", "early training"))),
        ("room",), ("self-distillation", "co-evolved"), THREE,
        ("training", "early training", "seen"),
        paper="It \"initially improves upon Complementary RL\" and \"collapses in later "
        "training\".",
        note="[Collapse of self-distillation](tiny-models.md#collapse-of-self-distillation) has "
        "the same runs, "
        "by fifths of their steps.",
    ),
    "9d": Figure(
        "Co-evolution is better than no experience with three and with six tasks, and the gain is "
        "larger with six.",
        (Claim("co-evolved", "none", "training", ("six",), minus=("three",)),
         *_added(*(
             Claim("co-evolved", "none", metric, (name,))
             for metric in ("training", "free") for name in ("three", "six")))),
        ("three", "six"), ("co-evolved", "none"), THREE,
        ("training", "free", "guided", "seen", "unseen", *MIXTURE_COSTS),
        paper="It \"consistently outperforms the baseline in both settings\", by 6.6 % and 8.1 %.",
        note=f"{MIXED_TRAINING} Against the GRPO of [Tuned](#tuned), the gain with three tasks is "
        "not shown (0.021 ± 0.110, the same three seeds). With [other runs of `none`]"
        "(reproductions.md#none-in-the-mixture-again), the claim about `free` with three tasks "
        "disagrees. With the "
        "[new runs of Figure 8](reproductions.md#other-figures), higher training success with "
        "three tasks is not "
        "shown. "
        f"{EQUAL_COSTS}",
    ),
    "10": Figure(
        "In the mixture, co-evolution needs fewer actions.",
        (*_better("co-evolved", "actions", "none", "static"),
         *_added(*(
             Claim("co-evolved", worse, "actions", tasks=(task,))
             for worse in ("none", "static") for task in SETTINGS["three"]))),
        ("three",), ("co-evolved", "none", "static"), FIVE, ("actions",), lower_is_better=True,
        paper="It \"achieves superior action efficiency alongside higher success rates\".",
        note="The claims that were fixed before the runs are about the mean over the tasks. Their "
        "agreement comes from ALFWorld, whose episodes have the most actions. Against the GRPO of "
        "[Tuned](#tuned), fewer actions are not shown (0.166 ± 0.176).",
    ),
    "11": Figure(
        "A larger extractor is better in every task.",
        _added(*(
            Claim("large extractor", "co-evolved", "training", tasks=(task,))
            for task in SETTINGS["three"])),
        ("three",), ("large extractor", "co-evolved"), THREE, ("training", "guided"),
        paper="\"Results show that a larger experience extractor consistently yields greater "
        "benefit across all tasks.\"",
        note="These are the runs of [Figure 9a](#figure-9a). With the [new runs of Figure 8]"
        "(reproductions.md#other-figures), the claim about ALFWorld disagrees.",
    ),
    "13": Figure(
        "The curves of co-evolution are above those of the actor alone, with three and with six "
        "tasks.",
        _added(*(
            Claim("co-evolved", "none", metric, (name,))
            for metric in ("early training", "training") for name in ("three", "six"))),
        ("three", "six"), ("co-evolved", "none"), THREE, ("training", "early training", "free"),
        paper="The figure shows the curves of Figure 9d, without a statement of its own.",
        note=f"These are the runs of [Figure 9d](#figure-9d). {MIXED_TRAINING} With the [new runs "
        "of Figure 8](reproductions.md#other-figures), higher training success with three tasks "
        "is not shown.",
    ),
    "14a": Figure(
        "The actor as critic helps, most of all early.",
        (*_better("critic", "training", "co-evolved"),
         *_added(Claim("critic", "co-evolved", "early training"))),
        ("room",), ("critic", "co-evolved"), THREE, ("training", "early training", "guided"),
        paper="It \"yields improved success rates, particularly in the early stages of training\".",
        note="The paper's critic decides before each environment interaction. Here it judges an "
        "experience once, before the first action.",
    ),
    "budgets": Figure(
        "Not in the paper: co-evolution is better than GRPO alone that is given all its tokens as "
        "extra rollouts. Three of the six claims that were fixed before the runs are against `160 "
        "steps`, which took fewer tokens; they do not compare equal budgets.",
        (*_budget_claims("25 groups", "160 steps"), *_added(*_budget_claims("240 steps"))),
        ("room",), ("co-evolved", "25 groups", "160 steps", "240 steps", "none"), FIVE,
        ("training", "seen", "unseen", "unseen with online bank", "unseen visits alone", *COSTS),
        against=COSTS[2:],
        note="GRPO has no bank, so its visits of unseen places are without one, and without the "
        "further episodes from which co-evolution writes lessons there.\n\n"
        "The figure was defined when seed 20 of `co-evolved` and `none` had run. The sizes of 25 "
        "groups and 160 steps were chosen from the tokens of that seed. 160 steps took fewer "
        "tokens than co-evolution: late in training, all members of many groups win, and such "
        "groups are not trained on. Claims against 160 steps therefore do not compare equal "
        "budgets, and 240 steps were added for this reason. Only the sum of sampled and trained "
        "tokens is matched: co-evolution samples more tokens than every arm of GRPO. The GRPO of "
        "[Tuned](#tuned) was not given more rollouts. With other runs of `co-evolved`, higher "
        "training success than with 160 steps is not always shown: see "
        "[Other figures](reproductions.md#other-figures).\n\n"
        "The minutes cannot be compared: other runs shared the machine, and seed 20 of some arms "
        "ran on another processor. For this reason, seed 20 of each arm was run again (commit "
        "d57f418a) on an AMD EPYC that did nothing else, two runs at a time on two cores "
        "(`benchmarks/results/reproductions/budgets`). The minutes of training, each of a single "
        "run, were 3.7 for `co-evolved`, 2.6 for `25 groups`, 2.7 for `160 steps`, 4.3 for `240 "
        "steps` and 1.4 for `none`. For each token, GRPO with more rollouts took 0.8 to 1.1 times "
        "the time of co-evolution.",
    ),
    "tuned": Figure(
        "Not in the paper: co-evolution is better than GRPO alone that was tuned too.",
        (*(Claim("co-evolved", "tuned none", metric, (name,))
           for metric in ("training", "seen") for name in ("room", "three")),
         *(Claim("co-evolved", "tuned none", "unseen with online bank", (name,),
                 than="unseen visits alone")
           for name in ("room", "three")),
         *_added(
             *(Claim("co-evolved 4 minibatches", "tuned none", metric, (name,))
               for metric in ("training", "free", "seen") for name in ("room", "three")),
             *(Claim("co-evolved 4 minibatches", "tuned none", "unseen with online bank", (name,),
                     than="unseen visits alone")
               for name in ("room", "three")),
             *(Claim("co-evolved", "tuned none", "free", (name,)) for name in ("room", "three")),
             *(Claim("tuned none", "none", "seen", (name,)) for name in ("room", "three")))),
        ("room", "three"), ("co-evolved", "tuned none", "none", "co-evolved 4 minibatches"), FIVE,
        ("training", "free", "seen", "unseen", "unseen with online bank", "unseen visits alone"),
        note="The figure was defined when the runs of `co-evolved` and `none` were finished, and "
        "before those of `tuned none`. The setting was chosen on rooms ([Switches of GRPO alone]"
        "(tiny-models.md#switches-of-grpo-alone)). It had not been tried for co-evolution, so "
        "the arm "
        "`co-evolved 4 minibatches` was added when the runs of `tuned none` were finished. The "
        "runs of `co-evolved` and `none` are of earlier code than the others. `none` in the "
        "mixture was [run again](reproductions.md#none-in-the-mixture-again) with newer code. "
        "The two arms with 4 "
        "minibatches have equal settings. Of the code that they use, only the search of the shop "
        f"was changed between their commits: it was moved to another module. {MIXED_TRAINING} "
        f"{ONLINE_BANK}",
    ),
    "transfer": Figure(
        "Not in the paper: bank and extractor help an actor that did not make them, in the places "
        "of the bank.",
        (*_better("old bank", "training", "none", "foreign bank"),
         *_better("old extractor", "training", "static"),
         *_added(
             Claim("old bank", "none", "seen with bank", than="seen"),
             Claim("old bank", "foreign bank", "seen with bank"),
             Claim("old bank", "none", "seen"),
             Claim("old bank", "none", "early training"),
             Claim("old extractor", "static", "early training"))),
        ("room",), ("old bank", "old extractor", "static", "foreign bank", "none", "co-evolved"),
        THREE,
        ("training", "early training", "guided", "seen", "seen with bank",
         "unseen with online bank"),
        note="For `old bank`, `seen` is measured after the bank has been taken away. A lesson of "
        "the room is a fact about one place. A bank of another seed has no lesson about the places "
        "of the run, but places of different seeds may have the same name. In the runs of "
        "`foreign bank`, a quarter of the guided episodes therefore read a lesson about another "
        "place of the same name (`rollout/used`). With one of two other sets of runs of "
        "`none`, training success of `old bank` is higher: see [Other "
        "figures](reproductions.md#other-figures).",
    ),
    "shared": Figure(
        "Not in the paper: lessons of other tasks help in a shared bank.",
        _better("shared bank", "unseen with online bank", "co-evolved"),
        ("three",), ("shared bank", "co-evolved"), THREE,
        ("training", "seen with bank", "unseen with online bank"),
        note="A lesson of these tasks is a fact about one place or one article, such as \"from the "
        "start go north\" or \"buy yarrow\", and no rule holds in several tasks. They therefore "
        "cannot show transfer between tasks. Retrieval of the preset excludes nearly all lessons "
        "of other goals, too (`retrieval.min_similarity`, `retrieval.margin`). Transfer needs "
        "tasks with common rules, a language model as the extractor, and wider retrieval.",
    ),
    "lessons": Figure(
        "Not in the paper: a trained extractor writes more right lessons than an untrained one.",
        _added(*_better("co-evolved", "right lessons", "static")),
        ("three",), ("co-evolved", "static", "experience only"), FIVE,
        ("right lessons", "right lessons, untrained extractor"),
        note="This comparison was added when the runs of Table 1, which it uses, were finished.",
    ),
    "placebos": Figure(
        "Not in the paper: the content of the lessons helps, not their presence.",
        (*_better("co-evolved", "guided", "filler", "shuffled", "trajectory"),
         *_better("right", "guided", "co-evolved")),
        ("room",), ("co-evolved", "filler", "shuffled", "trajectory", "right"), THREE,
        ("guided", "free", "seen with bank"),
        note="The runs of `filler`, `shuffled` and `trajectory` were made twice, because the word "
        "of the first filler, \"well\", has 2.5 times the tokens of a lesson. With the first runs "
        "(`benchmarks/results/reproductions/placebos-first`), no claim of this figure was shown: "
        "the differences in `guided` were 0.094 ± 0.114, 0.073 ± 0.101 and 0.032 ± 0.085. The "
        "claim that agrees does so only since the filler was changed. With other runs of "
        "`co-evolved` it is not shown either, and with one of three sets of them `right` is better "
        "than `co-evolved`: see [Other figures](reproductions.md#other-figures). Before another "
        "place has lessons, and before a place was visited, `shuffled` and `trajectory` show the "
        "filler.",
    ),
    "rivals": Figure(
        "Not in the paper: co-evolution is better than rival methods that run on the same models.",
        (*_better("co-evolved", "seen with bank", *RIVALS),
         *_added(*_better("co-evolved", "unseen with online bank", *RIVALS),
                 *_better("experience only", "seen with bank", *FROZEN_RIVALS),
                 *_better("experience only", "unseen with online bank", *FROZEN_RIVALS))),
        ("room",), ("co-evolved", *RIVALS, "experience only"), THREE,
        ("guided", "free", "seen", "seen with bank", "unseen with online bank"),
        note="Evolving-RL is arXiv 2605.10663, MemRL 2601.03192, SkillOS 2605.06614. Their rules "
        "are switches of crl; the docstring of `benchmarks/rivals.py` lists what was assumed, "
        "changed and left out. Prompts and models are those of crl. In `memrl` and `skillos` the "
        "actor is not trained, as in their papers. Their differences to co-evolution contain the "
        "training of the actor; the arm with an equal actor is `experience only`. With other runs "
        "of `co-evolved` and `experience only`, up to four verdicts change: see "
        "[Other figures](reproductions.md#other-figures).",
    ),
    "methods": Figure(
        "Not in the paper: co-evolution is better than other methods of the field.",
        (*(Claim(tuned("co-evolved"), tuned(arm), "seen")
           for arm in ("none", "gigpo", "role agent", "empo2")),
         *(Claim(tuned("co-evolved"), arm, "unseen with online bank")
           for arm in (tuned("empo2"), "reflexion", tuned("static")))),
        ("room", "webshop", "alfworld", "search_qa"),
        (tuned("co-evolved"), *(tuned(arm) for arm in ("static", *TRAINED_METHODS[1:])),
         "reflexion"),
        THREE,
        ("training", "early training", "free", "attempt 1", "attempt 8", "seen", "seen score",
         "seen with bank", "seen score with bank", "unseen", "unseen score",
         "unseen with online bank", "unseen score with online bank", "unseen visits alone",
         "right lessons", *COSTS),
        note="Each method has the defaults of crl for its own parts: its paper's values where the "
        "paper gives one, otherwise those of its released code or ours "
        "([methods.md](../methods.md)). "
        "It has the optimizer, clipping, temperature and sizes of the preset `cpu`, except for the "
        "clipping of `empo2` (0.3) and its tips: a search finds one instead of ten, because the "
        "bundled actor was taught to read one. The preset was tuned for `co-evolved`. For each "
        "method that "
        "trains, the same two changes of it were tried (`python benchmarks/methods.py --tune`, "
        "[Tuning of the methods](tiny-models.md#tuning-of-the-methods)), and the best of the "
        "three settings is "
        "used. `static` has that of `co-evolved`. All arms have the same number of steps.\n\n"
        "The texts that `empo2`, `role agent` and `reflexion` show or use are written by the "
        "bundled extractor, which only `co-evolved` and `self-distillation` train. `static` shows "
        "what co-evolution is with an extractor that is not trained either. Few lessons of an "
        "untrained extractor are right, and the tips of `empo2` are ordered by the rewards of "
        "their episodes, which do not tell right tips from others. So the figure does not show "
        "what tips of an able writer, such as the actor of the paper, are worth. In `search_qa`, "
        "`self-distillation` collapses ([Collapse of "
        "self-distillation](tiny-models.md#collapse-of-self-distillation)). The arms with "
        "lessons "
        "(`co-evolved`, `static`, `self-distillation`) also continue unfinished episodes for "
        "distillation, which the others do not: see their environment turns.\n\n"
        f"{MIXED_TRAINING} The training episodes of `empo2` have memory in some steps, those of "
        "`role agent` are about a quarter replayed failures, and those of `reflexion` are attempts "
        "until the first success: their `training` and `early training` are not comparable, nor "
        "is `free` of the last two. The novelty of `empo2` gives groups with equal outcomes "
        "different advantages, so that more groups are trained on: see the trained tokens. "
        "*Attempt n* is the share of the last steps' tasks that `reflexion` solves "
        "within n attempts. Without any reflection, it would rise with n too.\n\n"
        "The minutes cannot be compared: other runs shared the machine. The [step times of the "
        "methods](speed.md#step-times-of-the-methods) were measured alone. The commit of some runs "
        "is marked `-dirty`: the return of freed memory after a training step was not committed "
        "yet. The models are the current "
        "bundled ones. The other figures have runs with [those "
        "before](../results.md#conditions), so no run is "
        "shared with them.",
        drawn=("training", "seen", "seen with bank", "unseen with online bank"),
        folder="methods",
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

    def place_half_widths(
        self, metric: str, setting: str, arm: str, task: str
    ) -> list[float] | None:
        """Return half the interval of an evaluated metric in each run, if all have one."""
        measure = METRICS[metric]
        if not isinstance(measure, Evaluated):
            return None
        found = [measure.half_width(run["metrics"], task) for run in self.runs[setting, arm]]
        return None if None in found else [half for half in found if half is not None]

    def means(
        self, metric: str, settings: Sequence[str], arm: str, tasks: Sequence[str] = ()
    ) -> list[float | None]:
        """Return the mean over tasks of some settings, by seed. None if a value is missing.

        `tasks` are all tasks of the settings if empty.
        """
        columns = [
            self.values(metric, setting, arm, task)
            for setting in settings
            for task in SETTINGS[setting]
            if not tasks or task in tasks
        ]
        return [
            None if None in values else fmean(value for value in values if value is not None)
            for values in zip(*columns, strict=True)
        ]

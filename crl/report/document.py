"""Report: one HTML file from the directories of runs.

The file needs no network. Its only script sorts and filters tables. Texts of models, games and
banks are escaped: as HTML by the templates, and characters that are not printable by
`printable_lines`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from crl import __version__
from crl.config.layers import leaves
from crl.config.schema import OVERALL, RunConfig
from crl.evaluation.comparison import Arm, arms_of, compare, differing_settings
from crl.evaluation.evaluate import CONDITION_LABELS, MAIN_CONDITIONS
from crl.evaluation.judgement import judgements
from crl.intervals import interval_text
from crl.monitor.files import damage_text
from crl.report import svg
from crl.report.charts import LineChart, Point, over_seeds
from crl.report.episodes import Pair, sampled_pairs
from crl.report.figures import FIGURES, SINGLE_ARM, ArmRuns, arms_of_runs
from crl.report.lessons import Lessons, read_lessons
from crl.report.results import Results, next_commands, read_results
from crl.report.run_record import RunRecord
from crl.wording import OPERATION_WORDS, counted, lift_text, printable_lines

MOST_BYTES = 5_000_000
"""Maximum size of a report whose texts are long."""

SCALES = (1.0, 0.5, 0.25, 0.1, 0.04, 0.01)
"""Factors on the maximum lengths of texts.

The first factor that makes the report small enough is used.
"""

MOST_CHARACTERS = 1000
"""Maximum number of characters of a text of a model, a game or a bank in a report."""

LOG_LINES = 60
"""Number of last lines of the log in a report."""

MOST_LOG_BYTES = 200_000
"""Bytes at the end of the log from which these lines are taken."""

T = TypeVar("T")

CONDITIONS_SENTENCES: Sequence[str] = (
    "Free episodes are played without experience.",
    "Guided episodes are played with the run's bank, which they search for experience.",
    "Online episodes are played with a bank built online: a copy of the bank that is also written "
    "during the evaluation.",
    "The online set without a bank (alone) has the same episodes without experience.",
)
"""Explanations of the conditions of episodes, in the order of `CONDITION_LABELS`."""

SECTIONS: Mapping[str, str] = {
    "success": "Success",
    "time": "Time",
    "actor": "Training of the actor",
    "extractor": "Training of the extractor",
    "bank": "Bank",
}
"""Titles of the sections with charts, by subject."""


@dataclass(frozen=True)
class Part:
    """Run with the contents of its own sections of a report."""

    run: RunRecord
    results: Results | None
    """Numbers of the run's end; None before it."""
    lessons: Lessons | None
    pairs: Sequence[Pair]
    changes: Sequence[tuple[str, Any, Any]]
    """Settings that differ from the preset, as `RunRecord.changes`."""
    faults: Mapping[str, str]
    """Reason why a part of the run cannot be read, by its name."""

    @classmethod
    def read(cls, run: RunRecord) -> Part:
        """Read a run. An unreadable part does not exclude the others from the report."""
        faults: dict[str, str] = {}

        def read(name: str, reader: Callable[[], T], default: T) -> T:
            try:
                return reader()
            except Exception as error:  # damaged files raise errors of many types
                faults[name] = f"{type(error).__name__}: {error}"
                return default

        return cls(
            run,
            read("summary", lambda: read_results(run), None),
            read("bank", lambda: read_lessons(run.dir.bank), None),
            read("episodes", lambda: sampled_pairs(run.dir.episodes, run.tasks), []),
            read("preset", lambda: run.changes, []),
            faults,
        )

    @property
    def judgements(self) -> Sequence[str]:
        return self.results.judgements if self.results else run_judgements(self.run)

    @property
    def commands(self) -> list[tuple[str, str]]:
        return next_commands(self.run)

    @cached_property
    def settings(self) -> list[tuple[str, str]]:
        """All settings: (key, value)."""
        own = leaves(self.run.saved.config.model_dump(mode="json"))
        return [(key, _json(value)) for key, value in own]

    @property
    def log(self) -> str:
        """Last lines of the run's log."""
        path = self.run.dir.log
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_LOG_BYTES))
            text = file.read().decode("utf-8", errors="replace")
        return "\n".join(text.splitlines()[-LOG_LINES:])


@dataclass(frozen=True)
class ArmTables:
    """Arms of runs, and their differences."""

    arms: Sequence[ArmRuns]
    differing: Mapping[str, Sequence[Any]]
    """Values of the settings that differ, in the order of the arms, by key."""
    differences: Sequence[tuple[str, str, float, str, str]]
    """Differences of success after the last step.

    Each is (what, arms, value, text, origin of the interval). There are none if an arm has no
    finished run.
    """
    left_out: Sequence[str]
    """Names of runs that are not finished."""

    @classmethod
    def of(cls, runs: Sequence[RunRecord]) -> ArmTables:
        arms = arms_of([run.result for run in runs])
        left_out = frozenset(run.path for arm in arms for run in arm.runs if not run.rates)
        return cls(
            arms_of_runs(runs),
            differing_settings(arms),
            _differences(arms),
            [run.name for run in runs if run.dir.path in left_out],
        )


def run_judgements(run: RunRecord) -> list[str]:
    """Return sentences on the effect of training and experience; empty before two evaluations."""
    evaluations = run.evaluations
    if len(evaluations) < 2:
        return []
    first, last = min(evaluations), max(evaluations)
    line = next(line for line in reversed(run.of("eval")) if line["step"] == last)
    gains = [
        (line[f"eval/{task}/unseen/lift"], line.get(f"eval/{task}/unseen/lift/half_width"))
        for task in run.tasks
        if line.get(f"eval/{task}/unseen/lift") is not None
    ]
    known = [(value, math.nan if half is None else half) for value, half in gains]
    trained = run.saved.config.updates("actor")
    return judgements(evaluations[first], evaluations[last], known, trained=trained)


def report(runs: Sequence[RunRecord]) -> str:
    """Return the report on runs as HTML. Runs whose settings agree but for the seed are one arm.

    Texts of all runs are cut more if the report would have more than `MOST_BYTES`.
    """
    tables = ArmTables.of(runs)
    arms = tables.arms
    charts = {name: FIGURES[name](arms) for name in SECTIONS}
    parts = [Part.read(run) for run in runs]
    style, script = _source("style.css"), _source("tables.js")
    content = dict(
        runs=runs,
        tables=tables,
        arm_texts=[arm_text(arm, parts) for arm in arms] if len(runs) > 1 else [],
        parts=parts,
        charts={title: charts[name] for name, title in SECTIONS.items() if charts[name]},
        style=Markup(style),
        script=Markup(script),
        policy=content_policy(style, script),
        crl_version=__version__,
    )
    text = ""
    for scale in SCALES:
        text = environment(scale).get_template("report.html").render(content, scale=scale)
        if len(text.encode("utf-8", errors="backslashreplace")) <= MOST_BYTES:
            break
    return text


def trained_models(config: RunConfig) -> str:
    """Return the models whose weights a run changes, in words."""
    actor, extractor = (config.updates(role) for role in ("actor", "extractor"))
    if actor and extractor:
        return "both models"
    return "the actor" if actor else "the extractor" if extractor else "no model"


def arm_text(arm: ArmRuns, parts: Sequence[Part]) -> str:
    """Return a paragraph on the runs of an arm: what they trained, and their last success.

    Rates are means over the runs that are finished, with Student's interval over the seeds.
    """
    members = [part for part in parts if part.run in arm.runs]
    run, config = arm.runs[0], arm.runs[0].saved.config
    seeds = ("seed " if len(arm.runs) == 1 else "seeds ") + ", ".join(
        str(one.seed) for one in arm.runs
    )
    name = "" if arm.name == SINGLE_ARM else f"{arm.name}: "
    finished = [one for one in arm.runs if one.state == "finished"]
    state = "" if len(finished) == len(arm.runs) else f"; {len(finished)} finished"
    text = (
        f"{name}{counted(len(arm.runs), 'run')} ({seeds}{state}), method "
        f"{config.method}, {counted(config.run.steps, 'step')}. Trained "
        f"{trained_models(config)} on {', '.join(run.tasks)}."
    )
    task = run.tasks[0] if len(run.tasks) == 1 else OVERALL
    rates = []
    for split, condition in MAIN_CONDITIONS:
        last = [
            [Point(0, rate.value, rate.low, rate.high)]
            for one in finished
            if (rate := one.result.rates.get((task, split, condition)))
        ]
        if last:
            others = [[]] * (len(arm.runs) - len(last))
            (mean,) = over_seeds([*last, *others], 0.0, 1.0)
            interval = interval_text(mean.y, mean.low, mean.high)
            rates.append(f"{split} {CONDITION_LABELS[condition]} {interval}")
    if rates:
        text += f" Success after the last step: {'; '.join(rates)}."
    if banks := [part.lessons.active for part in members if part.lessons]:
        noun = "The bank has" if len(banks) == 1 else "The banks have on average"
        text += f" {noun} {counted(round(fmean(banks)), 'experience')}."
    return text


def _differences(arms: Sequence[Arm]) -> list[tuple[str, str, float, str, str]]:
    """Return the differences of arms after the last step, as in `ArmTables`."""
    if len(arms) < 2 or not all(any(run.rates for run in arm.runs) for arm in arms):
        return []
    comparison = compare([run for arm in arms for run in arm.runs if run.rates])
    return [
        (
            f"{d.key[0]}, {d.key[1]}, {CONDITION_LABELS.get(d.key[2], d.key[2])}",
            d.arms, d.value, str(d), d.method,
        )
        for d in comparison.differences
    ]  # fmt: skip


def environment(scale: float = 1.0) -> Environment:
    """Return the environment of the templates.

    `scale`: factor on the maximum lengths of texts.

    Every text that a template prints is escaped twice: characters that are not printable, then
    those with a meaning in HTML.
    """
    env = Environment(
        loader=PackageLoader("crl.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_printed,
    )  # fmt: skip
    shortened = partial(cut, scale=scale)
    env.filters |= {"cut": shortened, "counted": counted, "json": _json, "value": svg.value_text}
    env.globals |= {
        "svg": svg, "lift_text": lift_text, "damage_text": damage_text, "cut": shortened,
        "counted": counted, "conditions_sentences": CONDITIONS_SENTENCES,
        "geometry": svg.LineGeometry, "operation_words": OPERATION_WORDS,
        "trained_models": trained_models, "is_lines": lambda chart: isinstance(chart, LineChart),
    }  # fmt: skip
    return env


def _printed(value: object) -> object:
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return printable_lines(value)


def cut(text: str, most: int = MOST_CHARACTERS, *, scale: float = 1.0) -> str:
    """Return the start of a long text, and say how much is left out.

    `scale`: factor on the maximum number of characters.
    """
    most = math.ceil(most * scale)
    left_out = len(text) - most
    return text if left_out <= 0 else f"{text[:most]} … ({left_out:,} more characters)"


def content_policy(style: str, script: str) -> str:
    """Return the Content-Security-Policy of a file with this style and this script.

    Nothing is loaded, and nothing else is run.
    """
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (style, script)
    ]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _source(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text("utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

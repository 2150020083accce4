"""Comparison of the final success of runs.

Runs whose settings agree but for the seed are one arm. Arms are compared with the first one:

* paired over seeds, if both arms have the same seeds, at least two: Student's t over the
  differences of the runs with equal seeds;
* not paired, if both arms have at least two runs: Welch's t over the runs;
* else over the goals or the episodes of the runs, by MOVER. This interval does not contain the
  spread between seeds.

A prompt that a file replaces in one of the runs is compared by its text, not by the path of the
file. Other prompts, and the versions of packages and of crl, are not compared.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from crl.config.layers import leaves, parse_set
from crl.config.load import SavedRun, load_saved
from crl.config.schema import RunConfig
from crl.errors import ConfigError
from crl.evaluation.evaluate import EvalKey
from crl.evaluation.report import Estimate, mean_estimate
from crl.evaluation.saved import read, saved_files
from crl.intervals import Mean, interval_text, t_975
from crl.monitor.files import damage_text, read_metrics
from crl.monitor.run_dir import RunDir
from crl.wording import counted, times

SEED = "run.seed"

EXPERIENCE_SECTIONS = ("ask", "bank", "critic", "embedder", "extractor", "retrieval")
"""Sections of the config that methods without experience ignore."""

ROUNDING = 1e-9
"""Half width below which an interval is 0 except for rounding."""

CLUSTERED_CONDITIONS = ("online", "alone")
"""Conditions whose intervals are clustered by goal in every evaluation."""


@dataclass(frozen=True)
class RunResult:
    """Success of one run."""

    path: Path
    seed: int
    settings: Mapping[str, Any]
    """Settings by dotted key, without the seed. Those of a saved evaluation are included."""
    rates: Mapping[EvalKey, Estimate]
    """Success rates with their intervals."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the texts of prompts, by name. Older runs have fewer."""
    clustered: bool = False
    """True if all intervals are clustered by goal, as in the results of `crl eval`. An evaluation
    of a run clusters only those of its online set."""
    damaged_lines: int = 0
    """Number of damaged lines of metrics.jsonl, which are left out."""


@dataclass(frozen=True)
class Arm:
    """Runs whose settings agree but for the seed."""

    name: str
    """A, B, C, …, in the order of the runs."""
    runs: Sequence[RunResult]

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    def mean(self, key: EvalKey) -> Estimate | None:
        """Return the mean success; None if a run has none for this key."""
        if not all(key in run.rates for run in self.runs):
            return None
        if len(self.runs) == 1:
            return self.runs[0].rates[key]
        mean = Mean.of([run.rates[key].value for run in self.runs])
        return _estimate(mean.value, mean.half_width, lowest=0.0)


@dataclass(frozen=True)
class Difference:
    """Success of an arm minus that of the first arm."""

    key: EvalKey
    arms: str
    """Names of the arms, such as `B − A`."""
    value: float
    low: float
    high: float
    method: str
    """Origin of the interval."""

    def __str__(self) -> str:
        return interval_text(self.value, self.low, self.high, "+.3f")


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison."""

    arms: Sequence[Arm]
    differing: Mapping[str, Sequence[Any]]
    """Value in each arm of the settings that differ, by dotted key. "unset" if an arm has none.

    Sections that an arm does not have, because its method ignores them, are left out.
    """
    means: Mapping[EvalKey, Sequence[Estimate | None]]
    """Mean success of each arm."""
    differences: Sequence[Difference]


def read_run(path: Path, name: str | None = None) -> RunResult:
    """Return the final success of a run: its last evaluation, or that of RUN/eval/`name`.json.

    Raise `ConfigError` if `path` is not a run, or has no such evaluation.
    """
    saved, run = load_saved(path), RunDir(path)
    settings, seed = run_settings(saved.config)
    if name is None:
        rates, damaged = _final_rates(run, saved.config.run.steps)
        return RunResult(path, seed, settings, rates, saved.prompts, damaged_lines=damaged)
    file = path / "eval" / f"{name}.json"
    if not file.is_file():
        known = ", ".join(known.stem for known in saved_files(path / "eval")) or "none"
        raise ConfigError(
            "eval", name, f"{path} has no saved evaluation of this name", f"Available: {known}"
        )
    evaluation = read(file)
    applied = _evaluated_settings(evaluation.about, run, saved.config.run.steps)
    if evaluation.about["seed"] != seed:
        applied["seed of the evaluation"] = evaluation.about["seed"]
    ignored = _unused(saved.config)
    settings |= {k: v for k, v in applied.items() if k.partition(".")[0] not in ignored}
    settings |= _evaluated_prompts(evaluation.about, saved)
    rates = {row.key: row.success for row in evaluation.rows}
    return RunResult(path, seed, settings, rates, saved.prompts, clustered=True)


def run_settings(config: RunConfig) -> tuple[dict[str, Any], int]:
    """Return the settings that distinguish arms, by dotted key, and the seed of a run."""
    settings = dict(leaves(config.model_dump(mode="json", exclude=_unused(config))))
    return settings, settings.pop(SEED)


def _unused(config: RunConfig) -> set[str]:
    """Return the sections that the method of a run ignores."""
    return set() if config.with_bank else {*EXPERIENCE_SECTIONS}


def _evaluated_settings(about: Mapping[str, Any], run: RunDir, steps: int) -> dict[str, Any]:
    """Return the effective settings of a saved evaluation, including defaults.

    Runs that differ only by their seed have equal ones: the model is left out, a step is named only
    if it is not the last of the run, and a bank only as that of the run or another one.
    `eval.concurrency` changes no result.
    """
    settings = dict(leaves(about.get("settings", {})))
    settings = {key: value for key, value in settings.items() if not _is_prompt(key)}
    for key in ("actor.model", "extractor.model", "eval.concurrency"):
        settings.pop(key, None)
    options = {
        "--samples": about["samples"],
        "--experience": about["experience"],
        "eval.temperature": about["temperature"],
        "--step": "last" if about["step"] == steps else about["step"],
    }
    if bank := about.get("bank"):
        own = bank["path"] and Path(bank["path"]).resolve() == run.bank.resolve()
        options["--bank"] = "of the run" if own else "another"
    return settings | options


def _evaluated_prompts(about: Mapping[str, Any], saved: SavedRun) -> dict[str, str]:
    """Return the prompts of a saved evaluation whose texts are not those of the run.

    Only prompts that a file replaces count. Older evaluations have no texts: their options `--set`
    name the files.
    """
    texts: Mapping[str, str] = about.get("prompts") or {}
    if texts:
        settings = about.get("settings", {}).get("prompts", {})
        files = {name: file for name, file in settings.items() if file}
        names = [
            name
            for name in sorted(files.keys() | saved.config.prompts.files.keys())
            if texts.get(name) != saved.prompts.get(name)
        ]
    else:
        options = (leaves(parse_set(text).data) for text in about["options"].get("set", ()))
        given = dict(leaf for leaves_of_one in options for leaf in leaves_of_one)
        files = {key.partition(".")[2]: file for key, file in given.items() if _is_prompt(key)}
        names = list(files)
    return {
        f"prompt {name} of the evaluation": _prompt_text(files.get(name), texts.get(name))
        for name in names
    }


def _is_prompt(key: str) -> bool:
    """Return whether a dotted key names a prompt."""
    return key.startswith("prompts.")


def _prompt_text(file: Any, digest: str | None) -> Any:
    """Return the value by which a prompt is compared.

    It is the SHA-256 `digest` of the text; without it, the file, or None for the bundled prompt.
    """
    if digest:
        return f"SHA-256 {digest[:16]}"
    return file and f"{file} (text not recorded)"


def _final_rates(run: RunDir, steps: int) -> tuple[dict[EvalKey, Estimate], int]:
    """Return the success rates of the run's evaluation after its last step.

    Also return the number of damaged lines of its metrics.
    """
    metrics = read_metrics(run.metrics)
    evaluations = [line for line in metrics.lines if line["kind"] == "eval" and line["step"] > 0]
    final = [line for line in evaluations if line["step"] == steps]
    if not final:
        reason = f"it has no evaluation after its last step, {steps}: it is not finished"
        if metrics.damaged:
            reason += f", or its metrics.jsonl is damaged ({damage_text(metrics.damaged)})"
        can_continue = any(run.checkpoints.glob("*/manifest.json"))
        remedy = f"Continue it: crl resume {run.path}" if can_continue else "Leave it out"
        raise ConfigError("run", str(run.path), reason, remedy)
    return success_rates(final[-1]), metrics.damaged


def success_rates(line: Mapping[str, Any]) -> dict[EvalKey, Estimate]:
    """Return the success rates of the metrics of an evaluation, with their intervals."""
    rates: dict[EvalKey, Estimate] = {}
    for metric, value in line.items():
        match metric.split("/"):
            case ["eval", task, split, "success", condition] if isinstance(value, int | float):
                ends = [line.get(f"{metric}/{end}") for end in ("low", "high")]
                low, high = (end if isinstance(end, int | float) else math.nan for end in ends)
                rates[task, split, condition] = Estimate(value, low, high)
    return rates


def compare(runs: Sequence[RunResult]) -> Comparison:
    """Return the comparison of all arms with that of the first run.

    Raise `ConfigError` with fewer than two runs, or if a run is given twice.
    """
    paths = [run.path.resolve() for run in runs]
    if len(paths) < 2 or len(set(paths)) < len(paths):
        reason = "is given twice" if len(paths) > 1 else "is a single run"
        twice = next((path for path in paths if paths.count(path) > 1), paths[0])
        raise ConfigError("run", str(twice), reason, "Give two or more different runs")
    arms = arms_of(runs)
    found = dict.fromkeys(key for run in runs for key in run.rates)
    tasks = list(dict.fromkeys(task for task, _, _ in found))
    keys = sorted(found, key=lambda key: tasks.index(key[0]))
    return Comparison(
        arms,
        differing_settings(arms),
        {key: [arm.mean(key) for arm in arms] for key in keys},
        [
            difference
            for arm in arms[1:]
            for key in keys
            if (difference := _difference(key, arms[0], arm))
        ],
    )


def arms_of(runs: Sequence[RunResult]) -> list[Arm]:
    """Return the arms of runs, in the order of their first runs."""
    groups: dict[str, list[RunResult]] = {}
    for run, settings in zip(runs, _compared_settings(runs), strict=True):
        groups.setdefault(json.dumps(settings, sort_keys=True), []).append(run)
    return [Arm(_name(i), group) for i, group in enumerate(groups.values())]


def repeated_seeds(runs: Sequence[RunResult]) -> list[str]:
    """Return a warning for each seed that an arm has more than once, as after a copy of a run."""
    warnings = []
    for arm in arms_of(runs):
        for seed, number in Counter(arm.seeds).items():
            if number > 1:
                paths = ", ".join(str(run.path) for run in arm.runs if run.seed == seed)
                warnings.append(
                    f"seed {seed} occurs {times(number)} in {paths}: runs with equal settings and "
                    "seeds are not independent. Leave out the copies"
                )
    return warnings


def _compared_settings(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return the settings of each run, with the texts of prompts instead of their files.

    A prompt counts if a file replaces it in any of the runs.
    """
    replaced = {
        key for run in runs for key, file in run.settings.items() if _is_prompt(key) and file
    }
    return [
        {
            **run.settings,
            **{
                key: _prompt_text(run.settings.get(key), run.prompts.get(key.partition(".")[2]))
                for key in replaced
            },
        }
        for run in runs
    ]


def differing_settings(arms: Sequence[Arm]) -> dict[str, list[Any]]:
    """Return the value in each arm of the settings that differ. See `Comparison.differing`.

    Of different tasks, only the names are listed.
    """
    runs = [run for arm in arms for run in arm.runs]
    by_path = {run.path: one for run, one in zip(runs, _compared_settings(runs), strict=True)}
    settings = [by_path[arm.runs[0].path] for arm in arms]
    sections = [{name.partition(".")[0] for name in one} for one in settings]
    names = dict.fromkeys(
        name
        for one in settings
        for name in one
        if "." not in name or all(name.partition(".")[0] in arm for arm in sections)
    )
    values = {name: [one.get(name, "unset") for one in settings] for name in names}
    differing = {
        name: of_arms for name, of_arms in values.items() if len(set(map(json.dumps, of_arms))) > 1
    }
    tasks = [
        sorted({name.split(".")[1] for name in one if name.startswith("tasks.")})
        for one in settings
    ]
    if all(names == tasks[0] for names in tasks):
        return differing
    others = {name: of for name, of in differing.items() if not name.startswith("tasks.")}
    return {"tasks": [", ".join(names) for names in tasks], **others}


def _name(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"arm {number + 1}"


def _difference(key: EvalKey, first: Arm, other: Arm) -> Difference | None:
    """Return the difference of two arms; None if a run has no rate for this key."""
    if first.mean(key) is None or other.mean(key) is None:
        return None
    arms = f"{other.name} − {first.name}"
    a, b = ({run.seed: run.rates[key].value for run in arm.runs} for arm in (first, other))
    value = fmean(run.rates[key].value for run in other.runs) - fmean(
        run.rates[key].value for run in first.runs
    )
    unique = len(a) == len(first.runs) and len(b) == len(other.runs)
    if unique and a.keys() == b.keys() and len(a) > 1:
        half = Mean.of([b[seed] - a[seed] for seed in a]).half_width
        method = f"paired over {counted(len(a), 'seed')}"
    elif len(first.runs) > 1 and len(other.runs) > 1:
        half = welch_half_width(
            [run.rates[key].value for run in first.runs],
            [run.rates[key].value for run in other.runs],
        )
        method = "not paired, over runs (Welch)"
    else:
        before = mean_estimate([run.rates[key] for run in first.runs])
        after = mean_estimate([run.rates[key] for run in other.runs])
        low = value - math.hypot(after.value - after.low, before.high - before.value)
        high = value + math.hypot(after.high - after.value, before.value - before.low)
        clustered = first.runs[0].clustered or key[2] in CLUSTERED_CONDITIONS
        unit = "goals" if clustered else "episodes"
        method = f"not paired, over {unit}: without the spread between seeds"
        return Difference(key, arms, value, low, high, method)
    estimate = _estimate(value, half, lowest=-1.0)
    return Difference(key, arms, value, estimate.low, estimate.high, method)


def _estimate(value: float, half: float, *, lowest: float) -> Estimate:
    """Return a value with its interval, which is cut to [`lowest`, 1].

    The ends are NaN if `half` is 0: a few equal rates do not show how much rates differ.
    """
    if math.isnan(half) or half < ROUNDING:
        return Estimate(value, math.nan, math.nan)
    return Estimate(value, max(value - half, lowest), min(value + half, 1.0))


def welch_half_width(first: Sequence[float], other: Sequence[float]) -> float:
    """Return half the 95 % interval of a difference of means (Welch 1947).

    Both samples have at least two values. The degrees of freedom are rounded down.
    """
    parts = [variance(values) / len(values) for values in (first, other)]
    total = sum(parts)
    if not total:
        return 0.0
    degrees = total**2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (first, other), strict=True)
    )
    return t_975(max(1, int(degrees))) * math.sqrt(total)

"""Results of the figures of `coevolution.py` as Markdown, for the terminal and docs/results.md.

A claim is judged by the 95 % interval of a difference over seeds (Student's t, paired by seed). For
several tasks, the value of a seed is the mean over the tasks.

* agrees: the interval is on the claimed side of 0.
* disagrees: it is on the other side.
* not shown: it contains 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from textwrap import wrap
from typing import Any

import numpy as np
from aggregates import Scores, bootstrap_interval, interquartile_mean, probability_of_improvement
from common import mean_and_interval
from figures import (
    ARMS,
    FIGURES,
    METRIC_TEXTS,
    METRICS,
    SETTINGS,
    Claim,
    Cost,
    Figure,
    Results,
)
from pictures import draw

from crl.intervals import Mean

AGREES, DISAGREES, NOT_SHOWN = "agrees", "disagrees", "not shown"
NOT_RUN = "not run yet"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
"""Lines around the part of docs/results.md that `document` writes."""


# ── claims ────────────────────────────────────────────────────────────────────────────────────────


def advantage(results: Results, claim: Claim) -> list[float]:
    """Return by how much the claimed arm is better, for each seed where this is known."""
    settings = claim.settings or results.figure.settings

    def gain(of: Sequence[str]) -> list[float | None]:
        return _differences(
            results.means(claim.metric, of, claim.better),
            results.means(claim.than or claim.metric, of, claim.worse),
        )

    gains = gain(settings)
    if claim.minus:
        gains = _differences(gains, gain(claim.minus))
    sign = -1 if results.figure.lower_is_better else 1
    return [sign * gain for gain in gains if gain is not None]


def verdict(advantages: Sequence[float]) -> str:
    """Return whether the interval of the advantages is above 0, below 0, or around it."""
    mean = Mean.of(advantages)
    if mean.value > mean.half_width:
        return AGREES
    return DISAGREES if mean.value < -mean.half_width else NOT_SHOWN


def overall(verdicts: Sequence[str]) -> str:
    """Return the verdict on several claims: the common one, else how many claims have each."""
    if len(set(verdicts)) == 1:
        return verdicts[0]
    counts = {name: verdicts.count(name) for name in (DISAGREES, NOT_SHOWN, AGREES)}
    plural = {DISAGREES: "disagree", NOT_SHOWN: NOT_SHOWN, AGREES: "agree"}
    return ", ".join(
        f"{count} {name if count == 1 else plural[name]}" for name, count in counts.items() if count
    )


def _differences(
    first: Sequence[float | None], second: Sequence[float | None]
) -> list[float | None]:
    return [None if a is None or b is None else a - b for a, b in zip(first, second, strict=True)]


# ── latency ──────────────────────────────────────────────────────────────────────────────────────

LATENCY = Path(__file__).parent / "results" / "rollout_latency.json"
APPRECIABLE = 1.05
"""Ratio of rollout times above which a slowdown is appreciable."""
MAX_SEARCH_MS = 1_000.0
"""Time of a search, about a second, that the paper calls negligible."""


def latency_verdicts(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, tuple[str, str]]:
    """Return claim and verdict of Figures 9c, 12 and 14b, from rows of `rollout_latency.py`.

    Ratios are means over the numbers of environments, and their interval is over repetitions. Both
    engines count: the latency model and the tiny models.
    """
    slower = {
        arm: [
            [fmean(ratios) - APPRECIABLE for ratios in zip(*sizes, strict=True)]
            for engine in dict.fromkeys(row["engine"] for row in rows)
            if (sizes := [r["ratio"] for r in rows if (r["engine"], r["arm"]) == (engine, arm)])
        ]
        for arm in ("on", "critic")
    }
    faster = [[-value for value in of_engine] for of_engine in slower["on"]]
    searches = [row["search_ms"]["max"] for row in rows if row["search_ms"]]
    return {
        "9c": (
            "Experience does not slow rollouts appreciably (by over 5 %).",
            overall([verdict(values) for values in faster]),
        ),
        "12": (
            "A search for experience takes at most a second.",
            AGREES if max(searches) <= MAX_SEARCH_MS else DISAGREES,
        ),
        "14b": (
            "The actor as critic slows rollouts appreciably (by over 5 %).",
            overall([verdict(values) for values in slower["critic"]]),
        ),
    }


# ── text ──────────────────────────────────────────────────────────────────────────────────────────


def section(name: str, results: Results) -> str:
    """Return a figure: claim, verdicts, table, command, machine and time."""
    figure = results.figure
    runs = [run for of_arm in results.runs.values() for run in of_arm]
    hours = sum(run["seconds"] for run in runs) / 3600
    processors = ", ".join(sorted({run["processor"] for run in runs}))
    seeds = len(next(iter(results.runs.values())))
    return "\n".join(
        [
            f"### {title(name)}",
            "",
            *wrap(f"*Claim:* {figure.text}", 100),
            "",
            *([*wrap(f"*Paper:* {figure.paper}", 100), ""] if figure.paper else []),
            *(
                line
                for claim in figure.claims
                for line in wrap(_claim_line(results, claim), 100, subsequent_indent="  ")
            ),
            "",
            *([*wrap(figure.note, 100), ""] if figure.note else []),
            *_table(results),
            "",
            f"{seeds} seeds, {len(runs)} runs that took {hours:.1f} hours in all ({processors}):",
            "",
            "```sh",
            f"python benchmarks/coevolution.py --figure {name} --jobs 2 --results build/again",
            "```",
            "",
        ]
    )


def title(name: str) -> str:
    """Return the heading of a figure."""
    if name == "table1":
        return "Table 1"
    return f"Figure {name}" if name[0].isdigit() else name.capitalize()


def _claim_line(results: Results, claim: Claim) -> str:
    values = advantage(results, claim)
    added = " *Added after the runs.*" if claim.added else ""
    return (
        f"- {_inequality(claim, '<' if results.figure.lower_is_better else '>')}: "
        f"{mean_and_interval(values)}. **{verdict(values)}**{added}"
    )


def _inequality(claim: Claim, sign: str) -> str:
    if claim.minus:
        settings = (", ".join(names) for names in (claim.settings, claim.minus))
        difference = f"{claim.metric} of {claim.better} − that of {claim.worse}"
        return f"{difference}, {f' {sign} '.join(settings)}"
    where = f" ({', '.join(claim.settings)})" if claim.settings else ""
    other = claim.than or "that"
    return f"{claim.metric} of {claim.better} {sign} {other} of {claim.worse}{where}"


def _table(results: Results) -> list[str]:
    figure = results.figure
    lines = [
        _row("metric", "task", *figure.arms),
        _row(*["---"] * (2 + len(figure.arms))),
    ]
    for name in figure.metrics:
        columns: list[list[list[float | None]]] = []
        for setting in figure.settings:
            for task in SETTINGS[setting]:
                values = [results.values(name, setting, arm, task) for arm in figure.arms]
                columns.append(values)
                label = task if setting == task else f"{setting}: {task}"
                lines.append(_row(name, label, *map(_cell, values)))
                differences = [_cell(_differences(values[0], other)) for other in values[1:]]
                lines.append(_row("", f"{figure.arms[0]} − arm", "", *differences))
        lines += _aggregates(figure, name, columns)
    return lines


def _aggregates(
    figure: Figure, name: str, columns: Sequence[Sequence[Sequence[float | None]]]
) -> list[str]:
    """Return interquartile mean and probability of improvement over several tasks."""
    scores = [_scores([column[arm] for column in columns]) for arm in range(len(figure.arms))]
    if len(columns) < 2 or isinstance(METRICS[name], Cost):
        return []
    first, *others = (
        matrix if matrix is None or not figure.lower_is_better else -matrix for matrix in scores
    )
    means = _row(name, "interquartile mean", *(_statistic(interquartile_mean, s) for s in scores))
    return [
        # Numbers of actions of several tasks have no common scale.
        *([] if figure.lower_is_better else [means]),
        _row(
            "",
            f"P({figure.arms[0]} better)",
            "",
            *(_statistic(probability_of_improvement, first, other) for other in others),
        ),
    ]


def _statistic(function: Any, *scores: Scores | None) -> str:
    """Return a statistic with its interval, or a dash without scores."""
    known = [matrix for matrix in scores if matrix is not None]
    if len(known) < len(scores):
        return "–"
    low, high = bootstrap_interval(function, *known)
    return f"{function(*known):.2f} [{low:.2f}, {high:.2f}]"


def _scores(tasks: Sequence[Sequence[float | None]]) -> Scores | None:
    """Return scores [runs, tasks]; None if one is missing."""
    if any(value is None for task in tasks for value in task):
        return None
    return np.array(tasks, dtype=np.float64).T


def _cell(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if known and max(map(abs, known)) >= 100:
        half = Mean.of(known).half_width
        return f"{fmean(known):,.0f} ± {half:,.0f}" if len(known) > 1 else f"{known[0]:,.0f}"
    return mean_and_interval(values)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


# ── documentation ─────────────────────────────────────────────────────────────────────────────────


def document(complete: Mapping[str, Results], docs: Path) -> None:
    """Write the figures to docs/results.md, and their pictures beside it. Needs matplotlib."""
    page = docs / "results.md"
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    parts = [BEGIN, "", *summary(complete), "", *definitions(complete), ""]
    for name, results in complete.items():
        picture = f"images/figures/{name}.svg"
        draw(results, docs / picture)
        parts += [section(name, results), f"![{title(name)}]({picture})", ""]
    page.write_text(before + "\n".join([*parts, END]) + after, "utf-8")


def summary(complete: Mapping[str, Results]) -> list[str]:
    """Return the table of all figures, those that disagree first."""
    rows = [
        (
            title(name),
            title(name).lower().replace(" ", "-"),
            figure.text,
            overall(
                [
                    verdict(advantage(complete[name], claim))
                    for claim in complete[name].figure.claims
                ]
            )
            if name in complete
            else NOT_RUN,
        )
        for name, figure in FIGURES.items()
    ]
    latency = latency_verdicts(json.loads(LATENCY.read_text("utf-8"))["rows"])
    rows += [
        (title(name), "rollout-latency", text, judged) for name, (text, judged) in latency.items()
    ]
    return [
        _row("figure", "claim", "here"),
        _row("---", "---", "---"),
        *(
            _row(heading if judged == NOT_RUN else f"[{heading}](#{anchor})", text, judged)
            for heading, anchor, text, judged in sorted(rows, key=lambda row: _rank(row[-1]))
        ),
    ]


def definitions(complete: Mapping[str, Results]) -> list[str]:
    """Return what the metrics and the arms of the figures mean."""
    arms = {arm for results in complete.values() for arm in results.figure.arms}
    return [
        "### Metrics",
        "",
        _row("metric", "meaning"),
        _row("---", "---"),
        *(_row(name, text) for name, text in METRIC_TEXTS.items()),
        "",
        "### Arms",
        "",
        _row("arm", "meaning"),
        _row("---", "---"),
        *(_row(name, arm.text) for name, arm in ARMS.items() if name in arms),
    ]


def _rank(judged: str) -> int:
    """Return the place of a verdict in the summary: by the worst of its claims."""
    order = ("disagree", NOT_SHOWN, "agree", NOT_RUN)
    return next(place for place, word in enumerate(order) if word in judged)

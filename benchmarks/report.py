"""Results of the figures of `coevolution.py` as Markdown, for the terminal and docs/results.

A claim is judged by the 95 % interval of a difference over seeds, as in `verdicts.py`. For several
tasks, the value of a seed is the mean over the tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from textwrap import wrap
from typing import Any

import latency_figures
import numpy as np
from aggregates import Scores, bootstrap_interval, interquartile_mean, probability_of_improvement
from common import mean_and_interval
from figures import (
    ARMS,
    FIGURES,
    METRIC_TEXTS,
    METRICS,
    SETTINGS,
    SEVERAL_EPISODES_PER_PLACE,
    Claim,
    Cost,
    Figure,
    Results,
    tasks_of,
)
from pictures import draw
from verdicts import NOT_RUN, NOT_SHOWN, claim_line, markdown_row, overall, verdict

from crl.intervals import Mean

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
"""Lines around the part of figures.md with the figures of `coevolution.py`."""
LATENCY_BEGIN, LATENCY_END = "<!-- latency: begin -->", "<!-- latency: end -->"
"""Lines around the part of speed.md with the figures of `rollout_latency.py`."""

MAX_COMMITS = 8
"""Maximum number of commits that are named."""

wrapped = partial(wrap, width=100, break_on_hyphens=False)
"""Function that wraps a text into lines, but not inside the anchor of a link."""


# ── claims ────────────────────────────────────────────────────────────────────────────────────────


def advantage(results: Results, claim: Claim) -> list[float]:
    """Return by how much the claimed arm is better, for each seed where this is known."""
    settings = claim.settings or results.figure.settings

    def gain(of: Sequence[str], metric: str = "") -> list[float | None]:
        return differences(
            results.means(metric or claim.metric, of, claim.better, claim.tasks),
            results.means(metric or claim.than or claim.metric, of, claim.worse, claim.tasks),
        )

    gains = gain(settings)
    if claim.minus:
        gains = differences(gains, gain(claim.minus))
    if claim.minus_metric:
        gains = differences(gains, gain(settings, claim.minus_metric))
    sign = -1 if results.figure.lower_is_better else 1
    return [sign * gain for gain in gains if gain is not None]


def differences(
    first: Sequence[float | None], second: Sequence[float | None]
) -> list[float | None]:
    """Return the differences by seed; None where a value is missing."""
    return [None if a is None or b is None else a - b for a, b in zip(first, second, strict=True)]


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
            f"## {title(name)}",
            "",
            *wrapped(f"*Claim:* {figure.text}"),
            "",
            *([*wrapped(f"*Paper:* {figure.paper}"), ""] if figure.paper else []),
            *(
                line
                for claim in figure.claims
                for line in wrapped(_claim_line(results, claim), subsequent_indent="  ")
            ),
            "",
            *(
                line
                for paragraph in figure.note.split("\n\n")
                for line in (*wrapped(paragraph), "")
                if figure.note
            ),
            *_table(results),
            "",
            *wrapped(
                f"{seeds} seeds, {len(runs)} runs that took {hours:.1f} hours in all "
                f"({processors}; {_commits(results)}):"
            ),
            "",
            "```sh",
            *sorted({command for arm in figure.arms if (command := ARMS[arm].made_by)}),
            f"python benchmarks/coevolution.py --figure {name} --jobs 2 --results build/again",
            "```",
            "",
        ]
    )


def _commits(results: Results) -> str:
    """Return the commits of the runs, with the arms of each if there are a few."""
    arms: dict[str, list[str]] = {}
    for (_, arm), runs in results.runs.items():
        for commit in sorted({run["commit"][:8] for run in runs}):
            if arm not in arms.setdefault(commit, []):
                arms[commit].append(arm)
    if len(arms) == 1:
        return f"commit {next(iter(arms))}"
    if len(arms) > MAX_COMMITS:
        return f"{len(arms)} commits, which are in the stored runs"
    return "commits " + "; ".join(f"{commit}: {', '.join(of)}" for commit, of in arms.items())


def title(name: str) -> str:
    """Return the heading of a figure."""
    if name == "table1":
        return "Table 1"
    return f"Figure {name}" if name[0].isdigit() else name.capitalize()


def _claim_line(results: Results, claim: Claim) -> str:
    values = advantage(results, claim)
    text = inequality(claim, "<" if results.figure.lower_is_better else ">")
    return claim_line(f"{text}: {_judged_interval(values)}", verdict(values), added=claim.added)


def _judged_interval(values: Sequence[float]) -> str:
    """Return mean and half interval with three digits, or with four if three hide the verdict."""
    mean = Mean.of(values)
    hidden = f"{abs(mean.value):.3f}" == f"{mean.half_width:.3f}"
    return mean_and_interval(values, 4 if hidden else 3)


def inequality(claim: Claim, sign: str) -> str:
    if claim.minus:
        settings = (", ".join(names) for names in (claim.settings, claim.minus))
        gain = f"gain of {claim.better} over {claim.worse} in {claim.metric}"
        return f"{gain}: {f' {sign} '.join(settings)}"
    if claim.minus_metric:
        gain = f"gain of {claim.better} over {claim.worse}"
        return f"{gain}: {claim.metric} {sign} {claim.minus_metric}"
    places = (*claim.settings, *claim.tasks)
    where = f" ({', '.join(places)})" if places else ""
    other = claim.than or "that"
    return f"{claim.metric} of {claim.better} {sign} {other} of {claim.worse}{where}"


def _table(results: Results) -> list[str]:
    """Return the table of a figure, without the rows in which no arm has a value."""
    arms = results.figure.arms
    return [
        markdown_row("metric", "task", *arms),
        markdown_row(*["---"] * (2 + len(arms))),
        *(
            markdown_row(*row)
            for row in _rows(results)
            if any(text not in ("", "–") for text in row[2:])
        ),
    ]


def _rows(results: Results) -> list[tuple[str, ...]]:
    """Return the rows of a figure's table: metric, task, and one text for each arm."""
    figure = results.figure
    rows: list[tuple[str, ...]] = []
    for name in figure.metrics:
        columns: dict[str, list[list[list[float | None]]]] = {}
        for setting in figure.settings:
            group = setting if len(SETTINGS[setting]) > 1 else ""
            for task in tasks_of(name, setting):
                values = [results.values(name, setting, arm, task) for arm in figure.arms]
                columns.setdefault(group, []).append(values)
                rows.append((name, label(name, setting, task), *map(cell, values)))
                halves = [results.place_half_widths(name, setting, a, task) for a in figure.arms]
                if any(halves):
                    cells = (f"± {fmean(half):.3f}" if half else "–" for half in halves)
                    unit = "episodes" if name in SEVERAL_EPISODES_PER_PLACE else "places"
                    rows.append(("", f"over {unit}", *cells))
                gaps = [cell(differences(values[0], other)) for other in values[1:]]
                rows.append(("", f"{figure.arms[0]} − arm", "", *gaps))
        for group, of_group in columns.items():
            prefix = f"{group}: " if group and len(columns) > 1 else ""
            rows += _aggregates(figure, name, of_group, prefix)
    return rows


def label(metric: str, setting: str, task: str) -> str:
    """Return the label of a task's row: costs of a mixture are those of the setting."""
    return setting if tasks_of(metric, setting) == (task,) else f"{setting}: {task}"


def _aggregates(
    figure: Figure, name: str, columns: Sequence[Sequence[Sequence[float | None]]], prefix: str
) -> list[tuple[str, ...]]:
    """Return interquartile mean and probability of improvement over the tasks of one setting, or
    over tasks that were trained alone.
    """
    scores = [_scores([column[arm] for column in columns]) for arm in range(len(figure.arms))]
    if len(columns) < 2 or isinstance(METRICS[name], Cost):
        return []
    first, *others = (
        matrix if matrix is None or not figure.lower_is_better else -matrix for matrix in scores
    )
    means = (_statistic(interquartile_mean, matrix) for matrix in scores)
    return [
        # Numbers of actions of several tasks have no common scale.
        *([] if figure.lower_is_better else [(name, f"{prefix}interquartile mean", *means)]),
        (
            "",
            f"{prefix}P({figure.arms[0]} better)",
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


def cell(values: Sequence[float | None]) -> str:
    """Return mean and half interval; numbers of 100 and more without fractions."""
    known = [value for value in values if value is not None]
    if known and max(map(abs, known)) >= 100:
        half = Mean.of(known).half_width
        return f"{fmean(known):,.0f} ± {half:,.0f}" if len(known) > 1 else f"{known[0]:,.0f}"
    return mean_and_interval(values)


# ── documentation ─────────────────────────────────────────────────────────────────────────────────


def document(complete: Mapping[str, Results], folder: Path) -> None:
    """Write the figures to the pages in `folder`, and their pictures. Needs matplotlib.

    The part on rollout latency stays unchanged if there are no valid results
    (`latency_figures.load`). Raise `ValueError` if a page lacks the lines around its part.
    """
    latency = latency_figures.load(latency_figures.LATENCY)
    parts = [*summary(complete, latency), "", *definitions(complete), ""]
    for name, results in complete.items():
        draw(results, folder / picture(name))
        parts += [section(name, results), f"![{title(name)}]({picture(name)})", ""]
    _replace(folder / "figures.md", BEGIN, END, parts)
    if latency:
        parts = []
        for name in latency_figures.FIGURES:
            latency_figures.draw(name, latency, folder / picture(name))
            parts += [
                latency_figures.section(name, latency),
                f"![{title(name)}]({picture(name)})",
                "",
            ]
        parts += [latency_figures.background(latency)]
        _replace(folder / "speed.md", LATENCY_BEGIN, LATENCY_END, parts)


def picture(name: str) -> str:
    """Return the path of a figure's picture, relative to the page."""
    return f"../images/figures/{name}.svg"


def _replace(page: Path, begin: str, end: str, parts: Sequence[str]) -> None:
    """Replace the lines between `begin` and `end`."""
    before, found_begin, rest = page.read_text("utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{page} must have the lines {begin} and {end}")
    page.write_text(before + "\n".join([begin, "", *parts, end]) + after, "utf-8")


def summary(complete: Mapping[str, Results], latency: latency_figures.Results | None) -> list[str]:
    """Return the table of all figures, those that disagree first.

    Claims that were fixed before the runs and claims that were added have a column each.
    """
    verdicts = {
        name: [(verdict(advantage(results, claim)), claim.added) for claim in results.figure.claims]
        for name, results in complete.items()
    }
    texts = {name: figure.text for name, figure in FIGURES.items()}
    for name, figure in latency_figures.FIGURES.items():
        texts[name] = figure.text
        if latency:
            verdicts[name] = [
                (judged.verdict, judged.added) for judged in figure.judge(latency["rows"])
            ]
    names = sorted(
        texts,
        key=lambda name: _rank(overall([v for v, _ in verdicts[name]]) if name in verdicts else ""),
    )
    return [
        markdown_row("figure", "claim", "fixed before the runs", "added after them"),
        markdown_row(*["---"] * 4),
        *(_summary_row(name, texts[name], verdicts.get(name)) for name in names),
    ]


def _summary_row(name: str, text: str, verdicts: Sequence[tuple[str, bool]] | None) -> str:
    """Return the row of a figure. `verdicts` tells for each claim whether it was added."""
    if verdicts is None:
        return markdown_row(title(name), text, NOT_RUN, "–")
    cells = [[judged for judged, added in verdicts if added == column] for column in (False, True)]
    return markdown_row(_link(name), text, *(overall(c) if c else "–" for c in cells))


def definitions(complete: Mapping[str, Results]) -> list[str]:
    """Return what the metrics and the arms of the figures mean."""
    arms = {arm for results in complete.values() for arm in results.figure.arms}
    return [
        "## Metrics",
        "",
        markdown_row("metric", "meaning"),
        markdown_row("---", "---"),
        *(markdown_row(name, text) for name, text in METRIC_TEXTS.items()),
        "",
        "## Arms",
        "",
        markdown_row("arm", "meaning"),
        markdown_row("---", "---"),
        *(markdown_row(name, arm.text) for name, arm in ARMS.items() if name in arms),
    ]


def _link(name: str) -> str:
    """Return a link to a figure from the page of figures."""
    page = "speed.md" if name in latency_figures.FIGURES else ""
    return f"[{title(name)}]({page}#{title(name).lower().replace(' ', '-')})"


def _rank(judged: str) -> int:
    """Return the place of a verdict in the summary: by the worst of its claims.

    Figures that were not run have the empty verdict, and come last.
    """
    order = ("disagree", NOT_SHOWN, "agree", "")
    return next(place for place, word in enumerate(order) if word in judged)

"""Figures 9c, 12 and 14b of the paper from the results of `rollout_latency.py`.

A claim on rollout times is judged for each engine by the interval, over repetitions, of the ratio
of rollout times minus `APPRECIABLE`. The ratio of a repetition is the mean over the numbers of
environments. The claim on searches is judged by the longest search of all arms and repetitions.

Pictures show every repetition as a small point, and the mean with its interval. They need
matplotlib. Equal results give equal files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from textwrap import wrap
from typing import Any, NamedTuple

from common import half_interval, mean_and_interval
from pictures import COLOURS
from verdicts import AGREES, DISAGREES, claim_line, markdown_row, verdict

LATENCY = Path(__file__).parent / "results" / "rollout_latency.json"
COMMAND = "python benchmarks/rollout_latency.py --out benchmarks/results/rollout_latency.json"
APPRECIABLE = 1.05
"""Ratio of rollout times above which a slowdown is appreciable."""
MAX_SEARCH_MS = 1_000.0
"""Time of a search, about a second, that the paper calls negligible."""
MAX_LAG_MS = 5.0
"""Aim for the 99th percentile of the lag of the event loop."""

Row = Mapping[str, Any]
"""Row of the results: the measurements of one arm with one engine and number of environments."""
Results = Mapping[str, Any]
"""Results of `rollout_latency.py`, as stored."""
Values = Callable[[Mapping[str, Row], str], Sequence[float]]
"""Function from the rows of a number of environments by arm, and an arm, to values by repetition.

It returns no values if the quantity is not defined for the arm.
"""


@dataclass(frozen=True)
class Quantity:
    """Quantity that a figure shows: one line of its table for each arm, one row of its picture."""

    name: str
    """Name with the unit."""
    values: Values
    """Values by repetition."""
    threshold: float | None = None
    """Value that a claim compares with."""
    is_maximum: bool = False
    """True if the table has the maximum over the repetitions instead of the mean."""
    is_logarithmic: bool = False
    """True if the picture has a logarithmic axis."""

    def cell(self, rows: Mapping[str, Row], arm: str) -> str:
        """Return the cell of the table for a number of environments."""
        values = self.values(rows, arm)
        return f"{max(values):.3f}" if self.is_maximum and values else mean_and_interval(values)


class Judged(NamedTuple):
    """Result that a claim implies, with its verdict."""

    text: str
    """The result with its numbers."""
    verdict: str
    added: bool = False
    """True if it was added after the runs."""


@dataclass(frozen=True)
class LatencyFigure:
    """Figure of the paper on rollout time with its counterpart."""

    text: str
    """Claim of the paper in short, with the threshold."""
    quote: str
    """Words of the paper."""
    source: str
    """Section of the paper with these words."""
    judge: Callable[[Sequence[Row]], list[Judged]]
    """Function from the rows to the results that the claim implies."""
    arms: tuple[str, ...]
    quantities: tuple[Quantity, ...]
    note: str
    """What a reader must know to judge the result."""


# ── claims ────────────────────────────────────────────────────────────────────────────────────────


def judge_ratio(
    rows: Sequence[Row], *, arm: str, slower: bool, added: bool = False
) -> list[Judged]:
    """Judge for each engine whether an arm is appreciably slower than `off`, or is not."""
    judged = []
    for engine in engines(rows):
        sizes = [row["ratio"] for row in rows if (row["engine"], row["arm"]) == (engine, arm)]
        ratios = [fmean(of_repetition) for of_repetition in zip(*sizes, strict=True)]
        excess = [ratio - APPRECIABLE for ratio in ratios]
        claim = "over" if slower else "at most"
        judged.append(
            Judged(
                f"{arm} {claim} {100 * (APPRECIABLE - 1):.0f} % slower than off, {engine}: ratio "
                f"{mean_and_interval(ratios)}",
                verdict(excess if slower else [-value for value in excess]),
                added,
            )
        )
    return judged


def judge_experience(rows: Sequence[Row]) -> list[Judged]:
    """Judge whether experience slows rollouts, without questions and, added later, with them."""
    return [
        *judge_ratio(rows, arm="on", slower=False),
        *judge_ratio(rows, arm="ask", slower=False, added=True),
    ]


def judge_searches(rows: Sequence[Row]) -> list[Judged]:
    """Judge whether the longest search of all arms takes at most `MAX_SEARCH_MS`."""
    longest = max(
        (row for row in rows if row["search_ms"]), key=lambda row: row["search_ms"]["max"]
    )
    milliseconds = longest["search_ms"]["max"]
    text = (
        f"longest search at most {MAX_SEARCH_MS:,.0f} ms: {milliseconds:,.0f} ms, in the arm "
        f"{longest['arm']} ({longest['engine']}, {longest['environments']:,} environments)"
    )
    return [Judged(text, AGREES if milliseconds <= MAX_SEARCH_MS else DISAGREES)]


def engines(rows: Sequence[Row]) -> list[str]:
    """Return the names of the engines in order."""
    return list(dict.fromkeys(row["engine"] for row in rows))


# ── quantities ────────────────────────────────────────────────────────────────────────────────────


def seconds(rows: Mapping[str, Row], arm: str) -> Sequence[float]:
    """Return the rollout times."""
    return rows[arm]["rollout_s"]


def ratio(rows: Mapping[str, Row], arm: str, *, to: str, of: Sequence[str]) -> Sequence[float]:
    """Return the rollout times of an arm divided by those of the arm `to`, paired.

    `of`: arms for which this is defined.
    """
    pairs = zip(rows[arm]["rollout_s"], rows[to]["rollout_s"], strict=True)
    return [a / b for a, b in pairs] if arm in of else ()


def statistic(rows: Mapping[str, Row], arm: str, *, field: str, name: str) -> Sequence[float]:
    """Return a statistic of searches or lags."""
    return [of_repetition[name] for of_repetition in rows[arm][field]]


SECONDS = Quantity("rollout (s)", seconds)


def _to_off(*arms: str) -> Quantity:
    return Quantity("ratio to off", partial(ratio, to="off", of=arms), threshold=APPRECIABLE)


def _of_searches(name: str, **options: Any) -> Quantity:
    values = partial(statistic, field="search_ms_each", name=name)
    return Quantity(f"search {name} (ms)", values, is_logarithmic=True, **options)


THRESHOLDS = (
    "The thresholds of 5 % and 1 s were set on 25 November 2026. Rollout times of 23 November were "
    "known by then. They were measured with less distillation, and these results replace them."
)

FIGURES: Mapping[str, LatencyFigure] = {
    "9c": LatencyFigure(
        "Experience does not slow rollouts appreciably (by over 5 %).",
        "our framework introduces no appreciable latency to rollout collection across all "
        "settings, remaining consistently on par with the baseline",
        "§4.3",
        judge_experience,
        ("off", "on", "ask"),
        (SECONDS, _to_off("on", "ask")),
        f"{THRESHOLDS} In `ask`, agents wait for the answers to their questions, so the time "
        "depends on the number of questions. The paper's framework has search_and_ask, and the "
        "paper does not give this number. In the latency model with 1,024 environments, "
        "distillation goes on for half the time of a rollout after its end "
        "([Work beside the rollouts](#work-beside-the-rollouts)).",
    ),
    "12": LatencyFigure(
        "A search for experience takes at most a second.",
        "although search time increases with larger rollout batch sizes, the maximum observed "
        "search time remains around 1 second, which is negligible",
        "A.3",
        judge_searches,
        ("on", "ask", "critic"),
        (
            _of_searches("mean"),
            _of_searches("p95"),
            _of_searches("max", threshold=MAX_SEARCH_MS, is_maximum=True),
        ),
        f"{THRESHOLDS} The paper shows means over the searches of a step. The claim is judged by "
        "the longest single search of all arms, which is stricter. Embeddings are hashed n-grams "
        "of characters, which take less time than those of a language model.",
    ),
    "14b": LatencyFigure(
        "The actor as critic slows rollouts appreciably (by over 5 %).",
        "since the actor must produce a critic decision before each environment interaction, "
        "rollout collection is blocked pending the critic result, incurring non-trivial latency "
        "overhead",
        "B.1",
        partial(judge_ratio, arm="critic", slower=True),
        ("off", "on", "critic"),
        (
            SECONDS,
            _to_off("on", "critic"),
            Quantity("ratio to on", partial(ratio, to="on", of=("critic",))),
        ),
        f"{THRESHOLDS} The claim is judged by the ratio to `off`. The critic judges an experience "
        "once, before the first action.",
    ),
}
"""Figures by their number in the paper."""

ARM_COLOURS: Mapping[str, str] = dict(zip(("off", "on", "ask", "critic"), COLOURS, strict=False))

BACKGROUND = (
    Quantity("left (s)", lambda rows, arm: rows[arm]["left_s"]),
    Quantity("lag p99 (ms)", partial(statistic, field="lag_ms_each", name="p99")),
    Quantity("lag max (ms)", partial(statistic, field="lag_ms_each", name="max"), is_maximum=True),
)
"""Quantities of the table on work beside the rollouts."""


# ── text ──────────────────────────────────────────────────────────────────────────────────────────


def load(path: Path) -> Results | None:
    """Return stored results. Return None if their arms did not distil what they should have.

    Earlier versions of the benchmark did not count the distilled episodes.
    """
    results = json.loads(path.read_text("utf-8"))
    valid = all(
        row.get("distilled")
        == [0 if row["arm"] == "off" else row["environments"]] * results["repetitions"]
        for row in results["rows"]
    )
    return results if valid else None


def section(name: str, results: Results) -> str:
    """Return a figure: claim, verdicts, tables, command, machine and time."""
    figure, rows = FIGURES[name], results["rows"]
    claim = f'*Claim:* {figure.text} The paper ({figure.source}): "{figure.quote}".'
    return "\n".join(
        [
            f"### Figure {name}",
            "",
            *wrap(claim, 100),
            "",
            *(
                line
                for judged in figure.judge(rows)
                for line in wrap(
                    claim_line(judged.text, judged.verdict, added=judged.added),
                    100,
                    subsequent_indent="  ",
                )
            ),
            "",
            *wrap(figure.note, 100, break_on_hyphens=False),
            "",
            *tables(rows, figure.arms, figure.quantities),
            *command(results),
        ]
    )


def background(results: Results) -> str:
    """Return the section on distillation and the lag of the event loop during the rollouts."""
    rows = results["rows"]
    arms = tuple(dict.fromkeys(row["arm"] for row in rows))
    text = (
        "Every rollout with experience distilled all episodes of its arm's previous rollout. "
        "*left* is the time that this took after the end of the rollout. The aim for the lag of "
        f"the event loop is a 99th percentile of at most {MAX_LAG_MS:g} ms."
    )
    return "\n".join(
        [
            "### Work beside the rollouts",
            "",
            *wrap(text, 100),
            "",
            *tables(rows, arms, BACKGROUND),
            *command(results),
        ]
    )


def tables(rows: Sequence[Row], arms: Sequence[str], quantities: Sequence[Quantity]) -> list[str]:
    """Return a table for each engine. Quantities without values for an arm have no line."""
    lines = []
    for engine in engines(rows):
        columns = by_environments(rows, engine)
        lines += [
            f"{engine.capitalize()}, by number of environments:",
            "",
            markdown_row("", *(f"{environments:,}" for environments in columns)),
            markdown_row(*["---"] * (1 + len(columns))),
            *(
                markdown_row(
                    f"{arm}: {quantity.name}",
                    *(quantity.cell(of_size, arm) for of_size in columns.values()),
                )
                for quantity in quantities
                for arm in arms
                if any(quantity.values(of_size, arm) for of_size in columns.values())
            ),
            "",
        ]
    return lines


def by_environments(rows: Sequence[Row], engine: str) -> dict[int, dict[str, Row]]:
    """Return the rows of an engine by number of environments and arm."""
    columns: dict[int, dict[str, Row]] = {}
    for row in rows:
        if row["engine"] == engine:
            columns.setdefault(row["environments"], {})[row["arm"]] = row
    return columns


def command(results: Results) -> list[str]:
    """Return the lines on repetitions, machine, time and command."""
    machine = results["machine"]
    return [
        *wrap(
            f"± over {results['repetitions']} repetitions. The measurement of all arms took "
            f"{results['seconds'] / 3600:.1f} hours ({machine['processor']}, {machine['cpus']} "
            "CPUs):",
            100,
        ),
        "",
        "```sh",
        COMMAND,
        "```",
        "",
    ]


# ── pictures ──────────────────────────────────────────────────────────────────────────────────────


def draw(name: str, results: Results, path: Path) -> None:
    """Draw a figure into an SVG file, with a row for each quantity and a column for each engine."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
    from matplotlib.lines import Line2D  # pyright: ignore[reportMissingImports]

    figure, rows = FIGURES[name], results["rows"]
    size = (4.2 * len(engines(rows)), 2.4 * len(figure.quantities) + 0.6)
    with matplotlib.rc_context({"svg.hashsalt": "crl", "font.size": 9}):
        picture, grid = pyplot.subplots(
            len(figure.quantities),
            len(engines(rows)),
            figsize=size,
            sharex="col",
            squeeze=False,
            layout="constrained",
        )
        for engine, column in zip(engines(rows), grid.T, strict=True):
            column[0].set_title(engine)
            column[-1].set_xlabel("parallel environments")
            for quantity, panel in zip(figure.quantities, column, strict=True):
                draw_panel(panel, quantity, by_environments(rows, engine), figure.arms)
        handles = [Line2D([], [], color=ARM_COLOURS[arm], label=arm) for arm in figure.arms]
        picture.legend(handles=handles, loc="outside lower center", ncols=4)
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(picture)


def draw_panel(
    panel: Any, quantity: Quantity, columns: Mapping[int, Mapping[str, Row]], arms: Sequence[str]
) -> None:
    """Draw one quantity of one engine. `panel`: axes of matplotlib."""
    panel.set_xscale("log", base=2)
    panel.set_yscale("log" if quantity.is_logarithmic else "linear")
    panel.set_ylabel(quantity.name)
    panel.grid(alpha=0.3)
    for place, arm in enumerate(arms):
        colour = ARM_COLOURS[arm]
        shift = 1.06 ** (place - 1)  # so that the points of the arms do not cover each other
        values = {
            environments * shift: of_arm
            for environments, rows in columns.items()
            if (of_arm := quantity.values(rows, arm))
        }
        for x, of_arm in values.items():
            panel.plot([x] * len(of_arm), of_arm, ".", color=colour, alpha=0.5)
        if values and not quantity.is_maximum:
            panel.errorbar(
                list(values),
                [fmean(of_arm) for of_arm in values.values()],
                [half_interval(of_arm) or 0.0 for of_arm in values.values()],
                color=colour,
                capsize=3,
            )
    if quantity.threshold is not None:
        panel.axhline(quantity.threshold, color="black", lw=0.8, ls="--")

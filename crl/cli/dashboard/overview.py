"""Page "overview": the most important contents of all pages.

Sections are arranged vertically. They receive lines in the order of `PRIORITY_ORDER`, so that a
small window leaves out the least important sections first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import NamedTuple

from rich.text import Text

from crl.cli.dashboard.parts import (
    Body,
    advice,
    condition_lines,
    evaluation_lines,
    experience_lines,
    experience_title,
    rate_line,
    time_bar,
    without_lift,
)
from crl.cli.draw import (
    BAD,
    DIM,
    FREE,
    GOOD,
    LABEL_WIDTH,
    LineGroup,
    allocate_lines,
    cell,
    flow,
    format_number,
    one_line,
    sparkline,
)
from crl.config.schema import OVERALL
from crl.monitor.snapshot import HISTORY, UPDATES, Series, Snapshot
from crl.wording import OPERATION_WORDS, printable

TWO_COLUMN_WIDTH = 76
"""Minimum width at which the metrics of the run are shown to the right of the models."""

TALL_HEIGHT = 26
"""Minimum height of the page at which the notes have a title."""

VALUE_WIDTH = 11
"""Width of a value in the table of models."""


OPERATIONS = ("add", "update", "drop")
"""Operations of the bank that are shown. The page "bank" has all of them."""


class ModelRow(NamedTuple):
    """Row of the table of models."""

    label: str
    metric: str
    """Name of the metric after that of the model."""
    spec: str
    """Format of the value."""
    trend: bool = True
    """True if a window that is wide enough shows the history."""


MODEL_ROWS = (
    ModelRow("loss", "loss", "+.4f"),
    ModelRow("ratio", "ratio_mean", ".4f"),
    ModelRow("clip", "clip_fraction", ".3f"),
    ModelRow("kl", "approx_kl", ".4f"),
    ModelRow("entropy", "entropy", ".3f"),
    ModelRow("lr", "learning_rate", ".1e", trend=False),
    ModelRow("updates", "updates", ",.0f", trend=False),
)

PRIORITY_ORDER = (
    "success", "notes", "models", "time", "eval", "tasks", "experiences", "probe", "stats",
)  # fmt: skip
"""Order in which sections receive their minimum number of lines."""

GROWTH_ORDER = (
    "success", "time", "eval", "tasks", "models", "stats", "probe", "notes", "experiences",
)  # fmt: skip
"""Order in which sections receive the remaining lines."""


def overview(s: Snapshot, width: int, height: int) -> Body:
    """Return the page in at most `height` lines."""
    models = _models(s, width)
    stats = LineGroup(list(_stats(s, width)), min_lines=3, title="run")
    if width >= TWO_COLUMN_WIDTH:
        models, stats = _side_by_side(models, s, width), LineGroup(())
    sections = {
        "success": LineGroup(list(_success(s, width)), min_lines=2),
        "tasks": LineGroup(list(_tasks(s, width))),
        "eval": LineGroup(list(_evals(s, width))),
        "models": models,
        "stats": stats,
        "time": LineGroup(list(time_bar(s, width)), min_lines=2),
        "probe": LineGroup(list(_probes(s, width))),
        "experiences": LineGroup(_experiences(s, width), title=experience_title(width)),
        "notes": _notes(s, height),
    }
    line_counts = allocate_lines(sections, height, priority=PRIORITY_ORDER, growth=GROWTH_ORDER)
    return Body(
        [
            line
            for name, section in sections.items()
            for line in section.draw(line_counts[name], width)
        ]
    )


def _success(s: Snapshot, width: int) -> Iterator[Text]:
    """Yield the success rates of the training episodes."""
    lines = list(condition_lines(s, width))
    yield from lines or [Text("No step is finished yet.", DIM)]


def _tasks(s: Snapshot, width: int) -> Iterator[Text]:
    """Yield one line per task, if there are several: success rate, turns per episode, and the
    share of guided episodes that received an experience.
    """
    for name in s.run.tasks:
        success = s.series("train", f"rollout/{name}/success")
        if not success.values:
            continue
        label = Text(one_line(name, width))
        label.truncate(LABEL_WIDTH - 1, overflow="ellipsis")
        turns = format_number(s.last("train", f"rollout/{name}/turns"), ",.1f")
        used = s.last("train", f"rollout/{name}/used")
        share = "" if used is None else f"  used {used:.0%}"
        yield rate_line(label.plain, success, width, FREE, cell("turns", f"{turns}{share}"))


def _evals(s: Snapshot, width: int) -> Iterator[Text]:
    """Yield the last success rates of each eval set, or of all tasks together."""
    overall = [name for name in s.evaluations.sets if name.startswith(f"{OVERALL}/")]
    names = {}
    for name in overall or s.evaluations.sets:
        task, _, split = name.rpartition("/")
        short = overall or len(s.run.tasks) == 1
        names[name] = split if short else one_line(f"{task} {split}", width)
    yield from evaluation_lines(s, width, names)


def _models(s: Snapshot, width: int) -> LineGroup:
    """Return a table with one column per trained model."""
    models = {"actor": "train", **({"extractor": "extractor"} if "extractor" in s.metrics else {})}
    left = _left_width(width) if width >= TWO_COLUMN_WIDTH else width
    space = left - LABEL_WIDTH - len(models) * VALUE_WIDTH
    trend = min(HISTORY, space // len(models) - 2)
    gap = trend + 2 if trend >= 6 else 0
    heading = Text.assemble(
        " " * LABEL_WIDTH,
        *((name.rjust(VALUE_WIDTH).ljust(VALUE_WIDTH + gap), "bold") for name in models),
    )
    lines = [heading]
    for row in MODEL_ROWS:
        values = (
            _value_cells(
                s.series(kind, f"{model}/{row.metric}"), row.spec, gap if row.trend else 0, gap
            )
            for model, kind in models.items()
        )
        lines.append(Text.assemble((row.label.ljust(LABEL_WIDTH), DIM), *values))
    trained = s.series("train", UPDATES).values or "extractor" in models
    return LineGroup(lines if trained else (), min_lines=4)


def _value_cells(series: Series, spec: str, trend: int, gap: int) -> Text:
    """Return a value and `gap` cells.

    If `trend` is not 0, the cells contain the value's history.
    """
    history = sparkline(series, trend - 2)
    return Text.assemble(
        format_number(series.last, spec, VALUE_WIDTH - 1).rjust(VALUE_WIDTH),
        (f"  {history}" if trend else "").ljust(gap),
    )


def _left_width(width: int) -> int:
    """Return the width of the left column: a table without histories, or half of a wide window."""
    return LABEL_WIDTH + 2 * VALUE_WIDTH if width < 110 else (width - 3) // 2


def _side_by_side(models: LineGroup, s: Snapshot, width: int) -> LineGroup:
    """Return a section with the models on the left and the metrics of the run on the right."""
    left_width = _left_width(width) if models.lines else 0
    stats = list(_stats(s, width - (left_width + 3 if models.lines else 0)))
    if not models.lines:
        return LineGroup(stats)
    lines = []
    for left, right in zip_longest(models.lines, stats, fillvalue=Text()):
        left = left.copy()
        left.truncate(left_width, overflow="ellipsis", pad=True)
        lines.append(Text.assemble(left, (" │ ", DIM), right))
    return LineGroup(lines, min_lines=min(models.min_lines, len(lines)))


def _stats(s: Snapshot, width: int) -> Iterator[Text]:
    """Yield the metrics that do not belong to a model.

    Each subject with values has at least one line.
    """
    for label, cells in _stat_groups(s):
        yield from flow(label, cells, width)


def _stat_groups(s: Snapshot) -> Iterator[tuple[str, Iterable[Text]]]:
    """Yield the label and the cells of each subject."""
    if size := s.series("bank", "bank/size"):
        if size.values:
            yield (
                "bank",
                [
                    *metric_cells(s, "bank", ("size", "bank/size", ",.0f")),
                    Text(sparkline(size, 16), FREE),
                ],
            )
        yield "ops", metric_cells(
            s, "bank",
            *((OPERATION_WORDS[kind], f"ops/{kind}", ",.0f") for kind in OPERATIONS),
        )  # fmt: skip
        yield "queue", queue_cells(s)
        yield "retrieval", metric_cells(
            s, "bank",
            ("hits", "retrieval/hit_rate", ".0%"), ("p95 ms", "perf/search_p95_ms", ".1f"),
        )  # fmt: skip
        yield "lessons", metric_cells(
            s, "bank",
            ("correct", "lessons/correct", ".0%"), ("same goal", "retrieval/same_goal", ".0%"),
        )  # fmt: skip
    yield (
        "staleness",
        metric_cells(
            s, "train", ("mean", "staleness/mean", ".2f"), ("max", "staleness/max", ",.0f")
        ),
    )
    yield "speed", metric_cells(
        s, "train",
        ("tokens/s", "perf/sampled_tokens_per_s", ",.0f"),
        ("episodes/s", "perf/episodes_per_s", ",.1f"),
    )  # fmt: skip
    if errors := s.last("train", "rollout/errors"):
        yield "errors", [Text(f"{format_number(errors, ',.0f')} in the last step", BAD)]


def metric_cells(s: Snapshot, kind: str, *items: tuple[str, str, str]) -> list[Text]:
    """Return cells with the last values of metrics.

    `items`: (label, metric, format). Metrics without values are left out.
    """
    return [
        cell(label, format_number(s.last(kind, metric), spec), GOOD)
        for label, metric, spec in items
        if s.series(kind, metric).values
    ]


def queue_cells(s: Snapshot) -> list[Text]:
    """Return cells about the distillation queue.

    The size is the number of episodes that wait or are being distilled. Episodes of dead requests
    are never distilled.
    """
    waiting = [s.last("bank", f"queue/{state}") for state in ("pending", "leased")]
    known = [value for value in waiting if value is not None]
    dead = s.last("bank", "queue/dead")
    return [
        *([cell("size", format_number(sum(known), ",.0f"), GOOD)] if known else []),
        *metric_cells(s, "bank", ("ready", "buffer/ready", ",.0f")),
        *([cell("dead", format_number(dead, ",.0f"), BAD if dead else GOOD)] if dead is not None
          else []),
    ]  # fmt: skip


def _probes(s: Snapshot, width: int) -> Iterator[Text]:
    """Yield the success rates of the advice probe for each task."""
    cells = [
        Text.assemble(f"{one_line(task, width)} ", advice(probe))
        for task, probe in s.evaluations.probes.items()
    ]
    yield from flow("advice", cells, width)


def _experiences(s: Snapshot, width: int) -> list[Text]:
    """Return the experiences that have a lift, and the number of the others."""
    lines = experience_lines(s, width)
    others = without_lift(s)
    return [*lines, *([others] if others else [])]


def _notes(s: Snapshot, height: int) -> LineGroup:
    """Return the last notes.

    If there are experiences too, the notes leave most of the space to them.
    """
    texts = [printable(line.expandtabs(4)) for line in s.notes[-height:]]
    if s.experiences:
        texts = texts[-max(1, (height - 14) // 6) :]
    if height >= TALL_HEIGHT:
        return LineGroup([Text(text) for text in texts], title="notes", tail=True)
    return LineGroup(
        [Text.assemble(("note".ljust(LABEL_WIDTH), DIM), text) for text in texts], tail=True
    )

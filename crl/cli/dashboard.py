"""Live view of a run in the terminal.

`render` draws a snapshot and has no side effects. `Dashboard` shows it on the alternate screen.

Sections are arranged vertically. They receive lines in the order of `PRIORITY_ORDER`, so that a
small window leaves out the least important sections first. Texts of models, environments and users
are always shown as plain text with escapes.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, redirect_stderr, redirect_stdout
from functools import partial
from itertools import zip_longest
from typing import IO, NamedTuple, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from crl.cli.draw import (
    BAD,
    DIM,
    FREE,
    GOOD,
    GUIDED,
    LABEL_WIDTH,
    LineGroup,
    allocate_lines,
    bar,
    cell,
    duration,
    flow,
    format_number,
    one_line,
    sparkline,
)
from crl.intervals import plus_minus
from crl.monitor.snapshot import (
    HISTORY,
    Model,
    Probe,
    QueueMetrics,
    RateView,
    RunInfo,
    Series,
    Snapshot,
    SnapshotMonitor,
)
from crl.protocols import Metrics, Monitor
from crl.types import Experience, lift_order
from crl.wording import printable, printable_lines

REFRESH_PER_S = 4
"""Number of redraws per second."""

MAX_LINE_CHARS = 10_000
"""Maximum number of characters of one line. The rest is dropped."""

TWO_COLUMN_WIDTH = 76
"""Minimum width at which the metrics of the run are shown to the right of the models."""

TALL_HEIGHT = 30
"""Minimum height at which the models have further rows and the notes have a title."""

VALUE_WIDTH = 11
"""Width of a value in the table of models."""


class ModelRow(NamedTuple):
    """Row of the table of models."""

    label: str
    series: Callable[[Model], Series]
    spec: str
    """Format of the value."""
    trend: bool = True
    """True if a window that is wide enough shows the history."""


MODEL_ROWS = (
    ModelRow("loss", lambda m: m.loss, "+.4f"),
    ModelRow("ratio", lambda m: m.ratio.mean, ".4f"),
    ModelRow("clip", lambda m: m.ratio.clip_fraction, ".3f"),
    ModelRow("kl", lambda m: m.ratio.approx_kl, ".4f"),
    ModelRow("entropy", lambda m: m.entropy, ".3f"),
    ModelRow("lr", lambda m: m.updates.learning_rate, ".1e", trend=False),
    ModelRow("updates", lambda m: m.updates.count, ",.0f", trend=False),
    ModelRow("version", lambda m: m.updates.version, ",.0f", trend=False),
)
"""Rows that are always shown."""

EXTRA_ROWS = (
    ModelRow("reward", lambda m: m.reward, "+.3f"),
    ModelRow("mismatch", lambda m: m.ratio.mismatch_kl, ".4f"),
    ModelRow("train s", lambda m: m.updates.seconds, ",.1f"),
)
"""Rows that are only shown in a window of at least `TALL_HEIGHT` lines.

A row without values is not shown.
"""

TIME_PARTS = {
    "wait": ("░", "blue"),
    "prepare": ("▗", "green"),
    "submit": ("▖", "magenta"),
    "train": ("█", "green"),
    "sync": ("▓", "yellow"),
    "bank": ("▒", "magenta"),
    "eval": ("▚", "cyan"),
    "probe": ("▘", "cyan"),
}
"""Glyph and style of each part of a step's time, in the order in which the parts are drawn."""

OTHER_TIME_PART = ("▞", "white")
"""Glyph and style of all other parts."""

PRIORITY_ORDER = (
    "header",
    "success",
    "notes",
    "models",
    "time",
    "eval",
    "tasks",
    "experiences",
    "probe",
    "stats",
)
"""Order in which sections receive their minimum number of lines."""

GROWTH_ORDER = (
    "header",
    "success",
    "time",
    "eval",
    "tasks",
    "models",
    "stats",
    "probe",
    "notes",
    "experiences",
)
"""Order in which sections receive the remaining lines."""


# ── the snapshot ────────────────────────────────────────────────────────────────────────────────


def render(snapshot: Snapshot, width: int, height: int) -> Group:
    """Return a drawing of the snapshot in at most `height` lines of at most `width` cells."""
    models, stats = (
        _models(snapshot, width, height),
        LineGroup(list(_stats(snapshot, width)), min_lines=3, title="run"),
    )
    if width >= TWO_COLUMN_WIDTH:
        models, stats = _side_by_side(models, snapshot, width), LineGroup(())
    sections = {
        "header": LineGroup(list(_header(snapshot, width))),
        "success": LineGroup(list(_success(snapshot, width)), title="success"),
        "tasks": LineGroup(list(_tasks(snapshot, width))),
        "eval": LineGroup(list(_evals(snapshot, width))),
        "models": models,
        "stats": stats,
        "time": LineGroup(list(_time(snapshot, width)), min_lines=2),
        "probe": LineGroup(list(_probes(snapshot, width))),
        "experiences": LineGroup(
            _experiences(snapshot, width), title="experiences: retrieved, lift, task, text"
        ),
        "notes": _notes(snapshot, height),
    }
    line_counts = allocate_lines(sections, height, priority=PRIORITY_ORDER, growth=GROWTH_ORDER)
    lines = [
        line
        for name, section in sections.items()
        for line in section.draw(line_counts[name], width)
    ]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return Group(*lines)


def _header(s: Snapshot, width: int) -> Iterator[Text]:
    """Yield the title line and the progress bar."""
    name, tasks = one_line(s.run.name, width), one_line(", ".join(s.run.tasks), width)
    yield Text.assemble(
        ("crl ", DIM), (name, GOOD), "  ", (one_line(s.run.method, width), ""), (" on ", DIM), tasks
    )
    p, steps = s.progress, s.run.steps
    share = p.step / steps if steps else 1.0
    before = Text.assemble(("step ", DIM), (f"{p.step:,}/{steps:,}", GOOD), f" {share:4.0%} ")
    after = Text.assemble(
        " ", cell("elapsed", duration(p.elapsed)), "  ", cell("left", duration(p.remaining))
    )
    space = width - before.cell_len - after.cell_len
    filled = min(space, round(space * share))
    yield (
        Text.assemble(before, ("━" * filled, GUIDED), ("─" * (space - filled), DIM), after)
        if space >= 6
        else Text.assemble(before, after)
    )


def _success(s: Snapshot, width: int) -> Iterator[Text]:
    """Yield the success rates of the group halves, or of all episodes if none are guided."""
    r = s.rollout.success
    if r.guided.values:
        yield _rate(
            "guided",
            r.guided,
            width,
            GUIDED,
            "with experience",
            format_number(r.used.last, ".3f") if r.used.values else "",
        )
        yield _rate(
            "free",
            r.free,
            width,
            FREE,
            "gap",
            format_number(r.gap.last, "+.3f") if r.gap.values else "",
        )
    elif r.mean.values:
        yield _rate("episodes", r.mean, width, FREE)
    else:
        yield Text("before the first step", DIM)


def _tasks(s: Snapshot, width: int) -> Iterator[Text]:
    """Yield one line per task, if there are several: success rate, turns per episode, and the
    share of guided episodes that received an experience.
    """
    for name, task in s.rollout.tasks.items():
        label = Text(one_line(name, width))
        label.truncate(LABEL_WIDTH - 1, overflow="ellipsis")
        used = f"  used {format_number(task.used.last, '.0%')}" if task.used.values else ""
        yield _rate(
            label.plain,
            task.success,
            width,
            FREE,
            "turns",
            f"{format_number(task.turns.last, ',.1f')}{used}",
        )


def _rate(
    label: str, series: Series, width: int, style: str, name: str = "", more: str = ""
) -> Text:
    """Return a line with a success rate, its history and one further metric."""
    end = cell(name, more) if more else Text()
    space = min(HISTORY, width - LABEL_WIDTH - 7 - 2 - end.cell_len)
    history = sparkline(series, space, 0, 1)
    return Text.assemble(
        (label.ljust(LABEL_WIDTH), DIM),
        (format_number(series.last, ".3f").ljust(7), GOOD),
        (history, style),
        "  " if more else "",
        end,
    )


def _evals(s: Snapshot, width: int) -> Iterator[Text]:
    """Yield the last success rates of each eval set."""
    label = "eval"
    for name, found in s.evaluations.sets.items():
        cells = [
            Text(name),
            *(_interval(condition, rate, width) for condition, rate in found.rates.items()),
        ]
        yield from flow(
            label,
            [*cells, *([cell("after step", f"{found.step:,}")] if width >= 100 else [])],
            width,
        )
        label = ""


def _interval(condition: str, rate: RateView, width: int) -> Text:
    """Return a success rate of an evaluation with its interval.

    A wide window also shows the change since the first evaluation.
    """
    style = GUIDED if condition == "guided" else FREE
    interval = (
        f" [{format_number(rate.low, '.3f')}, {format_number(rate.high, '.3f')}]"
        if rate.low is not None
        else ""
    )
    change = (
        f" {rate.value - rate.first:+.3f}"
        if width >= 100 and rate.value is not None and rate.first is not None
        else ""
    )
    return Text.assemble(
        (f"{condition} ", DIM), (format_number(rate.value, ".3f"), style), interval, (change, GOOD)
    )


def _models(s: Snapshot, width: int, height: int) -> LineGroup:
    """Return a table with one column per trained model."""
    extractor = s.models.extractor
    models = {"actor": s.models.actor, **({"extractor": extractor} if extractor else {})}
    rows = [
        *MODEL_ROWS,
        *(
            row
            for row in EXTRA_ROWS
            if height >= TALL_HEIGHT and any(row.series(model).values for model in models.values())
        ),
    ]
    space = (
        (_left_width(width) if width >= TWO_COLUMN_WIDTH else width)
        - LABEL_WIDTH
        - len(models) * VALUE_WIDTH
    )
    trend = min(HISTORY, space // len(models) - 2)
    gap = trend + 2 if trend >= 6 else 0
    heading = Text.assemble(
        " " * LABEL_WIDTH,
        *((name.rjust(VALUE_WIDTH).ljust(VALUE_WIDTH + gap), "bold") for name in models),
    )
    lines = [heading]
    for row in rows:
        values = (
            _value_cells(row.series(model), row.spec, gap if row.trend else 0, gap)
            for model in models.values()
        )
        lines.append(Text.assemble((row.label.ljust(LABEL_WIDTH), DIM), *values))
    return LineGroup(lines if s.progress.step or extractor else (), min_lines=4)


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
    left_width = _left_width(width)
    stats = list(_stats(s, width - left_width - 3)) if models.lines else []
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
    if b := s.bank:
        yield "bank", [*_cells(("size", b.size, ",.0f")), Text(sparkline(b.size, 16))]
        yield (
            "ops",
            _cells(
                ("add", b.ops.added, ",.0f"),
                ("update", b.ops.updated, ",.0f"),
                ("return", b.ops.returned, ",.0f"),
                ("drop", b.ops.dropped, ",.0f"),
            ),
        )
        yield (
            "queue",
            [
                cell("size", format_number(b.queue.size, ",.0f"), GOOD),
                *_cells(("ready", b.ready, ",.0f")),
                *_undistilled(b.queue),
            ],
        )
        r = b.retrieval
        yield "retrieval", _cells(("hits", r.hit_rate, ".0%"), ("cached", r.cache_hits, ".0%"))
        yield "search ms", _cells(("p50", r.p50_ms, ".1f"), ("p95", r.p95_ms, ".1f"))
        yield (
            "lessons",
            _cells(("correct", b.correct, ".0%"), ("same goal", r.same_goal, ".0%")),
        )
    age, speed, errors = s.rollout.staleness, s.rollout.speed, s.rollout.errors.last
    yield "staleness", _cells(("mean", age.mean, ".2f"), ("max", age.max, ",.0f"))
    yield (
        "speed",
        _cells(
            ("tokens/s", speed.tokens_per_s, ",.0f"), ("episodes/s", speed.episodes_per_s, ",.1f")
        ),
    )
    if errors:
        yield "errors", [Text(f"{format_number(errors, ',.0f')} in the last step", BAD)]
    if s.bank and len(s.bank.size_by_task) > 1:
        yield (
            "by task",
            [
                cell(one_line(task, 200), format_number(size, ",.0f"))
                for task, size in s.bank.size_by_task.items()
            ],
        )


def _cells(*items: tuple[str, Series, str]) -> list[Text]:
    """Return cells with the last values.

    `items`: (name, series, format). Series without values are left out.
    """
    return [
        cell(name, format_number(series.last, spec), GOOD)
        for name, series, spec in items
        if series.values
    ]


def _undistilled(queue: QueueMetrics) -> list[Text]:
    """Return a cell with the number of dead requests, whose episodes are not distilled.

    Return no cell if the number is unknown.
    """
    dead = queue.dead.last
    return (
        [] if dead is None else [cell("dead", format_number(dead, ",.0f"), BAD if dead else GOOD)]
    )


def _time(s: Snapshot, width: int) -> Iterator[Text]:
    """Yield the parts of the last step's time as a bar, and its legend."""
    seconds = s.progress.seconds
    if not seconds:
        return
    total = Text.assemble(
        ("step time ", DIM), (f"{format_number(sum(seconds.values()), ',.1f')} s", GOOD), " "
    )
    parts = [
        (name, seconds[name], *TIME_PARTS.get(name, OTHER_TIME_PART))
        for name in sorted(seconds, key=_part_order)
    ]
    yield Text.assemble(
        total,
        bar(
            [(length, glyph, style) for _, length, glyph, style in parts],
            max(0, width - total.cell_len),
        ),
    )
    legend = [
        Text.assemble(
            (glyph, style), (f" {one_line(name, width)} ", DIM), format_number(length, ",.1f")
        )
        for name, length, glyph, style in parts
    ]
    yield from flow("", legend, width)


def _part_order(part: str) -> int:
    """Return the position of a part in the bar."""
    return list(TIME_PARTS).index(part) if part in TIME_PARTS else len(TIME_PARTS)


def _probes(s: Snapshot, width: int) -> Iterator[Text]:
    """Yield the success rates of the advice probe for each task."""
    cells = [
        Text.assemble(f"{one_line(task, width)} ", _advice(probe))
        for task, probe in s.evaluations.probes.items()
    ]
    yield from flow("advice", cells, width)


def _advice(p: Probe) -> Text:
    """Return the success rates without advice, with right and with wrong advice."""
    rates = (("none", p.none, ""), ("right", p.right, GUIDED), ("wrong", p.wrong, "red"))
    return Text("  ").join(
        cell(name, format_number(rate, ".3f"), style) for name, rate, style in rates
    )


def _experiences(s: Snapshot, width: int) -> list[Text]:
    """Return the experiences of the snapshot, the best lift first."""
    return [
        _experience(experience, width)
        for experience in sorted(s.experiences, key=lambda e: lift_order(e.counters.lift))
    ]


def _experience(e: Experience, width: int) -> Text:
    """Return a line with retrievals, lift, task and text of an experience."""
    lift = e.counters.lift
    style = ("", GUIDED, "red")[lift.sign] if lift else ""
    task = Text(one_line(e.task, width), DIM)
    task.truncate(12, overflow="ellipsis")
    return Text.assemble(
        f"{format_number(e.counters.retrieved, ',.0f', 6):>6} ",
        (f"{plus_minus(lift.mean, lift.half_width, 2) if lift else '–':>13}", style),
        "  ",
        task,
        "  ",
        one_line(e.text, 4 * width),
    )


def _notes(s: Snapshot, height: int) -> LineGroup:
    """Return the last notes.

    If there are experiences too, the notes leave most of the space to them.
    """
    texts = [printable(line[:MAX_LINE_CHARS].expandtabs(4)) for line in s.notes]
    if s.experiences:
        texts = texts[-max(1, (height - 18) // 6) :]
    if height >= TALL_HEIGHT:
        return LineGroup([Text(text) for text in texts], title="notes", tail=True)
    return LineGroup(
        [Text.assemble(("note".ljust(LABEL_WIDTH), DIM), text) for text in texts], tail=True
    )


# ── the screen ──────────────────────────────────────────────────────────────────────────────────


class Dashboard(Monitor):
    """`Monitor` that occupies the terminal from its first note or metrics line until `close`.

    Notes, and the output that Python code prints meanwhile, are buffered and printed after the
    terminal is restored. A separate thread draws. It only reads snapshots, so no call here waits
    for the terminal.

    `stream`: terminal to draw on, by default stdout. `clock`: returns the time in seconds.
    """

    def __init__(
        self,
        run: RunInfo,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = Console(
            file=stream or sys.stdout, force_terminal=True, force_interactive=True
        )
        self._run = SnapshotMonitor(run, clock=clock)
        self._live: Live | None = None
        self._redirected = ExitStack()
        self._buffered: list[tuple[IO[str], str]] = []
        self._closed = False

    def log(self, step: int, kind: str, metrics: Metrics) -> None:
        self._run.log(step, kind, metrics)
        self._start()

    def experiences(self, experiences: Sequence[Experience]) -> None:
        self._run.experiences(experiences)

    def note(self, text: str) -> None:
        self._buffer_text(self._console.file, text)
        self._start()

    def close(self) -> None:
        """Leave the alternate screen and print the buffered lines.

        Notes after that are printed immediately.
        """
        if self._closed:
            return
        try:
            if self._live:
                self._stop(self._live)
        finally:
            self._redirected.close()
            self._closed = True
            for stream, text in self._buffered:
                _write(stream, text)

    def _start(self) -> None:
        """Start drawing and redirect stdout and stderr. Do nothing if started or closed."""
        if self._live or self._closed:
            return
        self._live = Live(
            console=self._console,
            screen=True,
            get_renderable=self._frame,
            refresh_per_second=REFRESH_PER_S,
            vertical_overflow="crop",
            redirect_stdout=False,
            redirect_stderr=False,
        )
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream.isatty():  # output to a file does not disturb the screen
                lines = self._redirected.enter_context(
                    closing(LineStream(stream, partial(self._buffer_text, stream)))
                )
                self._redirected.enter_context(redirect(lines))
        self._live.start(refresh=True)

    def _frame(self) -> Group:
        """Return a drawing of the current snapshot."""
        return render(self._run.snapshot(), *self._console.size)

    def _stop(self, live: Live) -> None:
        """Stop drawing and restore the terminal."""
        try:
            live.stop()
        except BaseException:  # interrupted, now or while the screen was being opened
            self._console.set_alt_screen(False)
            self._console.show_cursor(True)
            raise

    def _buffer_text(self, stream: IO[str], text: str) -> None:
        """Buffer a text, or print it if the dashboard is closed."""
        if self._closed:
            _write(stream, text)
        else:
            self._buffered.append((stream, text))
            self._run.note(text)


def _write(stream: IO[str], text: str) -> None:
    """Print a text with escapes."""
    print(printable_lines(text), file=stream, flush=True)


class LineStream(io.TextIOBase):
    """Text stream that replaces `stream` and passes every complete line to `on_line`.

    Any thread may write. Of a line that was overwritten with carriage returns, such as a progress
    bar, only the last version is passed on.
    """

    def __init__(self, stream: IO[str], on_line: Callable[[str], None]) -> None:
        self._stream, self._on_line = stream, on_line
        self._partial_line = ""
        self._lock = threading.RLock()  # re-entrant: a finalizer may print a warning at any time

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str, /) -> int:
        """Pass on the complete lines and buffer the rest. Return the number of characters."""
        with self._lock:
            *lines, rest = (self._partial_line + text).split("\n")
            self._partial_line = rest[-MAX_LINE_CHARS:]
        for line in lines:
            self._on_line(line.rstrip("\r").rpartition("\r")[2])
        return len(text)

    def close(self) -> None:
        """Pass on the rest as a line."""
        if self._partial_line:
            self.write("\n")
        super().close()

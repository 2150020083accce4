"""Parts that several pages of the dashboard share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from crl.cli.draw import (
    DIM,
    FREE,
    GOOD,
    GUIDED,
    LABEL_WIDTH,
    bar,
    cell,
    flow,
    format_number,
    one_line,
    sparkline,
)
from crl.monitor.snapshot import HISTORY, Probe, RateView, Series, Snapshot
from crl.types import Experience
from crl.wording import lift_text

WIDE = 100
"""Minimum width of a window in which lines have further contents."""

VERY_NARROW = 60
"""Width of a window below which success rates of evaluations have no interval."""

BAR_WIDTH = 20
"""Width of the bar of a success rate."""

END_WIDTH = 22
"""Width for a further metric after a success rate, so that the histories of lines are aligned."""

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


@dataclass(frozen=True)
class Body:
    """Contents of a page. The window shows a part of the lines."""

    lines: Sequence[Text]
    pinned: Sequence[Text] = ()
    """Lines above the part that scrolls."""
    tail: bool = False
    """True if the last lines are shown first."""


def rule(title: str, width: int) -> Text:
    """Return a rule with a title."""
    return Text(f"── {title} ".ljust(width, "─"), DIM)


# ── success rates ─────────────────────────────────────────────────────────────────────────────────


def condition_lines(s: Snapshot, width: int, prefix: str = "rollout") -> Iterator[Text]:
    """Yield the success rates of the members of groups, guided and free on the same scale.

    Yield the success rate of all episodes if none are guided. `prefix`: start of the names of the
    metrics, such as rollout/room.
    """
    guided = s.series("train", f"{prefix}/success/guided")
    free = s.series("train", f"{prefix}/success/free")
    if guided.values:
        used, gap = s.last("train", f"{prefix}/success/used"), s.last("train", f"{prefix}/gap")
        half = s.last("train", f"{prefix}/gap/half_width")
        interval = f" ± {half:.3f}" if half is not None and width >= WIDE else ""
        yield rate_line(
            "guided", guided, width, GUIDED, cell("with experience", format_number(used, ".3f"))
        )
        end = cell("gap", f"{format_number(gap, '+.3f')}{interval}", GOOD)
        yield rate_line("free", free, width, FREE, end)
    elif (mean := s.series("train", f"{prefix}/success")).values:
        yield rate_line("episodes", mean, width, FREE)


def rate_line(label: str, series: Series, width: int, style: str, end: Text | None = None) -> Text:
    """Return a line with a success rate as a number, as a bar and with its history."""
    end = end or Text()
    value = series.last or 0.0
    bar_width = BAR_WIDTH if width >= 76 else 0
    filled = round(bar_width * min(1.0, max(0.0, value)))
    space = width - LABEL_WIDTH - 7 - bar_width - 3 - max(END_WIDTH, end.cell_len)
    history = sparkline(series, min(HISTORY, space), 0, 1)
    return Text.assemble(
        (label.ljust(LABEL_WIDTH), DIM),
        (format_number(series.last, ".3f").ljust(7), GOOD),
        ("━" * filled, style),
        ("─" * (bar_width - filled), DIM),
        " " if bar_width else "",
        (history, style),
        "  " if end.cell_len else "",
        end,
    )


def evaluation_lines(s: Snapshot, width: int, sets: Mapping[str, str]) -> Iterator[Text]:
    """Yield the last success rates of eval sets. `sets`: shown name by TASK/SPLIT."""
    wide, label = width >= WIDE, "eval"
    length = max(map(cell_len, sets.values()), default=0)
    for key, name in sets.items():
        found = s.evaluations.sets[key]
        cells = [_interval(condition, rate, width) for condition, rate in found.rates.items()]
        if wide:
            cells.append(cell("after step", f"{found.step:,}"))
        # The name and the first rate are one cell: a name alone says nothing.
        first = cells[0] if cells else Text()
        shown = Text(name + " " * (length - cell_len(name)))
        space = max(1, width - LABEL_WIDTH - 2 - first.cell_len)
        shown.truncate(min(length, space), overflow="ellipsis")
        yield from flow(label, [Text.assemble(shown, "  ", first), *cells[1:]], width)
        label = ""


def _interval(condition: str, rate: RateView, width: int) -> Text:
    """Return a success rate of an evaluation, with its interval unless the window is very narrow.

    A wide window also shows the change since the first evaluation.
    """
    wide = width >= WIDE
    style = GUIDED if condition in ("guided", "online") else FREE
    interval = (
        f" [{format_number(rate.low, '.3f')}, {format_number(rate.high, '.3f')}]"
        if rate.low is not None and width >= VERY_NARROW
        else ""
    )
    change = (
        f" {rate.value - rate.first:+.3f}"
        if wide and rate.value is not None and rate.first is not None
        else ""
    )
    name = one_line(condition, 20)
    return Text.assemble(
        (f"{name} ", DIM), (format_number(rate.value, ".3f"), style), interval, (change, GOOD)
    )


def advice(p: Probe) -> Text:
    """Return the success rates without advice, with right and with wrong advice."""
    rates = (("none", p.none, ""), ("right", p.right, GUIDED), ("wrong", p.wrong, "red"))
    return Text("  ").join(
        cell(name, format_number(rate, ".3f"), style) for name, rate, style in rates
    )


# ── time ──────────────────────────────────────────────────────────────────────────────────────────


def time_bar(s: Snapshot, width: int) -> Iterator[Text]:
    """Yield the parts of the last step's time as a bar, and its legend."""
    seconds = s.progress.seconds
    if not seconds:
        return
    total = Text.assemble(
        ("step time ", DIM), (f"{format_number(sum(seconds.values()), ',.1f')} s", GOOD), " "
    )
    parts = [(name, seconds[name], *glyph(name)) for name in sorted(seconds, key=part_order)]
    yield Text.assemble(
        total,
        bar([(length, mark, style) for _, length, mark, style in parts], width - total.cell_len),
    )
    legend = [
        Text.assemble(
            (mark, style), (f" {one_line(name, width)} ", DIM), format_number(length, ",.1f")
        )
        for name, length, mark, style in parts
    ]
    yield from flow("", legend, width)


def glyph(part: str) -> tuple[str, str]:
    """Return glyph and style of a part of the step's time."""
    return TIME_PARTS.get(part, OTHER_TIME_PART)


def part_order(part: str) -> int:
    """Return the position of a part in the bar."""
    return list(TIME_PARTS).index(part) if part in TIME_PARTS else len(TIME_PARTS)


# ── experiences ───────────────────────────────────────────────────────────────────────────────────

TASK_WIDTH = 12
"""Maximum width of the name of a task in a list of experiences."""

NARROW = 76
"""Width of a window below which a list of experiences has no names of tasks."""


def experience_title(width: int) -> str:
    """Return the title of a list of experiences."""
    if width < NARROW:
        return "recent experiences: retrieved, lift, goal, text"
    return "experiences of recent searches: retrieved, lift, task, goal, text"


def experience_lines(s: Snapshot, width: int) -> list[Text]:
    """Return the experiences of the snapshot, the best lift first."""
    names = [one_line(experience.task, TASK_WIDTH) for experience in s.experiences]
    task_width = min(TASK_WIDTH, max(map(cell_len, names), default=0))
    return [
        experience_line(experience, width, task_width if width >= NARROW else 0)
        for experience in s.experiences
    ]


def without_lift(s: Snapshot) -> Text | None:
    """Return a line with the number of experiences that have no lift. None if it is unknown."""
    size, known = s.last("bank", "bank/size"), s.last("bank", "bank/with_lift")
    if size is None or known is None or size <= known:
        return None
    return Text(f"{size - known:,.0f} of {size:,.0f} experiences of the bank have no lift yet", DIM)


def experience_line(e: Experience, width: int, task_width: int = TASK_WIDTH) -> Text:
    """Return a line with retrievals, lift, task, goal and text of an experience.

    `task_width`: width of the name of the task; 0 leaves it out.
    """
    lift = e.counters.lift
    style = ("", GUIDED, "red")[lift.sign] if lift else ""
    task = Text(one_line(e.task, width), DIM)
    task.truncate(task_width, overflow="ellipsis", pad=True)
    goal = Text(one_line(e.goal, width), DIM)
    goal.truncate(width // 4, overflow="ellipsis", pad=True)
    return Text.assemble(
        f"{format_number(e.counters.retrieved, ',.0f', 6):>6}  ",
        (f"{lift_text(lift):>20}", style),
        "  ",
        *((task, "  ") if task_width else ()),
        goal,
        "  ",
        one_line(e.text, 4 * width),
    )


# ── histories ─────────────────────────────────────────────────────────────────────────────────────


def history_table(
    rows: Sequence[tuple[str, Series]], width: int, *, label_width: int = 22
) -> Iterator[Text]:
    """Yield a heading and one line per metric: last value, history, smallest and largest value."""
    label_width = max(label_width, *(len(name) + 1 for name, _ in rows)) if rows else label_width
    label_width = min(label_width, width // 3)
    length = max((len(series.values) for _, series in rows), default=0)
    history = max(0, min(max(length, len("history")), width - label_width - 3 * 11 - 2))
    heading = "history".ljust(history) if history >= 8 else ""
    yield Text(f"{'metric':<{label_width}}{'last':>10}  {heading}{'min':>11}{'max':>11}", DIM)
    for name, series in rows:
        known = [value for value in series.values if value is not None]
        label = Text(one_line(name, width))
        label.truncate(label_width - 1, overflow="ellipsis", pad=True)
        ends = (min(known), max(known)) if known else (None, None)
        yield Text.assemble(
            (f"{label.plain} ", DIM),
            (number(series.last).rjust(10), GOOD),
            "  ",
            (sparkline(series, history).ljust(history) if history >= 8 else "", FREE),
            *(number(end).rjust(11) for end in ends),
        )


def number(value: float | None) -> str:
    """Return a number of any size in at most ten characters, or "–" for None."""
    if value is None:
        return "–"
    size = abs(value)
    if value == int(value) and size < 1e7:
        return f"{value:,.0f}"
    if 1e-3 <= size < 1e3:
        return f"{value:.4f}"
    return f"{value:,.1f}" if 1e3 <= size < 1e6 else f"{value:.2e}"

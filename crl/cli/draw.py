"""Elements of the dashboard: escaped text, numbers, sparklines, bars and sections."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rich.text import Text

from crl.monitor.snapshot import Series
from crl.wording import printable

LABEL_WIDTH = 10
"""Width of the label column."""

GUIDED, FREE, GOOD, BAD, DIM = "green", "cyan", "bold", "bold red", "dim"


# ── text ────────────────────────────────────────────────────────────────────────────────────────


def one_line(text: str, limit: int) -> str:
    """Return the first `limit` characters of a text on one line.

    White space is collapsed, and characters that are not printable are escaped.
    """
    return printable(" ".join(text[:limit].split()))


def format_number(value: float | None, spec: str, width: int = 11) -> str:
    """Return a number in the format `spec`, or with two digits if it is wider than `width`.

    Return "–" for None.
    """
    if value is None:
        return "–"
    text = format(value, spec)
    return text if len(text) <= width else format(value, ".1e")


def sparkline(
    series: Series, width: int, low: float | None = None, high: float | None = None
) -> str:
    """Return the last `width` values as block characters.

    `low` and `high` are the ends of the scale; by default, the smallest and the largest of the
    values.
    """
    values = series.values[-width:] if width > 0 else ()
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return blocks(values, min(known) if low is None else low, max(known) if high is None else high)


def blocks(values: Iterable[float | None], low: float, high: float) -> str:
    """Return values as block characters on the scale from `low` to `high`; None as a space."""
    return "".join(" " if value is None else _block(value, low, high) for value in values)


def _block(value: float, low: float, high: float) -> str:
    """Return the block character of a value on the scale from `low` to `high`."""
    # The values are halved because the difference of two finite numbers may be infinite.
    share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5
    return "▁▂▃▄▅▆▇█"[min(7, max(0, int(share * 8)))]


def bar(parts: Sequence[tuple[float, str, str]], width: int) -> Text:
    """Return a bar of `width` cells, divided in proportion to the sizes.

    `parts`: (size, glyph, style).
    """
    total = sum(size for size, _, _ in parts)
    edges = [
        round(width * (end / total)) if total > 0 else 0
        for end in accumulate((size for size, _, _ in parts), initial=0.0)
    ]
    return Text.assemble(
        *(
            (glyph * (end - begin), style)
            for (_, glyph, style), (begin, end) in zip(parts, pairwise(edges), strict=True)
        )
    )


def cell(name: str, value: str, style: str = "") -> Text:
    """Return a cell with a dim name and a value."""
    return Text.assemble((f"{name} " if name else "", DIM), (value, style))


def flow(label: str, cells: Iterable[Text], width: int) -> Iterator[Text]:
    """Yield lines with the label and the cells.

    A new line starts when the next cell does not fit.
    """
    line, indent = Text(label.ljust(LABEL_WIDTH), DIM), Text(" " * LABEL_WIDTH)
    empty = True
    for item in cells:
        if not empty and line.cell_len + 2 + item.cell_len > width:
            yield line
            line, empty = indent.copy(), True
        line = Text.assemble(line, "" if empty else "  ", item)
        empty = False
    if not empty:
        yield line


# ── sections ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class LineGroup:
    """Group of lines in the dashboard."""

    lines: Sequence[Text]
    """All lines of the section. If not all fit, `tail` decides which ones are shown."""
    min_lines: int = 1
    """Minimum number of lines. With less space, the section is not shown."""
    title: str = ""
    """Title of the rule above the lines. Empty = no rule."""
    tail: bool = False
    """True if the last lines are shown instead of the first ones."""

    def screen_lines(self, lines: int) -> int:
        """Return the number of screen lines for `lines` lines of the section and its rule."""
        return lines + bool(self.title) if lines else 0

    def draw(self, lines: int, width: int) -> Iterator[Text]:
        """Yield the rule and `lines` lines of the section."""
        if lines and self.title:
            yield Text(f"── {self.title} ".ljust(width, "─"), DIM)
        yield from self.lines[len(self.lines) - lines :] if self.tail else self.lines[:lines]


def allocate_lines(
    sections: Mapping[str, LineGroup],
    height: int,
    *,
    priority: Sequence[str],
    growth: Sequence[str],
) -> dict[str, int]:
    """Return the number of lines that each section shows.

    All sections together fit into `height` screen lines. `priority`: order in which sections
    receive their minimum. `growth`: order in which shown sections receive the remaining lines.
    """
    line_counts = dict.fromkeys(sections, 0)
    for name in priority:
        section = sections[name]
        min_lines = min(section.min_lines, len(section.lines))
        if section.screen_lines(min_lines) <= height:
            line_counts[name] = min_lines
            height -= section.screen_lines(min_lines)
    for name in growth:
        more = (
            min(height, len(sections[name].lines) - line_counts[name]) if line_counts[name] else 0
        )
        line_counts[name] += more
        height -= more
    return line_counts

"""What the dashboard is drawn with: plain text made safe, numbers, sparklines, bars, and sections that share out a window's lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rich.text import Text

from crl.monitor.snapshot import Series

LABEL = 10
"""Width of the column of labels."""

GUIDED, FREE, GOOD, BAD, DIM = "green", "cyan", "bold", "bold red", "dim"


# ── text ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def printable(line: str) -> str:
    """`line` with an escape in place of every character that a terminal would obey or hide."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def one_line(text: str, limit: int) -> str:
    """The first `limit` characters of `text` or so, on one line and printable."""
    return printable(" ".join(text[:limit].split()))


def figure(value: float | None, form: str, width: int = 11) -> str:
    """A number in `form`, or in few digits where that is wider than `width`; – where there is none."""
    if value is None:
        return "–"
    text = format(value, form)
    return text if len(text) <= width else format(value, ".1e")


def duration(seconds: float | None) -> str:
    """1:02:03, or – when it is not known."""
    if seconds is None:
        return "–"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def spark(series: Series, width: int, low: float | None = None, high: float | None = None) -> str:
    """The last `width` values as blocks between `low` and `high`, which are the values' own extremes unless given."""
    values = series.values[-width:] if width > 0 else ()
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = min(known) if low is None else low, max(known) if high is None else high
    return "".join(" " if value is None else _block(value, low, high) for value in values)


def _block(value: float, low: float, high: float) -> str:
    share = (
        (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5
    )  # halves: the difference of finite numbers may not be
    return "▁▂▃▄▅▆▇█"[min(7, max(0, int(share * 8)))]


def bar(parts: Sequence[tuple[float, str, str]], width: int) -> Text:
    """`width` cells shared out in proportion to (size, glyph, style)."""
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
    return Text.assemble((f"{name} " if name else "", DIM), (value, style))


def flow(label: str, cells: Iterable[Text], width: int) -> Iterator[Text]:
    """The cells after a label, in as many lines as it takes."""
    line, indent = Text(label.ljust(LABEL), DIM), Text(" " * LABEL)
    empty = True
    for item in cells:
        if not empty and line.cell_len + 2 + item.cell_len > width:
            yield line
            line, empty = indent.copy(), True
        line = Text.assemble(line, "" if empty else "  ", item)
        empty = False
    if not empty:
        yield line


# ── sections ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Section:
    """Lines that belong together, below a rule when there is a title. Of fewer than `least` lines nothing is shown; the lines
    that are shown are the first ones, or with `tail` the last ones."""

    lines: Sequence[Text]
    least: int = 1
    title: str = ""
    tail: bool = False

    def cost(self, lines: int) -> int:
        """Lines of the screen for so many of its own."""
        return lines + bool(self.title) if lines else 0

    def draw(self, lines: int, width: int) -> Iterator[Text]:
        if lines and self.title:
            yield Text(f"── {self.title} ".ljust(width, "─"), DIM)
        yield from self.lines[len(self.lines) - lines :] if self.tail else self.lines[:lines]


def share_out(
    sections: Mapping[str, Section], height: int, *, weight: Sequence[str], growth: Sequence[str]
) -> dict[str, int]:
    """How many of its lines each section shows, in `height` lines together. weight: who gets its least lines first; growth: who gets
    more of what is left then."""
    shown = dict.fromkeys(sections, 0)
    for name in weight:
        section = sections[name]
        least = min(section.least, len(section.lines))
        if section.cost(least) <= height:
            shown[name] = least
            height -= section.cost(least)
    for name in growth:
        more = min(height, len(sections[name].lines) - shown[name]) if shown[name] else 0
        shown[name] += more
        height -= more
    return shown

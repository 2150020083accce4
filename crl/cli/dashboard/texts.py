"""Pages "episode" and "log": texts, which are wrapped at the width of the window."""

from __future__ import annotations

from functools import lru_cache
from textwrap import wrap

from rich.cells import cell_len, chop_cells
from rich.text import Text

from crl.cli.dashboard.parts import Body, rule
from crl.cli.draw import DIM, GOOD
from crl.cli.runs.episode_text import outcome, replay_lines
from crl.monitor.snapshot import Episodes, Snapshot
from crl.wording import printable

WARNING_LINES = 5
"""Maximum number of lines of warnings above the log."""


def episode(s: Snapshot, width: int, height: int, member: int) -> Body:
    """Return the page of a member of the last group of training episodes.

    `member` is taken modulo the number of members.
    """
    if not s.episodes.members:
        return Body([Text("No training episode is finished yet.", DIM)])
    return _episode(s.episodes, member % len(s.episodes.members), width)


@lru_cache(maxsize=4)
def _episode(episodes: Episodes, member: int, width: int) -> Body:
    marks = Text()
    for number, trajectory in enumerate(episodes.members):
        result = outcome(trajectory.success, trajectory.error, trajectory.truncated)
        style = "reverse" if number == member else GOOD if trajectory.success else ""
        marks.append(f" {trajectory.condition} {result.split(',')[0]} ", style)
    marks.truncate(width, overflow="ellipsis")
    lines = [
        part for line in replay_lines(episodes.members[member], width) for part in _cut(line, width)
    ]
    return Body(lines, pinned=[marks])


def log(s: Snapshot, width: int, height: int) -> Body:
    """Return the page with the warnings and the notes."""
    pinned: list[Text] = []
    if s.warnings:
        lines = [part for text in s.warnings for part in _wrapped(text, width)]
        pinned = [
            rule("warnings", width),
            *(Text(line, "yellow") for line in lines[-WARNING_LINES:]),
            rule("log", width),
        ]
    notes = [Text(part) for line in s.notes for part in _wrapped(line, width)]
    return Body(notes or [Text("The log is empty.", DIM)], pinned=pinned, tail=True)


def _cut(line: Text, width: int) -> list[Text]:
    """Return a line with one style as lines of at most `width` cells."""
    style = line.style
    return [Text(part, style) for part in _wrapped(line.plain, width)] or [Text()]


@lru_cache(maxsize=4096)
def _wrapped(line: str, width: int) -> tuple[str, ...]:
    """Return a line with escapes as lines of at most `width` cells."""
    text = printable(line.expandtabs(4))
    if cell_len(text) <= width:
        return (text,)
    if text.isascii():
        indent = " " * min(width // 4, len(text) - len(text.lstrip()))
        return tuple(wrap(text, width, subsequent_indent=indent, break_on_hyphens=False) or [""])
    return tuple(chop_cells(text, width))

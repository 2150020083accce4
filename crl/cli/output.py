"""Output of commands that list things: tables, JSON, and the options for both.

Modules that need more than typer are imported inside the functions.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crl.wording import printable

if TYPE_CHECKING:
    from crl.evaluation.comparison import RunResult

AsJson = Annotated[bool, typer.Option("--json", help="Print all fields, as JSON.")]
Limit = Annotated[int, typer.Option(metavar="N", min=0, help="Maximum number of rows; 0 = all.")]

LEFT_ALIGNED = frozenset(
    {
        "uid",
        "task",
        "split",
        "condition",
        "mode",
        "lesson",
        "last lesson",
        "status",
        "goal",
        "text",
        "state",
        "episode",
        "guided by",
        "outcome",
        "reason",
        "how",
        "by",
        "answer",
        "when",
        "arms",
        "interval",
        "model",
        "profile",
        "directory",
    }
)
"""Columns of text, which are aligned on the left. All other columns contain numbers."""


def terminal_width() -> int | None:
    """Return the width of the terminal.

    Return None if the output is not a terminal; then nothing is cut.
    """
    return shutil.get_terminal_size().columns if sys.stdout and sys.stdout.isatty() else None


def is_terminal() -> bool:
    """Return whether stdout is a terminal that supports control sequences and Unicode."""
    if sys.stdout is None:  # closed before the start
        return False
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    return (
        sys.stdout.isatty()
        and unicode
        and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    )


def print_lines(lines: Iterable[str]) -> None:
    """Print lines, with an escape for every character that is not printable."""
    for line in lines:
        typer.echo(printable(line))


def warn_of_damage(metrics: Path, lines: int) -> None:
    """Warn on stderr if a file of metrics has damaged lines."""
    from crl.monitor.files import damage_text

    if lines:
        typer.echo(f"warning: {printable(str(metrics))}: {damage_text(lines)}", err=True)


def warn_of_repeated_seeds(runs: Sequence[RunResult]) -> None:
    """Warn on stderr if runs that are pooled have equal seeds."""
    from crl.evaluation.comparison import repeated_seeds

    for text in repeated_seeds(runs):
        typer.echo(f"warning: {printable(text)}", err=True)


def report_count(shown: int, total: int) -> None:
    """Report on stderr if rows were left out or if there are none."""
    if shown < total:
        typer.echo(f"showing {shown:,} of {total:,}; use --limit 0 for all", err=True)
    if not total:
        typer.echo("no results", err=True)


def print_json(value: Any) -> None:
    """Print a value as one line of JSON. Characters that are not printable are escaped."""
    typer.echo(json_text(value))


def json_text(value: Any) -> str:
    """Return a value as one line of JSON. Characters that are not printable are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return (
        text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)
    )


def _escape(character: str) -> str:
    """Return the JSON escape of a character."""
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


def table(
    columns: Mapping[str, Sequence[str]], width: int | None, *, optional: Sequence[str] = ()
) -> list[str]:
    """Return a header line and one line per row. `columns`: cells by column name.

    `width`: maximum number of terminal cells in a line. Only the last two columns are cut, and
    together they keep at least `MIN_CUT` cells. None: nothing is cut. `optional`: columns that are
    left out, in this order, while the lines are too long. A table cell wider than `MAX_PADDED`
    terminal cells is longer than its column.
    """
    from rich.cells import cell_len

    from crl.cli.draw import one_line

    cells = {
        name: [name, *(one_line(cell, len(cell)) for cell in column)]
        for name, column in columns.items()
    }
    widths = {
        name: max(min(cell_len(cell), MAX_PADDED) for cell in column)
        for name, column in cells.items()
    }
    cut: dict[str, int] = {}
    if width is not None:
        for name in optional:
            if _available(widths, width) < MIN_CUT and name in widths:
                del cells[name], widths[name]
        second, last = list(widths)[-2:]
        available = max(MIN_CUT, _available(widths, width))
        wanted = max(available - widths[last], available * 2 // 5)
        cut[second] = min(widths[second], wanted)
        cut[last] = min(widths[last], available - cut[second])
    padded = [
        [
            _padded(
                _cut(cell, cut[name]) if name in cut else cell,
                cut.get(name, widths[name]),
                left=name in LEFT_ALIGNED,
            )
            for cell in column
        ]
        for name, column in cells.items()
    ]
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


MIN_CUT = 20
"""Minimum number of cells of the two columns of a table that are cut."""

MAX_PADDED = 500
"""Maximum width to which a table cell is padded, in terminal cells."""


def _available(widths: Mapping[str, int], width: int) -> int:
    """Return the number of cells that are left for the last two columns of a table."""
    return width - sum(list(widths.values())[:-2]) - 2 * (len(widths) - 1)


def _cut(text: str, width: int) -> str:
    """Return a text of at most `width` cells, cut with an ellipsis."""
    from rich.cells import cell_len, set_cell_size

    return set_cell_size(text, width - 1) + "…" if cell_len(text) > width else text


def _padded(text: str, width: int, *, left: bool) -> str:
    """Return a text of at least `width` cells. `left`: the text is on the left of the spaces."""
    from rich.cells import cell_len

    padding = " " * (width - cell_len(text))
    return text + padding if left else padding + text


def filled(parts: Iterable[str], width: int | None, separator: str = " ") -> list[str]:
    """Return lines of at most `width` terminal cells that hold as many parts as fit.

    A longer part has its own line. `width` = None: all parts are on one line.
    """
    from rich.cells import cell_len

    lines: list[str] = []
    for part in parts:
        added = f"{lines[-1]}{separator}{part}" if lines else part
        if lines and (width is None or cell_len(added) <= width):
            lines[-1] = added
        else:
            lines.append(part)
    return lines


def wrapped(line: str, width: int | None) -> list[str]:
    """Return a line, broken between words to `width` cells. Later lines are indented."""
    if width is None or len(line) <= width // 2:  # a character has at most two cells
        return [line]
    first, *others = filled(line.split(" "), width - 2)
    return [first, *(f"  {other}" for other in others)]


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to stdout. Nothing is cut."""
    columns = {name: [row[number] for row in rows] for number, name in enumerate(head)}
    print_lines(table(columns, None))

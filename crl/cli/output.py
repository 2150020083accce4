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
from typing import Annotated, Any

import typer

from crl.wording import printable

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


def table(columns: Mapping[str, Sequence[str]], width: int | None) -> list[str]:
    """Return a header line and one line per row. `columns`: cells by column name.

    `width`: maximum number of terminal cells in a line. Only the last two columns are cut, and
    together they keep at least 20 cells. None: nothing is cut.
    """
    from rich.cells import cell_len

    from crl.cli.draw import one_line

    cells = [
        [name, *(one_line(cell, len(cell)) for cell in column)] for name, column in columns.items()
    ]
    widths = [max(map(cell_len, column)) for column in cells]
    if width is not None:
        *fixed, second, last = widths
        available = max(20, width - sum(fixed) - 2 * (len(widths) - 1))
        second = min(second, max(available - last, available * 2 // 5))
        widths = [*fixed, second, min(last, available - second)]
    padded = [
        [_fitted(cell, width, name in LEFT_ALIGNED) for cell in column]
        for name, column, width in zip(columns, cells, widths, strict=True)
    ]
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def _fitted(text: str, width: int, left: bool) -> str:
    """Return a text of exactly `width` cells: cut with an ellipsis, or padded with spaces."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) > width:
        return set_cell_size(text, width - 1) + "…"
    padding = " " * (width - cell_len(text))
    return text + padding if left else padding + text


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to stdout. Nothing is cut."""
    columns = {name: [row[number] for row in rows] for number, name in enumerate(head)}
    print_lines(table(columns, None))

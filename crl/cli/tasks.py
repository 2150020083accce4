"""Command `crl tasks`.

Modules that need more than typer are imported inside the command.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from crl.cli.command import command
from crl.cli.output import filled, print_lines, terminal_width

if TYPE_CHECKING:
    from crl.planning.installed import TaskInfo


@command
def list_tasks(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """List the tasks that can be played.

    For all other tasks, the missing requirements are printed.
    """
    from crl.planning.installed import gem_problem, mixtures, task_infos

    infos, mixed, gem = task_infos(), mixtures(), gem_problem()
    if as_json:
        typer.echo(
            json.dumps(
                {"tasks": [asdict(info) for info in infos], "mixtures": mixed, "gem": gem},
                indent=2,
            )
        )
        return
    rows = [["task", "environment", "hosting", "turns", ""], *(_row(info) for info in infos)]
    rows += [[name, "", "", "", f"mixture of {', '.join(tasks)}"] for name, tasks in mixed.items()]
    rows.append(
        [
            "your own",
            "gem:ID",
            "processes",
            "",
            gem or "any GEM environment, in your own task file",
        ]
    )
    rows.append(["", "FILE.py:NAME", "threads", "", "your own environment; crl new-task NAME"])
    print_lines(_lines(rows, terminal_width()))


def _lines(rows: Sequence[Sequence[str]], width: int | None) -> Iterator[str]:
    """Yield aligned lines. The last cell is broken between words to `width` terminal cells."""
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    indent = sum(widths) + 2 * len(widths)
    left = None if width is None else max(20, width - indent)
    for row in rows:
        head = "".join(f"{cell:<{size}}  " for cell, size in zip(row, widths, strict=False))
        first, *others = filled(row[-1].split(" "), left)
        yield f"{head}{first}".rstrip()
        yield from (f"{'':<{indent}}{other}" for other in others)


def _row(info: TaskInfo) -> list[str]:
    """Return the row of a task."""
    turns = ", ".join(f"{n} {rendering}" for rendering, n in info.turns.items())
    return [info.name, info.environment, info.hosting, turns, info.problem or info.data or ""]

"""Command `crl tasks`.

Modules that need more than typer are imported inside the command.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from crl.cli.command import command

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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def _row(info: TaskInfo) -> list[str]:
    """Return the row of a task."""
    turns = ", ".join(f"{n} {rendering}" for rendering, n in info.turns.items())
    return [info.name, info.environment, info.hosting, turns, info.problem or info.data or ""]

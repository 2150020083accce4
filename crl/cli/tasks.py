"""Commands `crl tasks` and `crl play`.

Modules that need more than typer are imported inside the commands.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, cast

import typer

from crl.cli.command import chosen, command, metavar
from crl.wording import counted

if TYPE_CHECKING:
    from crl.envs.base import PlayedEpisode, Rendering
    from crl.planning.installed import TaskInfo
    from crl.types import Split


class RenderingName(StrEnum):
    """Renderings of an environment."""

    full, compact = "full", "compact"


class SplitName(StrEnum):
    """Splits of a task's episodes."""

    train, seen, unseen = "train", "seen", "unseen"


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


@command
def play(
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="A task's name, or the path of its TOML file.")
    ],
    rendering: Annotated[
        str,
        typer.Option(
            metavar=metavar(RenderingName),
            help="Rendering for language models (full) or for the bundled tiny models.",
        ),
    ] = RenderingName.full,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="Seed of the run whose tasks are played.")
    ] = 0,
    split: Annotated[
        str,
        typer.Option(
            metavar=metavar(SplitName), help="Training tasks, or the tasks of an eval set."
        ),
    ] = SplitName.train,
    episodes: Annotated[int, typer.Option(metavar="N", min=1, help="Number of tasks to play.")] = 1,
    scripted: Annotated[
        bool, typer.Option("--scripted", help="Let the environment's scripted player play.")
    ] = False,
) -> None:
    """Play a task yourself with the actor's view. One line of input is one action."""
    from crl.cli.play import HumanPlayer, PlayableTask

    rendering_name = chosen(RenderingName, "--rendering", rendering)
    split_name = chosen(SplitName, "--split", split)
    playable = PlayableTask.load(task, cast("Rendering", rendering_name.value))
    player = playable.scripted_player(seed) if scripted else HumanPlayer(_read)
    won: list[bool] = []
    try:
        tasks_of = cast("Split", split_name.value)
        for played in playable.episodes(tasks_of, episodes, seed, player, _show):
            won.append(played.success)
            typer.echo(_outcome(played))
    except EOFError:
        typer.echo("\nstopped")
    except KeyboardInterrupt:
        typer.echo("\nstopped")
        raise
    finally:
        if episodes > 1:
            typer.echo(f"won {sum(won)} of {counted(len(won), 'episode')}")


def _read() -> str:
    """Read one action from stdin. Raise `EOFError` at its end."""
    line = input("> ")
    if not sys.stdin.isatty():
        typer.echo(line)  # a terminal has already shown the input
    typer.echo()
    return line


def _show(text: str) -> None:
    """Print a text with escapes, followed by an empty line."""
    from crl.cli.draw import printable

    typer.echo("\n".join(printable(line.expandtabs()) for line in text.split("\n")) + "\n")


def _outcome(played: PlayedEpisode) -> str:
    """Return the result of an episode in words."""
    turns = counted(len(played.actions), "turn")
    outcome = "won" if played.success else "lost" if played.done else "turn limit reached: lost"
    return f"{outcome} in {turns}, reward {played.reward:g}"

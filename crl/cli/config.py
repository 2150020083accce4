"""Commands `crl config`: settings, their meaning and their origins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from crl.cli import completion
from crl.cli.command import Command, MethodOption, command

app = typer.Typer(help="Show and explain settings.", no_args_is_help=True, rich_markup_mode=None)


@app.command(cls=Command)
@command
def show(
    tasks: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            autocompletion=completion.tasks,
            help="Tasks: names, or paths of TOML files.",
        ),
    ],
    preset: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            autocompletion=completion.presets,
            help="Preset: a name, or the path of a TOML file.",
        ),
    ] = "cpu",
    method: MethodOption = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            autocompletion=completion.assignments,
            help="Override a setting. Repeatable.",
        ),
    ] = None,
) -> None:
    """Print the resolved settings of a run.

    Each line ends with the origin of the value.
    """
    from crl.config.layers import leaves
    from crl.config.load import resolve

    options = {"method": method} if method else {}
    config, origins = resolve(tasks.split(","), preset=preset, options=options, sets=sets or ())
    rows = [
        (f"{key} = {json.dumps(value, ensure_ascii=False)}", origins.get(key, "default"))
        for key, value in leaves(config.model_dump(mode="json"))
    ]
    for setting, origin in rows:
        typer.echo(f"{setting:<60}  # {_short(origin)}")


def _short(origin: str) -> str:
    """Return an origin without the folder of a file."""
    return Path(origin).name if origin.endswith(".toml") else origin


@app.command(cls=Command)
@command
def explain(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY", help="Example: actor.clip_low", autocompletion=completion.keys
        ),
    ],
    method: MethodOption = None,
) -> None:
    """Explain one setting.

    The output contains its type, default and meaning, and the values that bundled presets, methods
    and tasks give it.
    """
    from crl.config.reference import explained

    setting, changes = explained(key, method)
    typer.echo(f"{setting.key}\n  type     {setting.type}\n  default  {setting.default}\n")
    typer.echo(setting.description)
    if changes:
        typer.echo("\nset by")
        for change in changes:
            typer.echo(f"  {change.origin:<34} {change.value}")


@app.command(cls=Command)
@command
def reference() -> None:
    """Print all settings as Markdown.

    The output is docs/configuration.md.
    """
    from crl.config.reference import markdown

    typer.echo(markdown(), nl=False)

"""Command `crl doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from crl.cli import completion
from crl.cli.command import command


@command
def doctor(
    preset: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            autocompletion=completion.presets,
            help="Preset to check for: a name, or the path of a TOML file.",
        ),
    ] = "cpu",
    report: Annotated[
        bool,
        typer.Option("--report", help="Print the information for a bug report, without secrets."),
    ] = False,
) -> int:
    """Check whether this machine can train.

    The checks cover versions, GPUs, models, disk space and limits. The exit code is 1 if the
    machine cannot train.
    """
    from crl.planning import doctor as checks

    found = checks.diagnose(preset)
    typer.echo(checks.report(found) if report else "\n".join(map(str, found)))
    return 1 if checks.failed(found) else 0

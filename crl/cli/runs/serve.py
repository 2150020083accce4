"""Command `crl serve`: pages about runs in a browser.

Modules that need more than typer are imported inside the command.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from crl.cli import completion
from crl.cli.command import command

PORT = 8300
"""Default port."""


@command
def serve(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="Directory of a run, or a directory with runs.",
            autocompletion=completion.folders_of_runs,
        ),
    ],
    port: Annotated[int, typer.Option(metavar="N", help="Port; 0 takes a free one.")] = PORT,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen on. All but local addresses need the printed token.",
        ),
    ] = "127.0.0.1",
    write: Annotated[
        bool, typer.Option("--write", help="Allow the pages to change banks, after a confirmation.")
    ] = False,
) -> None:
    """Show runs in a browser, live. The runs are not disturbed."""
    from crl.serve.server import serve as run
    from crl.serve.site import Site

    def show(address: str) -> None:
        typer.echo(f"{address}  (Ctrl-C ends the server)")

    with suppress(KeyboardInterrupt):  # Ctrl-C ends the server
        run(Site(path, write=write), host, port, show)

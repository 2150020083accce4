"""Command `crl report`: one HTML file about runs.

Modules that need more than typer are imported inside the command.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from crl.cli import completion
from crl.cli.command import command
from crl.cli.output import print_lines, warn_of_repeated_seeds
from crl.errors import ConfigError


@command
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Directories of runs.", autocompletion=completion.runs
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to write (default for one run: RUN/report.html)."),
    ] = None,
) -> None:
    """Write a report on runs as one HTML file, which needs no network.

    Runs may be under way. Those whose settings agree but for the seed are averaged.
    """
    from crl.report.document import report as render
    from crl.report.run_record import read_runs

    records = read_runs(runs)
    if out is None and len(runs) > 1:
        remedy = "Give a file, for example --out report.html"
        raise ConfigError("--out", None, "is required for several runs", remedy)
    file = out or runs[0] / "report.html"
    warn_of_repeated_seeds([record.result for record in records])
    text = render(records)
    try:
        file.write_text(text, "utf-8", errors="backslashreplace")
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise ConfigError("--out", str(file), reason, "Choose another file") from error
    print_lines([f"{file} ({math.ceil(len(text.encode()) / 2**10):,} KiB)"])

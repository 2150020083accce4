"""Picture of the dashboard at the end of a run, as an SVG file.

    python tools/dashboard_svg.py runs/mine docs/images/dashboard.svg

The files of the run are read. The picture has no notes.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from crl.cli.command import command
from crl.cli.dashboard.follow import DashboardFollower
from crl.cli.dashboard.frame import PAGES, View, draw
from crl.cli.dashboard.screen import TRAIN_KEYS
from crl.monitor.snapshot import Snapshot

WIDTH, HEIGHT = 112, 45
"""Size of the drawn window, in cells."""


def final_snapshot(run: Path) -> Snapshot:
    """Return the contents of the dashboard after the last line of the run's metrics."""
    follower = DashboardFollower(run)
    follower.update()
    s = follower.snapshot()
    return replace(s, notes=(), progress=replace(s.progress, status=""))


def picture(snapshot: Snapshot, page: int) -> str:
    """Return the drawing of a page as SVG."""
    console = Console(
        file=io.StringIO(),
        record=True,
        width=WIDTH,
        height=HEIGHT,
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
        _environ={},
    )
    console.print(draw(snapshot, View(page=page), WIDTH, HEIGHT, TRAIN_KEYS)[0])
    drawing = console.export_svg(title="crl train", unique_id="dashboard")
    # A browser would load these fonts from another server.
    return re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL)


@command
def main(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="SVG file of the picture.")],
    page: Annotated[
        int, typer.Option(metavar="N", min=1, max=len(PAGES), help="Number of the page.")
    ] = 1,
) -> None:
    """Draw the dashboard at the end of a run."""
    drawing = picture(final_snapshot(run), page - 1)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(drawing, "utf-8")


if __name__ == "__main__":
    typer.run(main)

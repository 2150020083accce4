"""Picture of the dashboard at the end of a run, as an SVG file.

    python tools/dashboard_svg.py runs/mine docs/images/dashboard.svg

The run's metrics.jsonl and bank.sqlite are read. The picture has no notes.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from crl.cli.command import command
from crl.cli.dashboard import render
from crl.config.load import load_saved
from crl.manager.inspection.reading import open_reader
from crl.monitor.files import RESERVED_FIELDS
from crl.monitor.run_dir import RunDir
from crl.monitor.snapshot import RunInfo, Snapshot, SnapshotMonitor
from crl.run.experience import REPORTED_EXPERIENCES
from crl.types import Experience

WIDTH, HEIGHT = 112, 45
"""Size of the drawn window, in cells."""


def final_snapshot(run: RunDir) -> Snapshot:
    """Return the contents of the dashboard after the last line of the run's metrics."""
    config = load_saved(run.path).config
    seconds = 0.0
    monitor = SnapshotMonitor(
        RunInfo(run.path.resolve().name, config.spec.name, tuple(config.tasks), config.run.steps),
        clock=lambda: seconds,
    )
    for line in run.metrics.read_text("utf-8").splitlines():
        record = json.loads(line)
        seconds = record["time"] or 0.0
        metrics = {name: value for name, value in record.items() if name not in RESERVED_FIELDS}
        monitor.log(record["step"], record["kind"], metrics)
    if run.bank.exists():
        monitor.experiences(latest_experiences(run.bank))
    return monitor.snapshot()


def latest_experiences(bank: Path) -> list[Experience]:
    """Return the experiences that a run reports: the most recently retrieved ones."""
    with open_reader(bank) as reader:
        entries = reader.entries()
    entries = sorted(reversed(entries), key=lambda entry: -(entry.counters.last_returned_step or 0))
    return [entry.experience for entry in entries[:REPORTED_EXPERIENCES]]


def picture(snapshot: Snapshot) -> str:
    """Return the drawing of a snapshot as SVG."""
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
    console.print(render(snapshot, WIDTH, HEIGHT))
    drawing = console.export_svg(title="crl train", unique_id="dashboard")
    # A browser would load these fonts from another server.
    return re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL)


@command
def main(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="SVG file of the picture.")],
) -> None:
    """Draw the dashboard at the end of a run."""
    drawing = picture(final_snapshot(RunDir(run)))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(drawing, "utf-8")


if __name__ == "__main__":
    typer.run(main)

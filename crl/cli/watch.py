"""Command `crl watch`: the dashboard of a run in another terminal, or of a run that has ended."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crl.cli import completion
from crl.cli.command import command

if TYPE_CHECKING:
    from crl.cli.dashboard.follow import DashboardFollower

POLL_S = 0.5
"""Seconds between two looks at the files of a run."""


@command
def watch(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Directory of a run.", autocompletion=completion.runs),
    ],
    plain: Annotated[
        bool, typer.Option("--plain", help="Print log lines instead of a dashboard.")
    ] = False,
) -> None:
    """Show the dashboard of a run that is under way or has ended. The run is not disturbed."""
    from crl.cli.dashboard.follow import DashboardFollower
    from crl.cli.output import is_terminal

    follower = DashboardFollower(run)
    if plain or not is_terminal():
        _print_lines(follower)
    else:
        _show(follower)


def _print_lines(follower: DashboardFollower) -> None:
    """Print notes and metrics until the run has ended."""
    from crl.monitor.plain import PlainMonitor

    lines = PlainMonitor(steps=follower.snapshot().run.steps)
    running = True
    while running:
        running = follower.running  # before the last look at the files
        follower.update(lines)
        if running:
            time.sleep(POLL_S)
    lines.note(follower.status)
    lines.close()


def _show(follower: DashboardFollower) -> None:
    """Show the dashboard until q or Ctrl-C is pressed."""
    from rich.console import Console

    from crl.cli.dashboard.frame import Keys
    from crl.cli.dashboard.screen import LiveScreen

    closed = threading.Event()
    keys = Keys("q quit", {"q, Ctrl-C": "close the dashboard; the run is not affected"})
    follower.update()
    screen = LiveScreen(Console(), follower.snapshot, keys=keys, on_quit=closed.set)
    screen.start()
    try:
        while not closed.wait(POLL_S):
            follower.update()
    except KeyboardInterrupt:
        pass  # a way to close the dashboard, like q
    finally:
        screen.stop()

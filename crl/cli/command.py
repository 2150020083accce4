"""How a command ends."""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import typer

from crl.errors import CrlError


def command(run: Callable[..., int | None]) -> Callable[..., None]:
    """Turns what a command raises or returns into the process's exit code; a `CrlError`, or what the system refuses, is one line on
    stderr."""

    @functools.wraps(run)
    def with_exit_code(*args: Any, **kwargs: Any) -> None:
        try:
            code = run(*args, **kwargs)
            if sys.stdout:  # None where it was closed
                sys.stdout.flush()
        except CrlError as error:
            _say(error)
            code = error.exit_code
        except OSError as error:
            if error.errno in (
                None,
                errno.EPIPE,
            ):  # of no system call; nobody reads on, which click knows
                raise
            _say(error)
            _give_up_output()
            code = 1
        except KeyboardInterrupt:
            code = 130
        raise typer.Exit(code or 0)

    return with_exit_code


def _say(error: Exception) -> None:
    from crl.cli.draw import printable

    typer.echo(f"error: {printable(' '.join(str(error).split()))}", err=True)


def _give_up_output() -> None:
    """Python would try to write what is left of it once more as it ends, and say that it failed."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

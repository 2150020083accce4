"""How a command ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer

from crl.errors import CrlError


def command(run: Callable[..., int | None]) -> Callable[..., None]:
    """Turns what a command raises or returns into the process's exit code; a `CrlError` is one line on stderr."""

    @functools.wraps(run)
    def with_exit_code(*args: Any, **kwargs: Any) -> None:
        try:
            code = run(*args, **kwargs)
        except CrlError as error:
            from crl.cli.draw import printable

            typer.echo(f"error: {printable(' '.join(str(error).split()))}", err=True)
            code = error.exit_code
        except KeyboardInterrupt:
            code = 130
        raise typer.Exit(code or 0)

    return with_exit_code

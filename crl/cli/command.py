"""Parts that all commands share: help, choices, exit codes and error messages."""

from __future__ import annotations

import errno
import functools
import re
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from crl.cli import completion
from crl.errors import ConfigError, CrlError, Interrupted
from crl.wording import printable

Choices = TypeVar("Choices", bound=StrEnum)

# ── options of the commands that read a run's settings ────────────────────────────────────────────

MethodOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        autocompletion=completion.methods,
        help=(
            "complementary (default), grpo, gigpo, empo2, reflexion, role_agent, or your own "
            "method: path/to/file.py:SPEC or package.module:SPEC."
        ),
    ),
]

Tasks = Annotated[
    str,
    typer.Option(
        metavar="A,B",
        autocompletion=completion.tasks,
        help="Tasks: names, or paths of TOML files.",
    ),
]
Preset = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        autocompletion=completion.presets,
        help="Preset to start from: a name, or the path of a TOML file.",
    ),
]
Seed = Annotated[
    int | None, typer.Option(metavar="N", help="Seed of all random numbers (default: 0).")
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        autocompletion=completion.assignments,
        help="Override a setting, e.g. rollout.groups=8. Repeatable; the last one wins, "
        "and it overrides other options.",
    ),
]


class Command(TyperCommand):
    """Command whose help shows an argument by its name, without braces and without its type."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]
        # A name such as RUN... already shows that it may be repeated.
        return [piece.replace("......", "...") for piece in pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        records = [(p.param_type_name, p.get_help_record(ctx)) for p in self.get_params(ctx)]
        arguments = [
            (record[0].partition(" <")[0], record[1])
            for kind, record in records
            if kind == "argument" and record
        ]
        options = [record for kind, record in records if kind == "option" and record]
        for title, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def command(run: Callable[..., int | None]) -> Callable[..., None]:
    """Return a command that ends the process with an exit code.

    The exit code is the value that `run` returns, or that of the `CrlError` that `run` raises, 1
    for an `OSError`, and 130 for Ctrl-C or SIGTERM. A `CrlError` or an `OSError` is printed as one
    line on stderr. Broken pipes and errors without a number are left to click.
    """

    @functools.wraps(run)
    def with_exit_code(*args: Any, **kwargs: Any) -> None:
        from crl.run.supervision.signals import sigterm_as_interrupt

        try:
            with sigterm_as_interrupt():
                code = run(*args, **kwargs)
            if sys.stdout:  # None if it was closed
                sys.stdout.flush()
        except CrlError as error:
            _print_error(error)
            code = error.exit_code
        except OSError as error:
            # Errors without a number come from no system call. A broken pipe means that the reader
            # has ended; click handles it.
            if error.errno in (None, errno.EPIPE):
                raise
            _print_error(error)
            from crl.monitor.plain import discard_unwritable

            discard_unwritable(sys.stdout)
            code = 1
        except Interrupted:
            code = 130
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            code = 130
        raise typer.Exit(code or 0)

    return with_exit_code


def chosen(choices: type[Choices], option: str, text: str) -> Choices:
    """Return the member of `choices` that `text` names.

    Raise `ConfigError` under `option` if there is none.
    """
    from crl.config.catalog import did_you_mean

    try:
        return choices(text)
    except ValueError:
        remedy = did_you_mean(text, list(choices))
        raise ConfigError(option, text, "is not one of the choices", remedy) from None


def metavar(choices: type[StrEnum]) -> str:
    """Return the names of all choices, for a help text."""
    return "|".join(choices)


def _print_error(error: Exception) -> None:
    """Print the error on stderr, as one line."""
    typer.echo(f"error: {printable(' '.join(str(error).split()))}", err=True)

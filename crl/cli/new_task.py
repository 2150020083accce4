"""Command `crl new-task`: files of a task with its own environment, to start from.

The files are rendered from the templates in crl/cli/templates/new_task. `NAME` in the file name of
a template stands for the name of the task.
"""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shlex
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from crl.cli.command import command
from crl.errors import ConfigError
from crl.wording import printable

TEMPLATES = Path(__file__).parent / "templates" / "new_task"

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@command
def new_task(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the task, such as hidden_number.")
    ],
    folder: Annotated[
        Path,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Directory in which the folder NAME is created. It may be new.",
        ),
    ] = Path(),
) -> None:
    """Create the files of a task of your own.

    The files are a task file, an environment and tests.
    """
    if "," in str(folder):
        raise ConfigError(
            "--dir",
            str(folder),
            "contains a comma, which separates the tasks of crl train --tasks A,B",
            "Give another directory, or run the command in this one without --dir",
        )
    new_folder = not folder.exists()
    files = write_task(name, folder)
    if new_folder:
        typer.echo(f"created {printable(str(folder))}")
    for path in files:
        typer.echo(f"wrote {printable(str(path))}")
    task = shlex.quote(str(folder / name / f"{name}.toml"))
    test = shlex.quote(str(folder / name / f"test_{name}.py"))
    commands = (
        f"crl play {task}",
        f"crl play {task} --scripted",
        f"pytest {test}",
        f"crl train --tasks {task} --dry-run",
    )
    typer.echo("\nnext commands:")
    for text in commands:
        typer.echo(f"  {printable(text)}")


def write_task(name: str, folder: Path) -> list[Path]:
    """Write the files of the new task `name` into `folder`/`name`. Return their paths.

    Raise `ConfigError` if the name cannot be used or if one of the files exists.
    """
    _require_usable(name)
    title = name.replace("_", " ").capitalize()
    files: dict[Path, str] = {}
    for template in sorted(TEMPLATES.iterdir()):
        path = folder / name / template.name.removesuffix(".txt").replace("NAME", name)
        files[path] = Template(template.read_text("utf-8")).substitute(name=name, title=title)
    for path in files:
        if os.path.lexists(path):
            raise ConfigError(
                "NAME",
                name,
                f"{path} exists, and crl new-task overwrites no file",
                "Choose another name or another --dir, or remove the file",
            )
    (folder / name).mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    return list(files)


def _require_usable(name: str) -> None:
    """Raise `ConfigError` if a new task and its Python module cannot have this name."""
    from crl.config.catalog import tasks
    from crl.config.schema import OVERALL

    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(
            "NAME",
            name,
            "is not a Python identifier in lower case",
            "Start with a letter, continue with letters, digits or underscores, and use no "
            "keyword of Python. Example: hidden_number",
        )
    if name in tasks():
        raise ConfigError(
            "NAME",
            name,
            "is the name of a bundled task",
            f"Choose a name other than {', '.join(tasks())}",
        )
    if name == OVERALL:
        raise ConfigError(
            "NAME", name, "is reserved for the aggregate over all tasks", "Choose another name"
        )
    module = importlib.util.find_spec(name)
    if module and module.origin:  # a folder without modules has no origin
        raise ConfigError(
            "NAME",
            name,
            f"is the name of a Python module, which {name}.py would hide from its tests",
            "Choose another name",
        )

"""Atomic writes of exports: the result is complete or nothing has changed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from crl.errors import ConfigError
from crl.manager.exchange.skills import PAGE, RECORDS

KEY = "--out"


def write_file(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a text file. Raise `ConfigError` if this fails, or if it exists without `overwrite`."""
    with _draft(path) as draft:
        draft.write_text(text, "utf-8", newline="\n")
        if os.path.lexists(path):
            if path.is_dir():
                raise _refused(path, "is a directory", "Give the path of a file")
            if not overwrite:
                reason = "the file already exists"
                raise _refused(path, reason, "Choose another path, or add --overwrite")
        draft.replace(path)


def write_skills_folder(path: Path, files: Mapping[str, str], *, overwrite: bool) -> None:
    """Write a directory of skills. `files`: contents by path, as `write_skills` returns them.

    Raise `ConfigError` if this fails, or if `path` is not empty without `overwrite`. With
    `overwrite`, a directory is replaced only if all its files are those of exported skills.
    """
    with _draft(path) as draft:
        for name, text in files.items():
            file = draft / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8", newline="\n")
        if not os.path.lexists(path):
            draft.rename(path)
            return
        if path.is_symlink() or not path.is_dir():
            raise _refused(path, "is not a directory", "Choose another path")
        if any(path.iterdir()):
            if not overwrite:
                reason = "the directory is not empty"
                raise _refused(path, reason, "Choose another path, or add --overwrite")
            _require_exported(path)
        old = draft.with_name("old")
        path.rename(old)
        try:
            draft.rename(path)
        except BaseException:
            old.rename(path)
            raise


def _require_exported(path: Path) -> None:
    """Raise `ConfigError` if a file in a directory is not one of an exported skill."""
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path)
        skill = path / name.parts[0]
        expected = not file.is_symlink() and (
            file.is_dir() or name.relative_to(name.parts[0]).as_posix() in (PAGE, RECORDS)
        )
        if not (expected and (skill / RECORDS).is_file()):
            reason = f"the directory also contains {name}, which is not an exported skill"
            raise _refused(path, reason, "Choose another path, and copy the skills")


@contextmanager
def _draft(path: Path) -> Iterator[Path]:
    """Yield the path of a draft in a new directory beside `path`, which is removed at the end.

    Raise `ConfigError` for an `OSError` in the context.
    """
    try:
        with TemporaryDirectory(prefix=".crl-export-", dir=path.parent) as folder:
            yield Path(folder) / "draft"
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        remedy = "Choose a directory that exists and is writable"
        raise _refused(path, reason, remedy) from error


def _refused(path: Path, reason: str, remedy: str) -> ConfigError:
    return ConfigError(KEY, str(path), reason, remedy)

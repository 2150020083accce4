"""Lookup of a user's classes and functions by a reference in the configuration.

A reference has one of these forms:

* `path/to/file.py:ATTRIBUTE`
* `package.module:ATTRIBUTE`, which must be installed or on PYTHONPATH
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from crl.errors import ConfigError

T = TypeVar("T")

_FILE_MODULE = "crl_plugin_"
"""Beginning of the names of modules that are loaded from files."""


def absolute_reference(reference: str) -> str:
    """Return the reference with the absolute path of its file; other texts are unchanged.

    A saved run can then be loaded from any working directory.
    """
    if ".py:" not in reference:
        return reference
    return os.path.realpath(os.path.expanduser(reference))


def is_reference(text: str) -> bool:
    """Return whether `text` has the form of a reference."""
    source, _, attribute = text.rpartition(":")
    parts = source.split(".")
    return bool(source and attribute) and (
        source.endswith(".py") or all(part.isidentifier() for part in parts)
    )


def load(reference: str, kind: type[T], key: str, *, example: str, base: str) -> T:
    """Return the object that `reference` names.

    `key`: config key of the reference. `example`: path of an example, for errors. `base`: sentence
    that says where relative paths start, for errors.

    Raise `ConfigError` if there is no such module or file, its import fails, or the attribute is
    not an instance of `kind`.
    """
    source, _, attribute = reference.rpartition(":")
    value = getattr(_module(source, reference, key, base), attribute, None)
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ConfigError(
            key,
            reference,
            f"{attribute!r} of {source!r} is not {article} {kind.__name__}",
            f"See {example} for an example",
        )
    return value


def _module(source: str, reference: str, key: str, base: str) -> ModuleType:
    if source.endswith(".py") and not Path(source).is_file():
        raise ConfigError(key, reference, "there is no such file", base)
    try:
        return (
            _from_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
        )
    except (Exception, SystemExit) as error:  # a user's module can raise anything
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and f"{source}.".startswith(f"{error.name}.")
        ):
            raise ConfigError(
                key,
                reference,
                f"there is no module {source!r}",
                "Correct its name or PYTHONPATH, or give the path of its file",
            ) from error
        reason = f"its module cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError(
            key, reference, reason, "Install its dependencies, or fix the error"
        ) from error


def source_folder(reference: str) -> Path:
    """Return the folder of the file or module that a loaded reference names."""
    source = reference.rpartition(":")[0]
    path = source if source.endswith(".py") else str(sys.modules[source].__file__)
    return Path(path).resolve().parent


def is_pickled_by_file(data: bytes) -> bool:
    """Return whether a pickle names a module from a file, which other processes cannot import."""
    return _FILE_MODULE.encode() in data


def _from_file(path: Path) -> ModuleType:
    """Return the module in a file.

    A process imports the file only once. The module's name is unique to the file.
    """
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"{_FILE_MODULE}{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    # registered before it runs, because dataclasses look up their module
    module = sys.modules[name] = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

"""Lookup of environments by name.

Environment modules are imported on first use, so listing the names imports none of them.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from crl.envs.base import EnvSpec
from crl.errors import ConfigError
from crl.extras import require_package

_ENVIRONMENTS = {
    "alfworld": "crl.envs.alfworld:SPEC",
    "alfworld_small": "crl.envs.alfworld:SMALL_SPEC",
    "keyroom": "crl.envs.keyroom:SPEC",
    "maze": "crl.envs.maze:SPEC",
    "maze_small": "crl.envs.maze:SMALL_SPEC",
    "river": "crl.envs.river:SPEC",
    "river_small": "crl.envs.river:SMALL_SPEC",
    "room": "crl.envs.room:SPEC",
    "sokoban": "crl.envs.sokoban:SPEC",
    "webshop": "crl.envs.webshop:SPEC",
}

GEM_PREFIX = "gem:"
"""Prefix of the names of environments from the package gem-llm."""


def names() -> tuple[str, ...]:
    """Return the names of the environments that ship with `crl`, sorted."""
    return tuple(sorted(_ENVIRONMENTS))


def get_spec(name: str, key: str = "env") -> EnvSpec:
    """Return the spec of the environment with this name.

    The name has one of these forms:

    * one of `names()`;
    * `gem:ID`, an environment of the package gem-llm;
    * `path/to/file.py:ATTRIBUTE`, a user's environment in a file;
    * `package.module:ATTRIBUTE`, a user's environment that is installed or on PYTHONPATH.

    Raise `ConfigError` with the key `key` if the environment does not exist or cannot be imported.
    An environment in a file must not need worker processes, because they import it by name.
    """
    if name.startswith(GEM_PREFIX):
        return importlib.import_module("crl.envs.gem").spec(name.removeprefix(GEM_PREFIX), key)
    target = _ENVIRONMENTS.get(name, name)
    source, _, attribute = target.rpartition(":")
    if not source or not (
        source.endswith(".py") or all(part.isidentifier() for part in source.split("."))
    ):
        raise ConfigError(
            key,
            name,
            f"unknown environment (available: {', '.join(names())})",
            _remedy(name),
        )
    spec = getattr(_module(source, name, key), attribute, None)
    if not isinstance(spec, EnvSpec):
        raise ConfigError(
            key,
            name,
            f"{attribute!r} of {source!r} is not an EnvSpec",
            "See examples/doors for an example",
        )
    if source.endswith(".py") and spec.hosting == "processes":
        reason = (
            "its hosting is 'processes', but worker processes cannot import an environment "
            "from a file"
        )
        raise ConfigError(
            key,
            name,
            reason,
            "Move it to a module on PYTHONPATH, and name it package.module:ATTRIBUTE",
        )
    return spec


def require_extra(spec: EnvSpec, key: str) -> None:
    """Raise `ConfigError` if the environment needs an extra that is not installed."""
    if spec.extra:
        require_package(spec.extra, key, spec.name)


def _module(source: str, name: str, key: str) -> ModuleType:
    if source.endswith(".py") and not Path(source).is_file():
        raise ConfigError(
            key,
            name,
            "there is no such file",
            "A relative path in a task file starts at the folder of that file",
        )
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
                name,
                f"there is no module {source!r}",
                "Correct its name or PYTHONPATH, or give the path of its file",
            ) from error
        reason = f"its module cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError(
            key, name, reason, "Install its dependencies, or fix the error"
        ) from error


def _from_file(path: Path) -> ModuleType:
    """Return the module in a file.

    A process imports the file only once. The module's name is unique to the file.
    """
    name = f"crl_env_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
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


def _remedy(name: str) -> str:
    close = difflib.get_close_matches(name, names(), n=1, cutoff=0.5)
    own_form = "name your own environment as path/to/file.py:ATTRIBUTE or package.module:ATTRIBUTE"
    return (
        f"Did you mean {close[0]!r}? Otherwise, {own_form}"
        if close
        else f"Choose one of them, or {own_form}"
    )

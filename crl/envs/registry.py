"""Lookup of environments by name.

Environment modules are imported on first use, so listing the names imports none of them.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from types import MappingProxyType

from crl import plugins
from crl.envs.base import EnvSpec
from crl.errors import ConfigError
from crl.extras import require_package

BUNDLED_ENVIRONMENTS: Mapping[str, str] = MappingProxyType(
    {
        "alfworld": "crl.envs.alfworld:SPEC",
        "alfworld_small": "crl.envs.alfworld:SMALL_SPEC",
        "keyroom": "crl.envs.keyroom:SPEC",
        "maze": "crl.envs.maze:SPEC",
        "maze_small": "crl.envs.maze:SMALL_SPEC",
        "river": "crl.envs.river:SPEC",
        "river_small": "crl.envs.river:SMALL_SPEC",
        "room": "crl.envs.room:SPEC",
        "scienceworld": "crl.envs.scienceworld:SPEC",
        "scienceworld_small": "crl.envs.scienceworld:SMALL_SPEC",
        "search_qa": "crl.envs.search_qa:SPEC",
        "search_qa_small": "crl.envs.search_qa:SMALL_SPEC",
        "sokoban": "crl.envs.sokoban:SPEC",
        "webshop": "crl.envs.webshop:SPEC",
    }
)
"""Reference of the `EnvSpec` of each bundled environment, by name."""

GEM_PREFIX = "gem:"
"""Prefix of the names of environments from the package gem-llm."""

SCIENCEWORLD_PREFIX = "scienceworld:"
"""Prefix of the names of ScienceWorld's tasks, each of which is also an environment of its own."""


def names() -> tuple[str, ...]:
    """Return the names of the environments that ship with `crl`, sorted."""
    return tuple(sorted(BUNDLED_ENVIRONMENTS))


def get_spec(name: str, key: str = "env") -> EnvSpec:
    """Return the spec of the environment with this name.

    The name has one of these forms:

    * one of `names()`;
    * `gem:ID`, an environment of the package gem-llm;
    * `scienceworld:TASK`, one of ScienceWorld's tasks;
    * `path/to/file.py:ATTRIBUTE`, a user's environment in a file;
    * `package.module:ATTRIBUTE`, a user's environment that is installed or on PYTHONPATH.

    Raise `ConfigError` with the key `key` if the environment does not exist or cannot be imported.
    An environment in a file must not need worker processes, because they import it by name.
    """
    if name.startswith(GEM_PREFIX):
        return importlib.import_module("crl.envs.gem").spec(name.removeprefix(GEM_PREFIX), key)
    if name.startswith(SCIENCEWORLD_PREFIX):
        module = importlib.import_module("crl.envs.scienceworld")
        return module.single_task_spec(name.removeprefix(SCIENCEWORLD_PREFIX), key)
    target = BUNDLED_ENVIRONMENTS.get(name, name)
    if not plugins.is_reference(target):
        raise ConfigError(
            key,
            name,
            f"unknown environment (available: {', '.join(names())})",
            _remedy(name),
        )
    spec = plugins.load(
        target,
        EnvSpec,
        key,
        example="examples/doors",
        base="A relative path in a task file starts at the folder of that file",
    )
    if ".py:" in target and spec.runtime.hosting == "processes":
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
    """Raise `ConfigError` if an extra or a program that the environment needs is missing."""
    if extra := spec.runtime.extra:
        require_package(extra, key, spec.name)
    if spec.runtime.require_program:
        spec.runtime.require_program(key, spec.name)


def _remedy(name: str) -> str:
    close = difflib.get_close_matches(name, names(), n=1, cutoff=0.5)
    own_form = "name your own environment as path/to/file.py:ATTRIBUTE or package.module:ATTRIBUTE"
    return (
        f"Did you mean {close[0]!r}? Otherwise, {own_form}"
        if close
        else f"Choose one of them, or {own_form}"
    )

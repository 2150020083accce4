"""Finds environments by name. Their modules are imported on first use, so listing names costs nothing."""

from __future__ import annotations

import difflib
import importlib

from crl.envs.base import EnvSpec
from crl.errors import ConfigError

_ENVIRONMENTS = {
    "room": "crl.envs.room:SPEC",
}


def names() -> tuple[str, ...]:
    """The environments that come with `crl`."""
    return tuple(sorted(_ENVIRONMENTS))


def get_spec(name: str, key: str = "env") -> EnvSpec:
    """The declared environment: one of `names()`, or `package.module:ATTRIBUTE` for one of the user's own.

    Raises `ConfigError` (its key is `key`) when there is no such environment, or its module cannot be imported.
    """
    target = _ENVIRONMENTS.get(name, name)
    module_name, colon, attribute = target.partition(":")
    if not colon or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(key, name, f"no such environment; there are: {', '.join(names())}", _remedy(name))
    try:
        spec = getattr(importlib.import_module(module_name), attribute, None)
    except Exception as error:  # whatever a user's module does when it is imported
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(key, name, f"there is no module {module_name!r}", "Check its name and PYTHONPATH") from error
        reason = f"its module cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError(key, name, reason, "Install what it needs, or mend it") from error
    if not isinstance(spec, EnvSpec):
        raise ConfigError(key, name, f"{attribute!r} of {module_name!r} is not an EnvSpec", "See crl/envs/base.py for an example")
    return spec


def _remedy(name: str) -> str:
    close = difflib.get_close_matches(name, names(), n=1, cutoff=0.5)
    own = "an environment of your own is named package.module:ATTRIBUTE"
    return f"Did you mean {close[0]!r}? Otherwise, {own}" if close else f"Choose one of them; {own}"

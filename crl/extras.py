"""Check for optional packages, which are installed by extras with the same names."""

from __future__ import annotations

import importlib.util

from crl.errors import ConfigError


def require_package(package: str, key: str, value: object, remedy: str = "") -> None:
    """Raise `ConfigError` if `package`, which the setting `key` = `value` needs, is not installed.

    `remedy` replaces the default instruction to install the extra with the package's name.
    """
    if importlib.util.find_spec(package) is None:
        reason = f"it needs the extra {package!r}, which is not installed"
        raise ConfigError(key, value, reason, remedy or f"Run pip install 'crl[{package}]'")

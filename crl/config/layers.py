"""Layers of settings before validation: TOML files, options and `--set`.

Later layers override earlier ones.

The origin of every value is stored, so that an error message can name it.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crl.errors import ConfigError

Tree = dict[str, Any]

_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_SHORT_FLOAT = re.compile(r"[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Layer:
    """Settings from one source."""

    origin: str
    """Name of the source in error messages."""
    data: Mapping[str, Any]


def merge(layers: Iterable[Layer]) -> tuple[Tree, dict[str, str]]:
    """Return one tree of all layers, and the origin of each dotted key.

    Later layers override earlier ones.
    """
    tree: Tree = {}
    origins: dict[str, str] = {}
    for layer in layers:
        for key, value in leaves(layer.data):
            put(tree, key, value)
            origins[key] = layer.origin
    return tree, origins


def put(tree: Tree, key: str, value: Any) -> None:
    """Set a dotted key in `tree`.

    Raise `ConfigError` if an earlier layer put a value where a table is needed.
    """
    *parents, leaf = key.split(".")
    for depth, parent in enumerate(parents):
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            above = ".".join(parents[: depth + 1])
            raise ConfigError(
                above,
                tree,
                f"is a value, not a section, so it cannot contain {key}",
                "Remove one of the two settings",
            )
    tree[leaf] = value


def nested(key: str, value: Any) -> Tree:
    """Return a tree that contains one dotted key."""
    tree: Tree = {}
    put(tree, key, value)
    return tree


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key of a table with its value."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def first_leaf(key: str, value: Any) -> tuple[str, Any]:
    """Return the first dotted key below `key` with its value; `key` itself without keys below."""
    return next(leaves({key: value}), (key, value))


def read_toml(path: Path, key: str) -> Tree:
    """Return the tables of a TOML file.

    Raise `ConfigError` under `key` if the file cannot be read or is not valid TOML. The error names
    the file and the line.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            key, str(path), f"cannot be read ({error})", "Give a readable TOML file in UTF-8"
        ) from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        line = int(found.group(1)) if found else max(1, len(text.splitlines()))
        raise ConfigError(
            key, f"{path}:{line}", f"is not valid TOML: {error}", f"Correct line {line}"
        ) from error


def parse_set(text: str) -> Layer:
    """Return the layer of a `key=value` argument of the command line.

    The value is parsed as TOML. A bare word is a string. Raise `ConfigError` for any other form.
    """
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not _KEY.fullmatch(key):
        raise ConfigError(
            "--set",
            text,
            "is not of the form key=value",
            "Write for example --set rollout.groups=8",
        )
    return Layer(f"--set {key}", nested(key, _parse_value(text, value)))


def _parse_value(text: str, value: str) -> Any:
    """Return the value of a `--set` argument. `text` is the whole argument, for error messages."""
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError as error:
        if value[:1] in ("[", "{", '"', "'"):  # meant as TOML, not as a bare word
            raise ConfigError(
                "--set",
                text,
                f"its value is not valid TOML: {error}",
                "Correct it, or quote the whole value",
            ) from error
        return float(value) if _SHORT_FLOAT.fullmatch(value) else value
    if len(parsed) > 1 or isinstance(parsed["value"], datetime.date | datetime.time):
        return value  # several lines, or a date: no setting is a date, but a name may look like one
    return parsed["value"]

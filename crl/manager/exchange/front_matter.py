"""YAML front matter of Markdown files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from crl.errors import ConfigError
from crl.manager.exchange.jsonl import line_error

DELIMITER = "---"


@dataclass(frozen=True)
class FrontMatter:
    """Front matter of a file."""

    path: Path
    """File, for messages."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values by key. Each value is a text, a list or a mapping."""
    lines: Sequence[str] = ()
    """Lines of the front matter with its delimiters."""

    def text(self, key: str) -> str | None:
        """Return the value of `metadata.KEY` or of `KEY`; None if there is neither.

        Raise `ConfigError` if the value is not a text.
        """
        value = self._value(key)
        if not (value is None or isinstance(value, str)):
            raise self.error(key, "is not a text", f"Write it on one line, as {key}: TEXT")
        return value

    def number(self, key: str) -> int | None:
        """Return the number at `key`, as `text` does. Raise `ConfigError` if it is none."""
        text = self.text(key)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise self.error(key, "is not a number", "Write a number, or remove the line")
        return int(text)

    def error(self, key: str, reason: str, remedy: str) -> ConfigError:
        """Return an error about the value of `key`."""
        numbers = [n for n, line in enumerate(self.lines, 1) if line.lstrip().startswith(f"{key}:")]
        value = self._value(key)
        return line_error(self.path, [*numbers, 1][0], f".{key}", value, reason, remedy)

    def _value(self, key: str) -> object:
        metadata = self.values.get("metadata")
        inner = metadata.get(key) if isinstance(metadata, dict) else None
        return self.values.get(key) if inner is None else inner


def write_front_matter(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a front matter. A text is on one line, whatever its length."""
    dumped = yaml.safe_dump(dict(values), allow_unicode=True, sort_keys=False, width=float("inf"))
    yield from (DELIMITER, *dumped.rstrip("\n").split("\n"), DELIMITER)


def read_front_matter(path: Path, lines: list[str]) -> FrontMatter:
    """Return the front matter of a file with these lines.

    Raise `ConfigError` if it has no end or if it is not a YAML mapping.
    """
    if not lines or lines[0].rstrip() != DELIMITER:
        return FrontMatter(path)
    end = next((i for i, line in enumerate(lines[1:], 1) if line.rstrip() == DELIMITER), None)
    if end is None:
        reason = "the front matter has no end"
        raise line_error(path, 1, "", DELIMITER, reason, f"Add a line {DELIMITER} after it")
    try:
        # This loader makes texts, lists and mappings, and no other objects.
        values = yaml.load("\n".join(lines[1:end]), yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise _yaml_error(path, error) from error
    except RecursionError as error:
        raise line_error(
            path, 2, "", lines[1], "is nested too deeply", "Write flat keys"
        ) from error
    if not isinstance(values or {}, dict):
        raise line_error(path, 2, "", lines[1], "is not a YAML mapping", "Write KEY: VALUE")
    return FrontMatter(path, values or {}, lines[: end + 1])


def _yaml_error(path: Path, error: yaml.YAMLError) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    number = mark.line + 2 if mark else 2  # marks count from 0, after the delimiter
    problem = getattr(error, "problem", None) or str(error).split("\n")[0]
    remedy = "Write KEY: VALUE, and put a value with special characters in quotes"
    return line_error(path, number, "", DELIMITER, f"is not valid YAML ({problem})", remedy)

"""Pages of the documentation, and the shell commands and code blocks in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
SHELL = ("sh", "bash", "shell", "console")
"""Languages of code blocks whose lines are commands."""


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of every shell command. Pipes, redirections and comments are left out."""
    for language, text in blocks(page):
        lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
        if language not in SHELL:
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        for line in lines:
            words = shlex.split(re.split(r"(?:^|\s)#\s", line)[0])
            words = words[: next((i for i, w in enumerate(words) if w in "|><&&"), None)]
            while words and re.match(r"\w+=", words[0]):
                del words[0]  # an environment variable
            if words:
                yield words


def code(page: Path, first_line: str) -> str:
    """Return the text of the code block that begins with `first_line`."""
    (text,) = [text for _, text in blocks(page) if text.startswith(f"{first_line}\n")]
    return text


def prose(page: Path) -> Iterator[str]:
    """Yield the lines outside fenced code blocks."""
    yield from (line for line, language in _lines(page) if language is None)


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yield (language, text) of every fenced code block."""
    language, lines = None, list[str]()
    for line, current in [*_lines(page), ("", None)]:
        if current is not None:
            language = current
            lines.append(line)
        elif language is not None:
            yield language, "\n".join(lines)
            language, lines = None, []


def _lines(page: Path) -> Iterator[tuple[str, str | None]]:
    """Yield (line, language of its code block). The language is None outside code blocks."""
    language = None
    for line in page.read_text("utf-8").splitlines():
        if fence := re.match(r"\s*```\s*(\w*)", line):
            language = fence[1] if language is None else None
            yield "", None
        else:
            yield line, language

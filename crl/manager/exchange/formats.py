"""Reading of an export in any format."""

from __future__ import annotations

from pathlib import Path

from crl.manager.exchange.jsonl import parse_export
from crl.manager.exchange.markdown import read_markdown
from crl.manager.exchange.pages import Imported
from crl.manager.exchange.skills import PAGE, read_skills


def read_export(path: Path) -> Imported:
    """Return the entries of an export. Its format follows from its path.

    A directory and a SKILL.md are skills, other files whose names end in `.md` or `.markdown` are
    Markdown, and all others JSON lines.

    Raise `ConfigError`, which names the file and the line, if the export cannot be read.
    """
    if path.is_dir():
        return read_skills(path)
    if path.name == PAGE:
        return read_skills(path.parent)
    if path.suffix.lower() in (".md", ".markdown"):
        return read_markdown(path)
    return Imported(parse_export(path))

"""Every prompt is a text file in this folder; `{slots}` are filled where it is used. Hashes go into RUN/config.json."""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent


def prompt(name: str) -> str:
    """The text of prompt `name`, without the file's last newline."""
    return (FOLDER / f"{name}.txt").read_text("utf-8").removesuffix("\n")


def hashes() -> dict[str, str]:
    """SHA-256 of every prompt by name."""
    return {path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(FOLDER.glob("*.txt"))}

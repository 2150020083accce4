"""Every prompt is a text file in this folder, or a file of the user's in its place. Hashes go into RUN/config.json.

A `{slot}` is filled where the prompt is used; `{{slot}}` is the text {slot}. All other braces are text, so JSON can stand as it is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from crl.errors import ConfigError

FOLDER = Path(__file__).parent

SLOTS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "actor": frozenset({"turns", "actions", "example"}),
        "ask": frozenset({"limit"}),
        "critic": frozenset({"goal", "rate", "experience"}),
        "distil": frozenset({"goal", "outcome", "experiences", "transcript"}),
        "experience": frozenset({"experience"}),
        "merge": frozenset({"experiences"}),
        "refine": frozenset({"goal", "experience", "question", "transcript"}),
        "vote": frozenset(),
    }
)
"""Every prompt, and the slots that its text has."""

_SLOT = re.compile(r"\{\{([a-z_]+)\}\}|\{([a-z_]+)\}")

Overrides = Mapping[str, Path]
"""Files of the user's by the name of the prompt that they replace."""

BUNDLED: Overrides = MappingProxyType({})


def prompt(name: str, overrides: Overrides = BUNDLED) -> str:
    """The text of prompt `name`, without the file's last newline.

    Raises `ConfigError` for a file that cannot be read, or whose slots are not those of the prompt.
    """
    return _read(name, overrides).removesuffix("\n")


def hashes(overrides: Overrides = BUNDLED) -> dict[str, str]:
    """SHA-256 of every prompt, by name. Raises `ConfigError` as `prompt` does: a check of all of them."""
    return {name: hashlib.sha256(_read(name, overrides).encode()).hexdigest() for name in SLOTS}


def fill(template: str, **values: object) -> str:
    """The template with its slots filled, all at once: what looks like a slot in a value is text."""
    return _SLOT.sub(lambda slot: f"{{{slot[1]}}}" if slot[1] else str(values[slot[2]]), template)


def _read(name: str, overrides: Overrides) -> str:
    path = overrides.get(name, FOLDER / f"{name}.txt")
    remedy = f"Start from a copy of {FOLDER / f'{name}.txt'}"
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"prompts.{name}", str(path), f"cannot be read ({reason})", remedy
        ) from error
    slots = {slot[2] for slot in _SLOT.finditer(text) if slot[2]}
    if missing := SLOTS[name] - slots:
        raise ConfigError(
            f"prompts.{name}",
            str(path),
            f"has no {_listed(missing)}, so the model would not be told",
            remedy,
        )
    if unknown := slots - SLOTS[name]:
        reason = (
            f"has {_listed(unknown)}, which nothing fills; its slots are {_listed(SLOTS[name])}"
        )
        raise ConfigError(
            f"prompts.{name}",
            str(path),
            reason,
            f"Write {{{{name}}}} where braces are meant, or: {remedy}",
        )
    return text


def _listed(slots: frozenset[str] | set[str]) -> str:
    return ", ".join(f"{{{slot}}}" for slot in sorted(slots))

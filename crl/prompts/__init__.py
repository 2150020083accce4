"""Prompts: text files in this folder, or files of the user that replace them.

Their hashes are stored in RUN/config.json.

A `{slot}` is filled when the prompt is used. `{{slot}}` is the text {slot}. All other braces are
text, so JSON needs no escapes.
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
        "actor_tags": frozenset({"turns", "actions", "example"}),
        "ask": frozenset({"limit"}),
        "critic": frozenset({"goal", "rate", "experience"}),
        "distil": frozenset({"goal", "outcome", "experiences", "transcript"}),
        "experience": frozenset({"experience"}),
        "failure": frozenset({"goal", "outcome", "modes", "transcript"}),
        "merge": frozenset({"experiences"}),
        "predict": frozenset({"horizon"}),
        "refine": frozenset({"goal", "experience", "question", "transcript"}),
        "reflection": frozenset({"goal", "outcome", "experiences", "transcript"}),
        "retrieve": frozenset({"matches", "failure", "candidates"}),
        "tip": frozenset({"goal", "outcome", "transcript"}),
        "vote": frozenset(),
    }
)
"""Slots in the text of each prompt, by the prompt's name."""

_SLOT = re.compile(r"\{\{([a-z_]+)\}\}|\{([a-z_]+)\}")

Overrides = Mapping[str, Path]
"""Files of the user, by the name of the prompt that they replace."""

NO_OVERRIDES: Overrides = MappingProxyType({})


def prompt(name: str, overrides: Overrides = NO_OVERRIDES) -> str:
    """Return the text of the prompt `name`, without the last newline of the file.

    Raise `ConfigError` if the file cannot be read or does not have the slots of the prompt.
    """
    return _read_template(name, overrides).removesuffix("\n")


def hashes(overrides: Overrides = NO_OVERRIDES) -> dict[str, str]:
    """Return the SHA-256 of every prompt, by name.

    All prompts are checked. Raise `ConfigError` like `prompt`.
    """
    return {
        name: hashlib.sha256(_read_template(name, overrides).encode()).hexdigest() for name in SLOTS
    }


def fill(template: str, **values: object) -> str:
    """Return the template with all slots filled in one pass.

    A slot inside a value is not filled.
    """
    return _SLOT.sub(lambda slot: f"{{{slot[1]}}}" if slot[1] else str(values[slot[2]]), template)


def _read_template(name: str, overrides: Overrides) -> str:
    """Return the text of a prompt's file. Raise `ConfigError` like `prompt`."""
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
            f"lacks {_list_slots(missing)}, so the model would not receive this information",
            remedy,
        )
    if unknown := slots - SLOTS[name]:
        reason = (
            f"has the unknown slots {_list_slots(unknown)}; "
            f"its slots are {_list_slots(SLOTS[name])}"
        )
        raise ConfigError(
            f"prompts.{name}",
            str(path),
            reason,
            f"Write {{{{name}}}} for literal braces, or: {remedy}",
        )
    return text


def _list_slots(slots: frozenset[str] | set[str]) -> str:
    """Return the slots as a sorted list for error messages."""
    return ", ".join(f"{{{slot}}}" for slot in sorted(slots))

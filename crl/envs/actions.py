"""Reads an agent's text as an action: one of a closed set, or a name with an argument. Shared by all environments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

from crl.types import Segment

T = TypeVar("T")

COMPASS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "north": (0, -1),
        "east": (1, 0),
        "south": (0, 1),
        "west": (-1, 0),
        "northeast": (1, -1),
        "southeast": (1, 1),
        "southwest": (-1, 1),
        "northwest": (-1, -1),
    }
)
"""The eight directions and their (dx, dy); y grows to the south. In NetHack's order of compass actions."""

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.IGNORECASE | re.DOTALL)
_OPENING = re.compile(r"<answer>", re.IGNORECASE)
_TRAILING = ".,;:!?\"'`*"
_CALL = re.compile(r"\s*(\w+)\s*\[(.*)\]\s*")


def parse_choice(text: str, actions: Sequence[str], aliases: Mapping[str, str] | None = None) -> str | None:
    """The action that `text` chooses, spelled as in `actions`, or None when it chooses none.

    The last `<answer>…</answer>` whose content is an action counts. Only without any answer tag, the whole text does, or
    its last non-empty line. Case, spaces inside and punctuation behind an action do not matter; `aliases` maps further
    spellings to actions. An action is never picked out of a longer text.
    """
    table = _table(tuple(actions), tuple((aliases or {}).items()))
    return _last(text, lambda content: _lookup(content, table))


def parse_call(text: str, admissible: Mapping[str, Sequence[str] | None]) -> tuple[str, str] | None:
    """The `name[argument]` that `text` chooses, found as in `parse_choice`; None when it chooses none.

    admissible: name → its arguments at present, of which the chosen one is spelled as there; or None for any text, which must
    not be empty and has its spaces collapsed.
    """
    return _last(text, lambda content: _lookup_call(content, admissible))


def moves(segments: Sequence[Segment], actions: Sequence[str]) -> str:
    """What an episode's agent did, for digests, where its texts choose one of a closed set of actions: `moves east east south`."""
    chosen = (parse_choice(segment.text, actions) for segment in segments if segment.origin == "policy")
    return " ".join(["moves", *(action for action in chosen if action)])


def tagged_answers(text: str) -> list[str] | None:
    """What stands in `<answer>…</answer>` tags, in order; None for a text without any opening tag."""
    return _ANSWER.findall(text) if _OPENING.search(text) else None


def _last(text: str, read: Callable[[str], T | None]) -> T | None:
    """What `read` makes of the last answer that it can read; only without any answer tag, of the last line."""
    answers = tagged_answers(text)
    contents = text.strip().splitlines()[-1:] if answers is None else reversed(answers)
    found = (read(content.strip()) for content in contents if "\n" not in content.strip())
    return next((action for action in found if action is not None), None)


@lru_cache(maxsize=256)
def _table(actions: tuple[str, ...], aliases: tuple[tuple[str, str], ...]) -> dict[str, str]:
    unknown = [action for _, action in aliases if action not in actions]
    if unknown:
        raise ValueError(f"aliases of actions that do not exist: {unknown}")
    table = {_normal(alias): action for alias, action in aliases}
    return table | {_normal(action): action for action in actions}


def _lookup(text: str, table: dict[str, str]) -> str | None:
    exact = table.get(_normal(text))
    return exact if exact is not None else table.get(_normal(text.rstrip(_TRAILING + " ")))


def _lookup_call(text: str, admissible: Mapping[str, Sequence[str] | None]) -> tuple[str, str] | None:
    match = _CALL.fullmatch(text) or _CALL.fullmatch(text.rstrip(_TRAILING + " "))
    name = _lookup(match[1], _table(tuple(admissible), ())) if match else None
    if match is None or name is None:
        return None
    arguments = admissible[name]
    argument = " ".join(match[2].split()) if arguments is None else _lookup(match[2], _table(tuple(arguments), ()))
    return (name, argument) if argument else None


def _normal(text: str) -> str:
    return "".join(text.split()).casefold()

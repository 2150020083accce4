"""Reads an agent's text as an action: one of a closed set, or a name with an argument. Shared by all environments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
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
_LEADING, _TRAILING = "\"'`*- ", "\"'`*.,;:!? "
_CALL = re.compile(r"\s*(\w+)\s*\[(.*)\]\s*")
_BETWEEN_CALLS = re.compile(rf"(?<=\])[\s{re.escape(_LEADING + _TRAILING)}]*(?=\w+\s*\[)")


def parse_choice(
    text: str, actions: Sequence[str], aliases: Mapping[str, str] | None = None
) -> str | None:
    """The action that `text` chooses, spelled as in `actions`, or None when it chooses none.

    The last `<answer>…</answer>` whose content is an action counts. Only without any answer tag, the whole text does, or
    its last non-empty line. Case, and quotes, bullets and punctuation around an action do not matter, nor do spaces inside, where
    that leaves one action; what is spelled exactly as an action always is that one. `aliases` maps further spellings to actions. An
    action is never picked out of a longer text.
    """
    choices = tuple(actions)
    table = _table(choices, tuple((aliases or {}).items()))
    return _last(text, lambda content: _lookup(content, choices, table))


def parse_call(text: str, admissible: Mapping[str, Sequence[str] | None]) -> tuple[str, str] | None:
    """The `name[argument]` that `text` chooses, found as in `parse_choice`; None when it chooses none. Of several in a row, the last
    that can be read counts.

    admissible: name → its arguments at present, of which the chosen one is spelled as there; or None for any text, which must
    not be empty and has its spaces collapsed.
    """
    return _last(text, lambda content: _lookup_call(content, admissible))


def moves(segments: Sequence[Segment], actions: Sequence[str]) -> str:
    """What an episode's agent did, for digests, where its texts choose one of a closed set of actions: `moves east east south`."""
    chosen = (
        parse_choice(segment.text, actions) for segment in segments if segment.origin == "policy"
    )
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
def _table(
    actions: tuple[str, ...], aliases: tuple[tuple[str, str], ...] = ()
) -> Mapping[str, str | None]:
    """Spelling → action, where that is one action alone, else None; the spaces inside a spelling are one each, or left out."""
    unknown = [action for _, action in aliases if action not in actions]
    if unknown:
        raise ValueError(f"aliases of actions that do not exist: {unknown}")
    named = _meanings((_spelling(alias), action) for alias, action in aliases)
    named |= _meanings((_spelling(action), action) for action in actions)
    return (
        _meanings((_without_spaces(spelling), action) for spelling, action in named.items()) | named
    )


def _meanings(pairs: Iterable[tuple[str, str | None]]) -> dict[str, str | None]:
    meant: dict[str, set[str | None]] = {}
    for spelling, action in pairs:
        meant.setdefault(spelling, set()).add(action)
    return {spelling: None if others else only for spelling, (only, *others) in meant.items()}


def _lookup(text: str, actions: tuple[str, ...], table: Mapping[str, str | None]) -> str | None:
    """What is spelled exactly comes first, then what the table says."""
    for words in (text, _bare(text)):
        if words in actions:
            return words
        for spelling in (_spelling(words), _without_spaces(words)):
            if spelling in table:
                return table[spelling]
    return None


def _choice(text: str, actions: tuple[str, ...]) -> str | None:
    return _lookup(text, actions, _table(actions))


def _lookup_call(
    text: str, admissible: Mapping[str, Sequence[str] | None]
) -> tuple[str, str] | None:
    calls = (_one_call(part, admissible) for part in (text, *reversed(_BETWEEN_CALLS.split(text))))
    return next((call for call in calls if call is not None), None)


def _one_call(text: str, admissible: Mapping[str, Sequence[str] | None]) -> tuple[str, str] | None:
    match = _CALL.fullmatch(text) or _CALL.fullmatch(_bare(text))
    name = _choice(match[1], tuple(admissible)) if match else None
    if match is None or name is None:
        return None
    arguments = admissible[name]
    argument = _free_text(match[2]) if arguments is None else _choice(match[2], tuple(arguments))
    return (name, argument) if argument else None


def _free_text(text: str) -> str | None:
    """Its words; None when a bracket closes in it that was opened before it, as between two calls."""
    depths = accumulate((character == "[") - (character == "]") for character in text)
    return " ".join(text.split()) if min(depths, default=0) >= 0 else None


def _bare(text: str) -> str:
    return text.lstrip(_LEADING).rstrip(_TRAILING)


def _spelling(text: str) -> str:
    return " ".join(text.split()).casefold()


def _without_spaces(text: str) -> str:
    return "".join(text.split()).casefold()

"""Parsing of an agent's text into an action.

An action is one of a closed set, or a name with an argument. Shared by all environments.
"""

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
"""Eight directions → (dx, dy), in the order of NetHack's compass actions. y grows to the south."""

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.IGNORECASE | re.DOTALL)
_OPENING = re.compile(r"<answer>", re.IGNORECASE)
_LEADING, _TRAILING = "\"'`*- ", "\"'`*.,;:!? "
_CALL = re.compile(r"\s*(\w+)\s*\[(.*)\]\s*")
_BETWEEN_CALLS = re.compile(rf"(?<=\])[\s{re.escape(_LEADING + _TRAILING)}]*(?=\w+\s*\[)")


def parse_choice(
    text: str, actions: Sequence[str], aliases: Mapping[str, str] | None = None
) -> str | None:
    """Return the action that `text` chooses, spelled as in `actions`, or None if it chooses none.

    The last `<answer>…</answer>` whose content is an action counts. An answer of several lines is
    no action. If the text has no opening answer tag, its last non-empty line is read instead.

    Matching ignores case, and quotes, bullets and punctuation around the action. It also ignores
    spaces inside the action. If several actions match in this way, none is chosen. A text that is
    spelled exactly like an action always chooses that action. An action is never extracted from a
    longer text.

    `aliases` maps further spellings to actions. Raise `ValueError` if it maps to an action that
    does not exist.
    """
    choices = tuple(actions)
    table = _spelling_table(choices, tuple((aliases or {}).items()))
    return _last_readable_answer(text, lambda content: _lookup(content, choices, table))


def parse_call(text: str, admissible: Mapping[str, Sequence[str] | None]) -> tuple[str, str] | None:
    """Return the `name[argument]` that `text` chooses, or None if it chooses none.

    The answer is located as in `parse_choice`. If it contains several calls in a row, the last
    valid call counts. `admissible` maps each name to its current arguments. The returned argument
    is spelled as in `admissible`. If the value is None, any text that is not empty is an argument,
    and its whitespace is collapsed.
    """
    return _last_readable_answer(text, lambda content: _lookup_call(content, admissible))


def parse_free_text(text: str) -> str | None:
    """Return the action that `text` writes in free words, or None if it writes none.

    The answer is located as in `parse_choice`. It is lowercased, its whitespace is collapsed, and
    quotes, bullets and punctuation around it are removed.
    """
    if not text.strip():
        return ""
    return _last_readable_answer(text, lambda content: _spelling(_stripped(content)))


def moves(segments: Sequence[Segment], actions: Sequence[str]) -> str:
    """Return the actions of an episode's agent, for digests: `moves east east south`.

    Texts of the agent that choose none of `actions` are left out.
    """
    chosen = (
        parse_choice(segment.text, actions) for segment in segments if segment.origin == "policy"
    )
    return " ".join(["moves", *(action for action in chosen if action)])


def tagged_answers(text: str) -> list[str] | None:
    """Return the contents of all `<answer>…</answer>` pairs, in order.

    Return None if the text has no opening tag.
    """
    return _ANSWER.findall(text) if _OPENING.search(text) else None


def _last_readable_answer(text: str, read: Callable[[str], T | None]) -> T | None:
    """Return the result of `read` for the last answer that it can read.

    Use the last line of the text if there is no answer tag.
    """
    answers = tagged_answers(text)
    contents = text.strip().splitlines()[-1:] if answers is None else reversed(answers)
    found = (read(content.strip()) for content in contents if "\n" not in content.strip())
    return next((action for action in found if action is not None), None)


@lru_cache(maxsize=256)
def _spelling_table(
    actions: tuple[str, ...], aliases: tuple[tuple[str, str], ...] = ()
) -> Mapping[str, str | None]:
    """Return a map from spelling to action, or to None if several actions have the spelling.

    The words of a spelling are separated by one space or by none. Raise `ValueError` if an alias
    refers to an unknown action.
    """
    unknown = [action for _, action in aliases if action not in actions]
    if unknown:
        raise ValueError(f"aliases must map to existing actions; these do not exist: {unknown}")
    named = _by_spelling((_spelling(alias), action) for alias, action in aliases)
    named |= _by_spelling((_spelling(action), action) for action in actions)
    return (
        _by_spelling((_without_spaces(spelling), action) for spelling, action in named.items())
        | named
    )


def _by_spelling(pairs: Iterable[tuple[str, str | None]]) -> dict[str, str | None]:
    actions_of: dict[str, set[str | None]] = {}
    for spelling, action in pairs:
        actions_of.setdefault(spelling, set()).add(action)
    return {spelling: None if others else only for spelling, (only, *others) in actions_of.items()}


def _lookup(text: str, actions: tuple[str, ...], table: Mapping[str, str | None]) -> str | None:
    """Return the action for `text`. An exact spelling takes precedence over the table."""
    for words in (text, _stripped(text)):
        if words in actions:
            return words
        for spelling in (_spelling(words), _without_spaces(words)):
            if spelling in table:
                return table[spelling]
    return None


def _choice(text: str, actions: tuple[str, ...]) -> str | None:
    return _lookup(text, actions, _spelling_table(actions))


def _lookup_call(
    text: str, admissible: Mapping[str, Sequence[str] | None]
) -> tuple[str, str] | None:
    calls = (
        _parse_single_call(part, admissible)
        for part in (text, *reversed(_BETWEEN_CALLS.split(text)))
    )
    return next((call for call in calls if call is not None), None)


def _parse_single_call(
    text: str, admissible: Mapping[str, Sequence[str] | None]
) -> tuple[str, str] | None:
    match = _CALL.fullmatch(text) or _CALL.fullmatch(_stripped(text))
    name = _choice(match[1], tuple(admissible)) if match else None
    if match is None or name is None:
        return None
    arguments = admissible[name]
    argument = _free_text(match[2]) if arguments is None else _choice(match[2], tuple(arguments))
    return (name, argument) if argument else None


def _free_text(text: str) -> str | None:
    """Return the text with whitespace collapsed.

    Return None if a bracket closes that was not opened before: the text then spans two calls.
    """
    depths = accumulate((character == "[") - (character == "]") for character in text)
    return " ".join(text.split()) if min(depths, default=0) >= 0 else None


def _stripped(text: str) -> str:
    return text.lstrip(_LEADING).rstrip(_TRAILING)


def _spelling(text: str) -> str:
    return " ".join(text.split()).casefold()


def _without_spaces(text: str) -> str:
    return "".join(text.split()).casefold()

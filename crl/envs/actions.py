"""Reads an agent's text as one of a closed set of actions. Shared by every environment that has one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

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


def parse_choice(text: str, actions: Sequence[str], aliases: Mapping[str, str] | None = None) -> str | None:
    """The action that `text` chooses, spelled as in `actions`, or None when it chooses none.

    The last `<answer>…</answer>` whose content is an action counts. Only without any answer tag, the whole text does, or
    its last non-empty line. Case, spaces inside and punctuation behind an action do not matter; `aliases` maps further
    spellings to actions. An action is never picked out of a longer text.
    """
    table = _table(tuple(actions), tuple((aliases or {}).items()))
    if _OPENING.search(text):
        chosen = (_lookup(content, table) for content in reversed(_ANSWER.findall(text)))
        return next((action for action in chosen if action is not None), None)
    lines = text.strip().splitlines()
    return _lookup(lines[-1], table) if lines else None


@lru_cache(maxsize=256)
def _table(actions: tuple[str, ...], aliases: tuple[tuple[str, str], ...]) -> dict[str, str]:
    unknown = [action for _, action in aliases if action not in actions]
    if unknown:
        raise ValueError(f"aliases of actions that do not exist: {unknown}")
    table = {_normal(alias): action for alias, action in aliases}
    return table | {_normal(action): action for action in actions}


def _lookup(text: str, table: dict[str, str]) -> str | None:
    text = text.strip()
    if "\n" in text:
        return None
    exact = table.get(_normal(text))
    return exact if exact is not None else table.get(_normal(text.rstrip(_TRAILING + " ")))


def _normal(text: str) -> str:
    return "".join(text.split()).casefold()

"""Translation between ScienceWorld's texts and the agent's.

`full` is the simulator's text. `compact` shortens texts and actions for tiny models:

    go outside                      (teleport to outside)
    outside: axe, dove egg, frog egg
    focus dove egg                  (focus on dove egg)
    take dove egg                   (pick up dove egg)
    put dove egg in red box         (move dove egg to red box)
"""

from __future__ import annotations

import re

from crl.envs.actions import parse_free_text
from crl.envs.base import Rendering

INVALID = {
    "full": "That is not an action, and nothing happened. Write one action in one line.",
    "compact": "unknown action.",
}
WON = {"full": "The task is completed.", "compact": "done."}
FAILED = {"full": "The task has failed.", "compact": "failed."}

_INVALID_ANSWERS = ("No known action matches that input.", "Unknown action.")
"""Beginnings of the simulator's answers to texts that are not actions."""

_SHORT_ACTIONS = (
    (re.compile(r"go (?:to )?(.+)"), r"teleport to \1"),
    (re.compile(r"focus (?!on )(.+)"), r"focus on \1"),
    (re.compile(r"take (.+)"), r"pick up \1"),
    (re.compile(r"put (.+) in (.+)"), r"move \1 to \2"),
)
_SHORT_ANSWERS = (
    (re.compile(r"You focus on the (.+)\."), r"focus on \1"),
    (re.compile(r"You move the (.+) to the inventory\."), r"took \1"),
    (re.compile(r"You move the (.+) to the (.+)\."), r"\1 in \2"),
)
_MOVED = re.compile(r"You (?:teleport|move) to the [^.]+\.")
_LOCATION = re.compile(r"This (?:room|outside location) is called the ([^.]+)\.")
_THING = re.compile(r"\t(?:an?|the) (?:substance called )?([^.,(]+?)(?=[.,(]|\s*$)")
_UNNAMED = ("agent", "air")
"""Things of every location."""


def action(text: str, rendering: Rendering) -> str | None:
    """Return the action of an agent's text in the simulator's words.

    Return None if the text contains no line with an action. An empty action cancels an ambiguous
    request.
    """
    words = parse_free_text(text)
    if words is None or rendering == "full":
        return words
    for pattern, form in _SHORT_ACTIONS:
        if match := pattern.fullmatch(words):
            return match.expand(form)
    return words


def is_valid(answer: str) -> bool:
    """Return whether the simulator recognised an action, according to its answer."""
    return not answer.startswith(_INVALID_ANSWERS)


def has_moved(answer: str) -> bool:
    """Return whether the simulator's answer says that the agent is in another location."""
    return _MOVED.match(answer) is not None


def first(look: str, inventory: str, rendering: Rendering) -> str:
    """Return the first observation: the location, and in `full` the inventory."""
    if rendering == "compact":
        return compact_location(look)
    return f"{look.strip()}\n{inventory.strip()}"


def compact(answer: str) -> str:
    """Return the simulator's answer in few words. An unknown text is written in one line."""
    if _LOCATION.match(answer):
        return compact_location(answer)
    if not is_valid(answer):
        return INVALID["compact"]
    for pattern, form in _SHORT_ANSWERS:
        if match := pattern.fullmatch(answer.strip()):
            return match.expand(form)
    return " ".join(answer.split())


def compact_location(look: str) -> str:
    """Return the name of a location and of the things that are visible in it, without its doors."""
    match = _LOCATION.match(look)
    name = match[1] if match else "?"
    return f"{name}: {', '.join(things(look)) or 'nothing'}"


def things(look: str) -> list[str]:
    """Return the names of the things in the description of a location, without their contents."""
    lines = look.partition("You also see")[0].splitlines()
    names = (match[1].strip() for match in map(_THING.match, lines) if match)
    return [name for name in names if name not in _UNNAMED]

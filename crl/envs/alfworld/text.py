"""Translation between TextWorld's texts and the agent's.

`full` is TextWorld's text with the commands that the game accepts. `compact` shortens the text for
the bundled tiny models:

    see cabinet 2, cabinet 1, fridge 1
    cabinet 1 closed
    shelf 1: mug 1, pen 2
    took mug 1
    mug 1 hot
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from crl.envs.actions import parse_choice
from crl.types import COMMANDS

INVALID = {
    "full": "Nothing happens: that is no command that can be given here.",
    "compact": "nothing happens.",
}
WON = {"full": "You have done it.", "compact": "done."}

_ARTICLE = re.compile(r"\b(?:a|an) (?=\w)")
_SHORT_FORMS = (
    (re.compile(r".*Looking quickly around you, you see (.*?)\..*", re.DOTALL), "see {0}"),
    (re.compile(r".*?[Tt]he ([\w ]+?) is closed\.", re.DOTALL), "{0} closed"),
    (re.compile(r".*?[Tt]he ([\w ]+?) is open\. In it, you see (.*)\.", re.DOTALL), "{0}: {1}"),
    (re.compile(r".*?On the ([\w ]+?), you see (.*)\.", re.DOTALL), "{0}: {1}"),
    (re.compile(r"You pick up the ([\w ]+) from the [\w ]+\."), "took {0}"),
    (re.compile(r"You (?:move|put) the ([\w ]+?) (?:to|in/on) the ([\w ]+)\."), "{0} in {1}"),
    (re.compile(r"You heat the ([\w ]+) using the [\w ]+\."), "{0} hot"),
    (re.compile(r"You cool the ([\w ]+) using the [\w ]+\."), "{0} cool"),
    (re.compile(r"You clean the ([\w ]+) using the [\w ]+\."), "{0} clean"),
    (re.compile(r"You (?:turn on the|turn off the) ([\w ]+)\."), "{0} on"),
    (re.compile(r"You close the ([\w ]+)\."), "{0} closed"),
    (re.compile(r"You are facing the (.*?)\..*"), "at {0}"),
    (re.compile(r"You are carrying: (.*)\."), "have {0}"),
    (re.compile(r"You are not carrying anything\."), "have nothing"),
    (re.compile(r"This is a ([\w ]+)\."), "{0}"),
    (re.compile(r"There's nothing special about ([\w ]+)\."), "{0}"),
)


def full(feedback: str, admissible: Sequence[str]) -> str:
    """Return TextWorld's text with the accepted commands."""
    return f"{feedback.strip()}{COMMANDS}{', '.join(admissible)}"


def compact(feedback: str) -> str:
    """Return TextWorld's text in few words. A text that is already short is not changed."""
    feedback = feedback.strip()
    for pattern, form in _SHORT_FORMS:
        if match := pattern.fullmatch(feedback):
            return form.format(*(_short_list(group) for group in match.groups()))
    return feedback


def _short_list(words: str) -> str:
    """Return a list in short form: "a mug 1, and a pen 2" → "mug 1, pen 2"."""
    return _ARTICLE.sub("", words.replace(", and ", ", "))


def chosen_command(action: str, admissible: tuple[str, ...]) -> str | None:
    """Return the command of `admissible` that the agent chose, or None if it chose none.

    ALFWorld's grammars differ in wording, so the agent may use the wording of any of them.
    """
    return parse_choice(action, admissible, _aliases(admissible))


@lru_cache(maxsize=256)
def _aliases(admissible: tuple[str, ...]) -> dict[str, str]:
    aliases: dict[str, str] = {}
    for command in admissible:
        if match := re.fullmatch(r"(?:move|put) (.+) (?:to|in/on) (.+)", command):
            thing, place = match.groups()
            aliases |= {f"move {thing} to {place}": command}
            aliases |= {
                f"{verb} {thing} {preposition} {place}": command
                for verb in ("put", "place")
                for preposition in _PREPOSITIONS
            }
        elif match := re.fullmatch(r"take (.+) from (.+)", command):
            thing, place = match.groups()
            aliases |= {f"{verb} {thing} from {place}": command for verb in ("pick up", "get")}
            aliases |= {f"{verb} {thing}": command for verb in ("take", "pick up", "get")}
        elif match := re.fullmatch(r"((?:clean|heat|cool) .+) with .+", command):
            aliases[match[1]] = command
        elif match := re.fullmatch(r"use (.+)", command):
            aliases |= {f"{verb} {match[1]}": command for verb in ("turn on", "toggle")}
    return aliases


_PREPOSITIONS = ("in/on", "in", "on", "into", "onto", "to")

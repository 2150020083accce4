"""Scripted player of the generated world. It reads only the texts, in either rendering.

It searches the entity that the question names, reads the name of the key in the entity's document,
searches the key, and answers with the wanted fact.
"""

from __future__ import annotations

import random
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Self

from crl.envs.search_qa.world import RELATIONS, WANT_KEY, Relation
from crl.errors import ConfigError

_RELATIONS = {relation.name: relation for kind in RELATIONS.values() for relation in kind}
_NOUNS = {
    relation.name: re.compile(re.escape(relation.noun).replace(r"\{x\}", r"(\w+)"), re.IGNORECASE)
    for relation in _RELATIONS.values()
}


@dataclass(frozen=True)
class Request:
    """Question of an episode."""

    subject: str
    """Entity that the question names, in lower case."""
    relation: str
    """Relation from the subject to the key."""
    wanted: str
    """Wanted fact about the key, or `WANT_KEY`."""

    @classmethod
    def read(cls, goal: str, observation: str) -> Self:
        """Read a goal and the first observation. Raise `ConfigError` for an official question."""
        if observation.startswith("want ") and (topic := read_topic(goal)):
            return cls(*topic, observation.removeprefix("want "))
        for relation in _RELATIONS.values():
            pattern = re.escape(f"Question: {relation.question}").replace(r"\{x\}", "(.*)")
            if not (match := re.fullmatch(pattern, observation)):
                continue
            if topic := read_topic(match[1]):
                return cls(*topic, relation.name)
            if match[1].isalnum():
                return cls(match[1].lower(), relation.name, WANT_KEY)
        reason = "is not of the generated world, which the scripted player was made for"
        raise ConfigError("task", goal, reason, "Play it yourself, without --scripted")


def read_topic(text: str) -> tuple[str, str] | None:
    """Return subject and relation of a text such as "about the author of NAME"."""
    text = text.removeprefix("about ")
    for name, pattern in _NOUNS.items():
        if match := pattern.fullmatch(text):
            return match[1].lower(), name
    return None


def facts(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (entity, relation, other entity) of the facts in a text, in lower case."""
    for line in text.splitlines():
        name, colon, rest = line.partition(": ")
        if colon and name.isalnum():
            for fact in rest.split(", "):
                relation, _, value = fact.partition(" ")
                if relation in _RELATIONS:
                    yield name, relation, value
    for relation in _RELATIONS.values():
        for match in _sentence(relation).finditer(text):
            yield match["x"].lower(), relation.name, match["value"].lower()


def _sentence(relation: Relation) -> re.Pattern[str]:
    pattern = re.escape(relation.sentence)
    return re.compile(
        pattern.replace(r"\{x\}", r"(?P<x>\w+)").replace(r"\{value\}", r"(?P<value>\w+)")
    )


class SearchPlayer:
    """Player that makes one search for every document that the answer needs."""

    def __init__(self, rng: random.Random) -> None:
        del rng  # no choice is random
        self._script: Generator[str, str, None] = _searches(Request("", "", ""), compact=True)
        self._action = ""

    def begin(self, goal: str, observation: str) -> None:
        """Start an episode. Raise `ConfigError` for an official question."""
        request = Request.read(goal, observation)
        self._script = _searches(request, compact=observation.startswith("want "))
        self._action = next(self._script)

    def act(self) -> str:
        return self._action

    def observe(self, observation: str) -> None:
        self._action = self._script.send(observation)


def _searches(request: Request, *, compact: bool) -> Generator[str, str, None]:
    """Yield actions and receive observations."""

    def write(name: str, text: str) -> str:
        return f"{name}[{text}]" if compact else f"<{name}>{text}</{name}>"

    entity, answer = request.subject, ""
    steps = [request.relation] + [request.wanted] * (request.wanted != WANT_KEY)
    for relation in steps:
        text = yield write("search", entity)
        found = (fact[2] for fact in facts(text) if fact[:2] == (entity, relation))
        entity = answer = next(found, entity)
    while True:
        yield write("answer", answer)

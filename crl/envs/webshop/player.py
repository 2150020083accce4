"""Scripted player of WebShop. It reads only the texts, in either rendering.

It is made for the generated catalogue, whose goals are "find me NOUN, ATTRIBUTE, …". The original's
generated goals begin in the same way, so it can also try these. It cannot read instructions that
people wrote.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Self

from crl.errors import ConfigError

_INSTRUCTION = re.compile(
    r"Instruction: \[SEP\] (.*?)(?: with (.*?))?"
    r"(?:, and price lower than ([\d.]+) dollars)? \[SEP\]"
)
_WANT = re.compile(r"want (.*?)(?:,? ?under ([\d.]+))?$", re.MULTILINE)
_FULL_LINK = re.compile(r"(\w{10}) \[SEP\] ([^[]*?) \[SEP\] \$([\d.]+)")
_COMPACT_LINK = re.compile(r"(?:^found|,) ([^\s,]+) (?:([^,]*) )?([\d.]+)(?:-[\d.]+)?(?=,|$)")


@dataclass(frozen=True)
class ResultLink:
    """Link to a product on a page of results."""

    name: str
    """Text to click."""
    title: str
    price: float
    """Lowest price of the product."""


@dataclass(frozen=True)
class Requirements:
    """Requirements of a purchase."""

    query: str
    """Noun and first attribute, which titles contain."""
    attributes: tuple[str, ...]
    values: tuple[str, ...]
    """Wanted values of options."""
    limit: float
    """Price limit, in dollars."""

    @classmethod
    def read(cls, goal: str, observation: str) -> Self:
        """Read the requirements from the first page and a goal, "find me NOUN, ATTRIBUTE, …"."""
        noun, *attributes = goal.removeprefix("find me ").split(", ")
        if match := _INSTRUCTION.search(observation):
            options, limit = match[2], match[3]
            values = (
                [option.partition(": ")[2] for option in options.split(", and ")] if options else []
            )
        else:
            match = _WANT.search(observation)
            options, limit = match.groups() if match else ("", None)
            values = [option.partition(" ")[2] for option in options.split(", ") if " " in option]
        return cls(
            " ".join([noun, *attributes[:1]]),
            tuple(attributes),
            tuple(values),
            float(limit or math.inf),
        )

    def match_score(self, link: ResultLink) -> int:
        """Return how well a link's title fits the query. Higher is better.

        For a full title this is the number of the query's words in the title. A compact title
        leaves out the words of the search. The score is then minus the number of its words.
        """
        words = re.findall(r"\w+", link.title.lower())
        return sum(word in words for word in self.query.split()) or -len(words)

    def met_by(self, link: ResultLink, item: str) -> bool:
        """Return whether a compact item page, opened by `link`, meets all requirements."""
        has_attributes = bool(self.attributes) and all(
            attribute in item for attribute in self.attributes
        )
        return has_attributes and link.price <= self.limit and set(self.values) <= _words(item)


class WebShopPlayer:
    """Player that opens products in the order of their `match_score` and reads their features.

    It buys the first product that meets all requirements. It buys the last product of equal score
    without reading its features.
    """

    def __init__(self, rng: random.Random) -> None:
        del rng  # no choice is random
        self._script = _shopping_script(Requirements("", (), (), math.inf))
        self._action = ""

    def begin(self, goal: str, observation: str) -> None:
        """Start an episode. Raise `ConfigError` for a goal that a person wrote."""
        if not goal.lower().startswith("find me "):
            reason = (
                "was written by a person, but the scripted player can only read generated goals"
            )
            raise ConfigError("task", goal, reason, "Play it yourself, without --scripted")
        self._script = _shopping_script(Requirements.read(goal, observation))
        self._action = next(self._script)

    def act(self) -> str:
        return self._action

    def observe(self, observation: str) -> None:
        instructions, button, page = observation.partition("Back to Search")
        self._action = self._script.send(page if button else instructions)


Script = Generator[str, str, None]
"""Generator that yields actions and receives their pages, without the instruction above them."""


def _shopping_script(requirements: Requirements) -> Script:
    search = f"search[{requirements.query}]"
    page, tried = (yield search), set[str]()
    while True:
        untried = [
            link
            for link in links(page)
            if link.name not in tried and link.price <= requirements.limit
        ]
        if not untried:
            page = yield "click[next >]" if "next >" in page.lower() else search
            continue
        link = max(untried, key=requirements.match_score)
        last = [requirements.match_score(other) for other in untried].count(
            requirements.match_score(link)
        ) == 1
        tried.add(link.name)
        item = yield f"click[{link.name}]"
        if not set(requirements.values) <= _words(item):
            page = yield "click[< prev]"
        elif last:
            page = yield from _buy(requirements)
        else:
            shows_features = "Buy Now" not in item  # on a compact page
            features = item if shows_features else (yield "click[features]").lower()
            if all(attribute in features for attribute in requirements.attributes):
                if not shows_features:
                    yield "click[< prev]"
                page = yield from _buy(requirements)
            else:
                page = yield search  # from any page: one turn less than the way back


def _buy(requirements: Requirements) -> Generator[str, str, str]:
    for value in requirements.values:
        yield f"click[{value}]"
    return (yield "click[buy now]")


def links(page: str) -> list[ResultLink]:
    """Return the links of a page of results."""
    found = _FULL_LINK.findall(page) or _COMPACT_LINK.findall(page)
    return [ResultLink(name, title, float(price)) for name, title, price in found]


def _words(page: str) -> set[str]:
    return {*page.split(" [SEP] "), *page.split()}

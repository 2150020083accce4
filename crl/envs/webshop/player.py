"""A scripted player of WebShop that sees only its texts, in either rendering.

It is made for the generated catalogue, whose goals are "find me NOUN, ATTRIBUTE, …". The original's own synthetic goals begin in the same
way and it does what it can; the instructions that people wrote it cannot read.
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
    r"Instruction: \[SEP\] (.*?)(?: with (.*?))?(?:, and price lower than ([\d.]+) dollars)? \[SEP\]"
)
_WANT = re.compile(r"want (.*?)(?:,? ?under ([\d.]+))?$", re.MULTILINE)
_FULL_LINK = re.compile(r"(\w{10}) \[SEP\] ([^[]*?) \[SEP\] \$([\d.]+)")
_COMPACT_LINK = re.compile(r"(?:^found|,) ([^\s,]+) (?:([^,]*) )?([\d.]+)(?:-[\d.]+)?(?=,|$)")


@dataclass(frozen=True)
class Link:
    """name: what is clicked; price: the lowest."""

    name: str
    title: str
    price: float


@dataclass(frozen=True)
class Errand:
    """What is to be bought. query: the noun and the first attribute, which titles name; values: of options; limit: of the price."""

    query: str
    attributes: tuple[str, ...]
    values: tuple[str, ...]
    limit: float

    @classmethod
    def read(cls, goal: str, observation: str) -> Self:
        """From the goal, "find me NOUN, ATTRIBUTE, …", and the first page."""
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

    def promise(self, link: Link) -> int:
        """How many of the query's words a full title has, or how few others a compact one, which does not repeat what was asked for."""
        words = re.findall(r"\w+", link.title.lower())
        return sum(word in words for word in self.query.split()) or -len(words)

    def met_by(self, link: Link, item: str) -> bool:
        """Whether a compact page of an item, behind this link, has everything."""
        told = bool(self.attributes) and all(attribute in item for attribute in self.attributes)
        return told and link.price <= self.limit and set(self.values) <= _words(item)


class WebShopPlayer:
    """Looks at what is found in the order of its promise and buys the first product that has everything, or the last that could.

    It reads a product's features to tell.
    """

    def __init__(self, rng: random.Random) -> None:
        del rng  # it leaves nothing to chance
        self._script = _shop(Errand("", (), (), math.inf))
        self._action = ""

    def begin(self, goal: str, observation: str) -> None:
        """Raises `ConfigError` for a goal that a person wrote."""
        if not goal.lower().startswith("find me "):
            reason = "is in a person's words, and the scripted player reads generated goals alone"
            raise ConfigError("task", goal, reason, "Play it yourself, without --scripted")
        self._script = _shop(Errand.read(goal, observation))
        self._action = next(self._script)

    def act(self) -> str:
        return self._action

    def observe(self, observation: str) -> None:
        instructed, button, page = observation.partition("Back to Search")
        self._action = self._script.send(page if button else instructed)


Script = Generator[str, str, None]
"""Yields actions and is sent the pages that they open, without the instruction above."""


def _shop(errand: Errand) -> Script:
    search = f"search[{errand.query}]"
    page, tried = (yield search), set[str]()
    while True:
        left = [
            link for link in links(page) if link.name not in tried and link.price <= errand.limit
        ]
        if not left:
            page = yield "click[next >]" if "next >" in page.lower() else search
            continue
        link = max(left, key=errand.promise)
        last = [errand.promise(other) for other in left].count(errand.promise(link)) == 1
        tried.add(link.name)
        item = yield f"click[{link.name}]"
        if not set(errand.values) <= _words(item):
            page = yield "click[< prev]"
        elif last:
            page = yield from _buy(errand)
        else:
            told_here = "Buy Now" not in item  # on a compact page
            features = item if told_here else (yield "click[features]").lower()
            if all(attribute in features for attribute in errand.attributes):
                if not told_here:
                    yield "click[< prev]"
                page = yield from _buy(errand)
            else:
                page = yield search  # from any page: one turn less than the way back


def _buy(errand: Errand) -> Generator[str, str, str]:
    for value in errand.values:
        yield f"click[{value}]"
    return (yield "click[buy now]")


def links(page: str) -> list[Link]:
    """Those of a page of results."""
    found = _FULL_LINK.findall(page) or _COMPACT_LINK.findall(page)
    return [Link(name, title, float(price)) for name, title, price in found]


def _words(page: str) -> set[str]:
    return {*page.split(" [SEP] "), *page.split()}

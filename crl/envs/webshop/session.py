"""A visit to the shop: which page is open, what can be clicked there, and what that does. Knows no rendering but the names of links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from crl.envs.webshop.catalogue import Product
from crl.envs.webshop.search import SearchEngine

BACK, NEXT, PREVIOUS, BUY = "back to search", "next >", "< prev", "buy now"

Page = Literal["search", "results", "item", "description", "features", "reviews"]
DETAILS: tuple[Page, ...] = ("description", "features", "reviews")

Namer = Callable[[Sequence[Product]], list[str]]
"""The texts of the links to the products of a page."""


class Session:
    """One customer's, who sees `per_page` results at a time. `chosen`: option name → value; `bought`: the product, once that is done."""

    def __init__(self, engine: SearchEngine, name_links: Namer, per_page: int) -> None:
        self._engine, self._name_links, self._per_page = engine, name_links, per_page
        self.page: Page = "search"
        self.number = 1
        self.keywords = ""
        self.found: list[Product] = []
        self.item: Product | None = None
        self.chosen: dict[str, str] = {}
        self.bought: Product | None = None

    @property
    def shown(self) -> list[Product]:
        """The products of the page of results."""
        return self.found[(self.number - 1) * self._per_page : self.number * self._per_page]

    @property
    def links(self) -> dict[str, Product]:
        return dict(zip(self._name_links(self.shown), self.shown, strict=True))

    @property
    def turning(self) -> list[str]:
        """The buttons that turn the page of results."""
        more = self.number * self._per_page < len(self.found)
        return ([PREVIOUS] if self.number > 1 else []) + ([NEXT] if more else [])

    @property
    def offered(self) -> dict[str, str]:
        """Value → name of the options of the item; of two names with the same value the last."""
        return (
            {value: name for name, values in self.item["options"].items() for value in values}
            if self.item
            else {}
        )

    @property
    def clickable(self) -> list[str]:
        """What can be clicked on the page, in lower case."""
        match self.page:
            case "search":
                return []
            case "results":
                return [BACK, *self.turning, *self.links]
            case "item":
                return [BACK, PREVIOUS, *self.offered, *DETAILS, BUY]
            case _:
                return [BACK, PREVIOUS]

    def search(self, keywords: str) -> None:
        """Can be done from every page."""
        self.keywords, self.found = keywords, self._engine.search(keywords)
        self._open_results(1)

    def click(self, target: str) -> None:
        """target: one of `clickable`."""
        if target == BACK:
            self.page = "search"
        elif target in (PREVIOUS, NEXT):
            self._turn(target)
        elif self.page == "results":
            self.page, self.item = "item", self.links[target]
        elif target == BUY:
            self.bought = self.item
        elif target in DETAILS:
            self.page = next(page for page in DETAILS if page == target)
        else:
            self.chosen[self.offered[target]] = target

    def _turn(self, target: str) -> None:
        if self.page in DETAILS:
            self.page = "item"
        elif self.page == "item":
            self._open_results(self.number)
        else:
            self._open_results(self.number + (1 if target == NEXT else -1))

    def _open_results(self, number: int) -> None:
        self.page, self.number, self.item, self.chosen = "results", number, None, {}

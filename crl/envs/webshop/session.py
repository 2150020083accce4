"""Visit to the shop: the open page, the links on it, and the effect of a click.

It does not depend on the rendering, except for the names of links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from crl.envs.webshop.catalogue import Product
from crl.envs.webshop.search import SearchEngine

BACK, NEXT, PREVIOUS, BUY = "back to search", "next >", "< prev", "buy now"

Page = Literal["search", "results", "item", "description", "features", "reviews"]
DETAILS: tuple[Page, ...] = ("description", "features", "reviews")

LinkNamer = Callable[[Sequence[Product]], list[str]]
"""Function that returns the texts of the links to the products of a page."""


class Session:
    """Visit of one customer, who sees `per_page` results at a time.

    `chosen` maps option names to values. `bought` is the product after the purchase.
    """

    def __init__(self, engine: SearchEngine, name_links: LinkNamer, per_page: int) -> None:
        self._engine, self._name_links, self._per_page = engine, name_links, per_page
        self.page: Page = "search"
        self.page_number = 1
        self.keywords = ""
        self.found: list[Product] = []
        self.item: Product | None = None
        self.chosen: dict[str, str] = {}
        self.bought: Product | None = None

    @property
    def page_products(self) -> list[Product]:
        """Products of the current page of results."""
        return self.found[
            (self.page_number - 1) * self._per_page : self.page_number * self._per_page
        ]

    @property
    def links(self) -> dict[str, Product]:
        return dict(zip(self._name_links(self.page_products), self.page_products, strict=True))

    @property
    def page_buttons(self) -> list[str]:
        """Buttons that turn the page of results."""
        has_more = self.page_number * self._per_page < len(self.found)
        return ([PREVIOUS] if self.page_number > 1 else []) + ([NEXT] if has_more else [])

    @property
    def option_of_value(self) -> dict[str, str]:
        """Value → name of the item's options. If two names have the same value, the last wins."""
        return (
            {value: name for name, values in self.item["options"].items() for value in values}
            if self.item
            else {}
        )

    @property
    def clickable(self) -> list[str]:
        """Texts that can be clicked on the page, in lower case."""
        match self.page:
            case "search":
                return []
            case "results":
                return [BACK, *self.page_buttons, *self.links]
            case "item":
                return [BACK, PREVIOUS, *self.option_of_value, *DETAILS, BUY]
            case _:
                return [BACK, PREVIOUS]

    def search(self, keywords: str) -> None:
        """Search for keywords and open the first page of results. Possible on every page."""
        self.keywords, self.found = keywords, self._engine.search(keywords)
        self._open_results(1)

    def click(self, target: str) -> None:
        """Click on `target`, which is one of `clickable`."""
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
            self.chosen[self.option_of_value[target]] = target

    def _turn(self, target: str) -> None:
        if self.page in DETAILS:
            self.page = "item"
        elif self.page == "item":
            self._open_results(self.page_number)
        else:
            self._open_results(self.page_number + (1 if target == NEXT else -1))

    def _open_results(self, page_number: int) -> None:
        self.page, self.page_number, self.item, self.chosen = "results", page_number, None, {}

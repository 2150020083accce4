"""Texts of the shop's pages: `full` as in the original, `compact` for the bundled tiny models.

All functions are pure functions of a session and its goal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from crl.envs.base import Rendering
from crl.envs.webshop.catalogue import Product, price_tag
from crl.envs.webshop.goals import NO_LIMIT, Goal
from crl.envs.webshop.session import DETAILS, NEXT, PREVIOUS, LinkNamer, Session

_BUTTONS = {PREVIOUS: "< Prev", NEXT: "Next >"}
_TITLE_WORDS = 6


@dataclass(frozen=True)
class Renderer:
    """Functions that turn pages into text."""

    page: Callable[[Session, Goal], str]
    """Text of the open page."""
    invalid: Callable[[Session], str]
    """Message after an invalid action."""
    bought: Callable[[float], str]
    """Last page, by the score in [0, 1]."""
    name_links: LinkNamer
    """Texts of the links on a page of results."""
    per_page: int
    """Number of results on a page."""


# ── full ──────────────────────────────────────────────────────────────────────────────────────────


def _full(session: Session, goal: Goal) -> str:
    """Return the page as blocks, separated by [SEP] (WebShop's text mode).

    An example of a page of results, as one line:

        Instruction: [SEP] find me … [SEP] Back to Search [SEP] Page 1 (Total results: 50) [SEP]
        Next > [SEP] B09ABCDEF1 [SEP] Title [SEP] $25.0
    """
    head = ["Instruction:", goal["instruction_text"]]
    if session.page == "search":
        return _blocks("WebShop", *head, "Search")
    if session.page == "results":
        page_buttons = [_BUTTONS[button] for button in session.page_buttons]
        items = [
            block
            for product in session.page_products
            for block in (product["asin"], product["Title"], price_tag(product))
        ]
        return _blocks(
            *head,
            "Back to Search",
            f"Page {session.page_number} (Total results: {len(session.found)})",
            *page_buttons,
            *items,
        )
    assert session.item is not None, "every other page is an item's"
    return _blocks(*head, "Back to Search", "< Prev", *_item_blocks(session, session.item))


def _item_blocks(session: Session, item: Product) -> list[str]:
    if session.page in DETAILS:
        return _detail(session.page, item) or [f"No {session.page.capitalize()}"]
    options = [block for name, values in item["options"].items() for block in (name, *values)]
    facts = [item["Title"], f"Price: {price_tag(item)}", f"Rating: {item['Rating']}"]
    return [*options, *facts, "Description", "Features", "Reviews", "Buy Now"]


def _detail(page: str, item: Product) -> list[str]:
    if page == "features":
        return list(item["BulletPoints"])
    return [item["Description"]] if page == "description" and item["Description"] else []


def _full_invalid(session: Session) -> str:
    clicks = "".join(f", click[{target}]" for target in session.clickable)
    return (
        f"That is no action on this page, and nothing happened. "
        f"The actions are: search[keywords]{clicks}."
    )


def _blocks(*blocks: str) -> str:
    return " [SEP] ".join(blocks)


# ── compact ───────────────────────────────────────────────────────────────────────────────────────


def _compact(session: Session, goal: Goal) -> str:
    """Return the same page in few words, without the instruction.

    Products are named by their brand and by the words of their title that were not searched for. An
    item's page also lists its features until an option is chosen. Examples of the first page, of
    results, and of an item:

        want color red, size 9, under 60
        found norda 45, savo webcam 20-25, next >
        color: red blue / size: 8 9 / has wireless, fast charging        (" / " is a line break)
    """
    if session.page == "search":
        return f"want {_requirements_text(goal)}"
    if session.page == "results":
        searched_words = session.keywords.split()
        found = [
            " ".join([link, *_unsearched_words(product, searched_words), _price(product)])
            for link, product in session.links.items()
        ]
        return f"found {', '.join([*found, *session.page_buttons]) or 'nothing'}"
    item = session.item
    assert item is not None, "every other page is an item's"
    if session.page in DETAILS:
        return _detail_text(session.page, item) or "nothing"
    if session.chosen:
        return f"chosen {' '.join(session.chosen.values())}"
    lines = [f"{name}: {' '.join(values)}" for name, values in item["options"].items()]
    return "\n".join([*lines, f"has {_detail_text('features', item) or 'nothing'}"])


def _detail_text(page: str, item: Product) -> str:
    return ", ".join(_shortened(text) for text in _detail(page, item))


def _requirements_text(goal: Goal) -> str:
    options = goal["goal_options"]
    texts = (
        [f"{name} {value}" for name, value in options.items()]
        if isinstance(options, dict)
        else list(options)
    )
    limit = [f"under {goal['price_upper']:g}"] if goal["price_upper"] < NO_LIMIT else []
    return ", ".join([*texts, *limit]) or "it"


def _brands(products: Sequence[Product]) -> list[str]:
    """Return the products' brands. Repeated brands get a number.

    A brand with a number never equals the brand of another product.
    """
    brands, names = [brand(product) for product in products], list[str]()
    for name in brands:
        numbered = (f"{name}{n}" for n in count(2))
        unused = (other for other in numbered if other not in names and other not in brands)
        names.append(next(unused) if name in names else name)
    return names


def brand(product: Product) -> str:
    """Return the product's name on compact pages: the first word of its title.

    In the generated catalogue this word is the brand.
    """
    return _title(product)[0]


def _unsearched_words(product: Product, searched_words: Sequence[str]) -> list[str]:
    return [word for word in _title(product)[1:] if word not in searched_words]


def _price(product: Product) -> str:
    return "-".join(f"{price:g}" for price in product["pricing"])


def _title(product: Product) -> list[str]:
    """Return the first words of a title, up to the first comma."""
    return product["Title"].lower().split(",")[0].split()[:_TITLE_WORDS] or [
        product["asin"].lower()
    ]


def _shortened(text: str) -> str:
    return " ".join(text.lower().split(":")[0].split()[:_TITLE_WORDS])


RENDERERS: dict[Rendering, Renderer] = {
    "full": Renderer(
        page=_full,
        invalid=_full_invalid,
        bought=lambda score: (
            f"Thank you for shopping with us! [SEP] Your score (min 0.0, max 1.0) [SEP] {score:.4g}"
        ),
        name_links=lambda products: [product["asin"].lower() for product in products],
        per_page=10,
    ),
    "compact": Renderer(
        page=_compact,
        invalid=lambda session: "unknown action.",
        bought=lambda score: f"bought. score {round(100 * score)}",
        name_links=_brands,
        per_page=5,
    ),
}

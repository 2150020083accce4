"""Lessons about a need for the bundled tiny models, episode digests, and the ground truth.

A lesson is one sentence. Diagnostics compare lessons with the ground truth. Only its features
distinguish the right product of a family, and opening the features takes turns. A useful lesson
therefore names the product by its brand, as the compact pages do. The other kinds are true, useless
or misleading.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from crl.envs.actions import parse_call
from crl.envs.curriculum import LessonVerdict
from crl.envs.webshop.player import Requirements, links
from crl.types import Segment, Task, task_text

if TYPE_CHECKING:
    from crl.envs.webshop.shop import Shop

LESSONS = {
    "buy": "buy {brand}.",
    "skip": "do not buy {brand}.",
    "read": "read the features first.",
    "price": "look at the price.",
    "options": "choose every option.",
    "first": "buy the first one.",
    "careful": "be careful.",
}
"""Kinds of lesson → their wording."""

_PATTERNS = {
    kind: re.compile(re.escape(text).replace(r"\{brand\}", "([a-z]+)"))
    for kind, text in LESSONS.items()
}
_SCORE = re.compile(r"bought\. score (\d+)")


def lesson(kind: str, brand: str = "") -> str:
    """Return the lesson of this kind."""
    return LESSONS[kind].format(brand=brand)


def read(text: str) -> tuple[str, str | None]:
    """Return (kind, brand) of a lesson. The brand is None if the lesson names none.

    The kind is "other" if the text is not one of `LESSONS`.
    """
    for kind, pattern in _PATTERNS.items():
        if match := pattern.fullmatch(text):
            return kind, match[1] if match.groups() else None
    return "other", None


# ── episode digests ───────────────────────────────────────────────────────────────────────────────


def digest(segments: Sequence[Segment]) -> str:
    """Summarise a visit to the compact shop, from its texts alone.

    The digest holds the opened products that are wrong, the right one, and the purchase:

        wrong alvo velto                     (or: wrong none)
        right norda                          (or: right unknown)
        bought norda, score 100              (or: bought nothing)
    """
    visit = _read_visit(segments)
    bought = (
        f"bought {visit.last_opened}, score {visit.score}"
        if visit.score is not None
        else "bought nothing"
    )
    return f"wrong {' '.join(visit.wrong) or 'none'}\nright {visit.right or 'unknown'}\n{bought}"


def right_brand(segments: Sequence[Segment]) -> str | None:
    """Return the brand to buy, or None if the visit's texts do not show it."""
    return _read_visit(segments).right


def wrong_brands(segments: Sequence[Segment]) -> list[str]:
    """Return the opened brands that the visit's texts show to be wrong."""
    return _read_visit(segments).wrong


@dataclass
class _Visit:
    """Result of a visit, according to its texts."""

    right: str | None = None
    wrong: list[str] = field(default_factory=list)
    last_opened: str = ""
    """Brand of the item that was opened last."""
    score: int | None = None
    """Score of the purchase, from 0 to 100. None without a purchase."""

    def open(self, brand: str, *, fits: bool) -> None:
        self.last_opened = brand
        if fits:
            self.right = self.right or brand
        elif brand not in self.wrong:
            self.wrong.append(brand)

    def buy(self, score: int) -> None:
        self.score = score
        if score == 100:
            self.right = self.last_opened
            self.wrong = [brand for brand in self.wrong if brand != self.last_opened]


def _read_visit(segments: Sequence[Segment]) -> _Visit:
    pages = list(_pages(segments))
    if not pages:
        raise ValueError("the visit has no page")
    (_, page), *answers = pages
    requirements, visit = Requirements.read(task_text(segments), page), _Visit()
    for clicked, answer in answers:
        if score := _SCORE.fullmatch(answer):
            visit.buy(int(score[1]))
        elif link := next((link for link in links(page) if link.name == clicked), None):
            visit.open(clicked, fits=requirements.met_by(link, answer))
        page = answer
    return visit


def _pages(segments: Sequence[Segment]) -> Iterator[tuple[str, str]]:
    """Yield each page with the text of the click that opened it.

    The text is empty for the first page and after a search. Invalid actions are left out.
    """
    clicked = ""
    for segment in segments:
        if segment.origin == "policy":
            action = parse_call(segment.text, {"search": None, "click": None})
            clicked = action[1].lower() if action and action[0] == "click" else ""
        elif segment.origin == "env" and not segment.text.startswith("unknown action."):
            yield clicked, segment.text


# ── ground truth, for diagnostics only ────────────────────────────────────────────────────────────


class WebShopAdvisor:
    """`Advisor` of the shop. Right advice names the wanted product."""

    def right(self, task: Task) -> str:
        return lesson("buy", _brands(task)[0])

    def wrong(self, task: Task, rng: random.Random) -> str:
        """Return the advice to buy a similar product.

        The original's catalogue may have no similar product. The advice then names a brand that
        does not exist.
        """
        right, *others = _brands(task)
        return lesson(
            "buy", rng.choice([brand for brand in others if brand != right] or [f"un{right}"])
        )

    def judge(self, task: Task, text: str) -> LessonVerdict:
        kind, brand = read(text)
        correct = kind == "buy" and brand == _brands(task)[0]
        return LessonVerdict("wrong buy" if kind == "buy" and not correct else kind, correct)

    def informative(self, segments: Sequence[Segment]) -> bool:
        return right_brand(segments) is not None


def _brands(task: Task) -> list[str]:
    from crl.envs.webshop.shop import open_shop

    return similar_brands(open_shop(), task)


def similar_brands(shop: Shop, task: Task) -> list[str]:
    """Return the brands of the products that a search for the wanted product finds first.

    The wanted product's brand is the first. The others have the same query and the same first
    attribute. If no other product has both, the others only have the same query.
    """
    from crl.envs.webshop.text import brand

    goal = shop.goal(int(task.params["lgen"]), int(task.params["core"]))
    candidates = [
        product
        for product in shop.products
        if product["query"] == goal["query"] and product["asin"] != goal["asin"]
    ]
    similar = [product for product in candidates if goal["attributes"][0] in product["Attributes"]]
    wanted = next(product for product in shop.products if product["asin"] == goal["asin"])
    return [brand(product) for product in (wanted, *(similar or candidates))]

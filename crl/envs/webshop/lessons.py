"""What can be said about a need in one sentence, for the bundled tiny models: lessons, the visit in few words, and the truth that
diagnostics hold them against.

What sets the right product of a family apart is told by its features alone, and opening it takes turns. So a lesson helps that names
the product: by its brand, as the compact pages do. The other kinds are true, useless or misleading.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from crl.envs.actions import parse_call
from crl.envs.base import Verdict
from crl.envs.webshop.player import Errand, links
from crl.types import Segment, Task

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
"""The kinds of lesson, and their wording."""

_PATTERNS = {
    kind: re.compile(re.escape(text).replace(r"\{brand\}", "([a-z]+)"))
    for kind, text in LESSONS.items()
}
_SCORE = re.compile(r"bought\. score (\d+)")


def lesson(kind: str, brand: str = "") -> str:
    """The lesson of this kind."""
    return LESSONS[kind].format(brand=brand)


def read(text: str) -> tuple[str, str | None]:
    """(kind, brand) of a lesson; kind "other" when it is none of these."""
    for kind, pattern in _PATTERNS.items():
        if match := pattern.fullmatch(text):
            return kind, match[1] if match.groups() else None
    return "other", None


# ── the visit in few words ──────────────────────────────────────────────────────────────────────────────────────────


def digest(segments: Sequence[Segment]) -> str:
    """What a visit to the compact shop comes to, read off its texts alone: which of the products that were opened is right, which are
    not, and the purchase.

    wrong alvo velto / right norda / bought norda, score 100        (or: wrong none / right unknown / bought nothing)
    """
    visit = _visit(segments)
    bought = (
        f"bought {visit.bought}, score {visit.score}"
        if visit.score is not None
        else "bought nothing"
    )
    return f"wrong {' '.join(visit.wrong) or 'none'}\nright {visit.right or 'unknown'}\n{bought}"


def right_brand(segments: Sequence[Segment]) -> str | None:
    """The brand to buy, as far as the visit's texts tell; None when they do not."""
    return _visit(segments).right


def wrong_brands(segments: Sequence[Segment]) -> list[str]:
    """The brands that were opened and are not to be bought, as far as the visit's texts tell."""
    return _visit(segments).wrong


@dataclass
class _Visit:
    """What its texts tell. bought: the brand of the last item; score: of its purchase, of 100, None without one."""

    right: str | None = None
    wrong: list[str] = field(default_factory=list)
    bought: str = ""
    score: int | None = None

    def open(self, brand: str, *, fits: bool) -> None:
        self.bought = brand
        if fits:
            self.right = self.right or brand
        elif brand not in self.wrong:
            self.wrong.append(brand)

    def buy(self, score: int) -> None:
        self.score = score
        if score == 100:
            self.right = self.bought
            self.wrong = [brand for brand in self.wrong if brand != self.bought]


def _visit(segments: Sequence[Segment]) -> _Visit:
    goal = next(segment.text for segment in segments if segment.origin == "task")
    (_, page), *answers = _answers(segments)
    errand, visit = Errand.read(goal, page), _Visit()
    for clicked, answer in answers:
        if score := _SCORE.fullmatch(answer):
            visit.buy(int(score[1]))
        elif link := next((link for link in links(page) if link.name == clicked), None):
            visit.open(clicked, fits=errand.met_by(link, answer))
        page = answer
    return visit


def _answers(segments: Sequence[Segment]) -> Iterator[tuple[str, str]]:
    """What was clicked ("": nothing) and the page that it opened, without what was no action; the first page comes first."""
    clicked = ""
    for segment in segments:
        if segment.origin == "policy":
            action = parse_call(segment.text, {"search": None, "click": None})
            clicked = action[1].lower() if action and action[0] == "click" else ""
        elif segment.origin == "env" and not segment.text.startswith("unknown action."):
            yield clicked, segment.text


# ── the truth, for diagnostics alone ────────────────────────────────────────────────────────────────────────────────


class WebShopAdvisor:
    """`Advisor` of the shop: right advice names the product that somebody is sent for."""

    def right(self, task: Task) -> str:
        return lesson("buy", _brands(task)[0])

    def wrong(self, task: Task, rng: random.Random) -> str:
        """Where nothing else is like the right product, as may be in the original's catalogue, one that is not there."""
        right, *others = _brands(task)
        return lesson(
            "buy", rng.choice([brand for brand in others if brand != right] or [f"un{right}"])
        )

    def judge(self, task: Task, text: str) -> Verdict:
        kind, brand = read(text)
        correct = kind == "buy" and brand == _brands(task)[0]
        return Verdict("wrong buy" if kind == "buy" and not correct else kind, correct)

    def informative(self, segments: Sequence[Segment]) -> bool:
        return right_brand(segments) is not None


def _brands(task: Task) -> list[str]:
    from crl.envs.webshop.shop import open_shop

    return alike(open_shop(), task)


def alike(shop: Shop, task: Task) -> list[str]:
    """The brands of the products that a search for the wanted one finds first: its own, then those of what shares its query and its first
    attribute, or its query where nothing else shares both."""
    from crl.envs.webshop.text import brand

    goal = shop.goal(int(task.params["lgen"]), int(task.params["core"]))
    rivals = [
        product
        for product in shop.products
        if product["query"] == goal["query"] and product["asin"] != goal["asin"]
    ]
    near = [product for product in rivals if goal["attributes"][0] in product["Attributes"]]
    wanted = next(product for product in shop.products if product["asin"] == goal["asin"])
    return [brand(product) for product in (wanted, *(near or rivals))]

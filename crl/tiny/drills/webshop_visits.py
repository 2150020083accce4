"""Scripted visits to the compact shop: good and bad play, and episodes for the extractor.

The visits use separately generated shops. Their vocabulary is the same as in other shops. The right
product can be found only by looking, not from memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from crl.envs.webshop import NAME
from crl.envs.webshop.catalogue import products
from crl.envs.webshop.game import WebShopGame
from crl.envs.webshop.generate import generate
from crl.envs.webshop.lessons import LESSONS, lesson, similar_brands
from crl.envs.webshop.player import Requirements, ResultLink, links
from crl.envs.webshop.shop import Shop
from crl.methods.parts.asking import COMPACT_CALL, COMPACT_NO_RESULT
from crl.methods.parts.rollouts import ChatContext
from crl.modeling.demonstrations import Demonstration
from crl.tiny.drills.drill import OFFER, Episode, as_hit, weighted_choice
from crl.types import Observation, Segment, Task

TURNS = 11
"""Turn limit, as in tasks/webshop.toml."""

SHOPS = 8
"""Number of generated shops; each has 750 needs."""

CONTEXT = ChatContext({NAME: ""})
OTHER_KINDS = [kind for kind in LESSONS if kind != "buy"]
REPLIES = (("right", 0.60), ("random", 0.10), ("other", 0.10), ("nothing", 0.20))
"""Shares of the replies to a question."""

Visit = Generator[str, str, None]
"""Generator that yields actions and receives the resulting pages.

It starts on the page of results.
"""
Persona = Callable[[Requirements, str, random.Random], Visit]
"""Function that starts a visit, from the requirements and a page of results."""


# ── personas ──────────────────────────────────────────────────────────────────────────────────────


def buy_matching(requirements: Requirements, page: str, rng: random.Random) -> Visit:
    """Open affordable products in page order, and buy the first one that meets the requirements.

    All options are chosen.
    """
    for link in candidates(requirements, page):
        item = yield f"click[{link.name}]"
        if requirements.met_by(link, item):
            yield from buy(requirements.values, item)
        yield "click[< prev]"
    yield from browse(requirements, page, rng)


def buy_random(requirements: Requirements, page: str, rng: random.Random) -> Visit:
    """Buy a random affordable product with all options."""
    item = yield f"click[{rng.choice(candidates(requirements, page)).name}]"
    yield from buy(requirements.values, item)


def buy_first(requirements: Requirements, page: str, rng: random.Random) -> Visit:
    """Buy the first product of the page, whatever the price."""
    item = yield f"click[{links(page)[0].name}]"
    yield from buy(requirements.values, item)


def buy_cheapest(requirements: Requirements, page: str, rng: random.Random) -> Visit:
    """Buy the cheapest product."""
    item = yield f"click[{min(candidates(requirements, page), key=lambda link: link.price).name}]"
    yield from buy(requirements.values, item)


def buy_incomplete(requirements: Requirements, page: str, rng: random.Random) -> Visit:
    """Buy a random affordable product, with one option missing."""
    item = yield f"click[{rng.choice(candidates(requirements, page)).name}]"
    yield from buy(rng.sample(requirements.values, len(requirements.values) - 1), item)


def browse(requirements: Requirements, page: str, rng: random.Random) -> Visit:
    """Open one product after another and buy nothing."""
    while True:
        yield f"click[{rng.choice(links(page)).name}]"
        yield "click[< prev]"


def follower(name: str, fallback: Persona) -> Persona:
    """Return a persona that buys the advised product with all options, whatever the price.

    If the product is not on the page, the persona `fallback` shops instead.
    """

    def persona(requirements: Requirements, page: str, rng: random.Random) -> Visit:
        if name not in (link.name for link in links(page)):
            yield from fallback(requirements, page, rng)
        item = yield f"click[{name}]"
        yield from buy(requirements.values, item)

    return persona


def avoider(name: str) -> Persona:
    """Return a persona that buys any product except the one that the advice excludes."""

    def persona(requirements: Requirements, page: str, rng: random.Random) -> Visit:
        others = [link for link in candidates(requirements, page) if link.name != name]
        item = yield f"click[{rng.choice(others or links(page)).name}]"
        yield from buy(requirements.values, item)

    return persona


def persona_for_lesson(kind: str, name: str, fallback: Persona) -> Persona:
    """Return the persona that follows a lesson, or `fallback` if the lesson cannot be followed.

    `crl.envs.webshop.lessons` lists the kinds.
    """
    match kind:
        case "buy":
            return follower(name, fallback)
        case "skip":
            return avoider(name)
        case "read":
            return buy_matching
        case "price":
            return buy_cheapest
        case "first":
            return buy_first
    return fallback


def candidates(requirements: Requirements, page: str) -> list[ResultLink]:
    """Return the affordable products of the searched kind.

    If there are none, return all affordable products; if there are none either, all products.
    """
    all_links = links(page)
    affordable = [link for link in all_links if link.price <= requirements.limit]
    return [link for link in affordable if not link.title] or affordable or all_links


def buy(values: Sequence[str], item: str) -> Visit:
    """Buy the item with those of the options `values` that its page offers."""
    for value in values:
        if value in item.split():
            yield f"click[{value}]"
    yield "click[buy now]"


def agent_spelling(action: str) -> str:
    """Return the action in the agent's spelling.

    A space precedes the argument, so that a word has the same tokens as on the page.
    """
    return action.replace("[", "[ ")


# ── visits ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ShopVisits:
    """Episodes of the compact shop."""

    personas: tuple[tuple[Persona, float], ...]
    """Shares of the personas that play without advice, or ignore it."""
    advice: tuple[tuple[str, float], ...]
    """Shares of the advice at the start.

    The kinds are no advice ("none"), to buy the right product ("right"), to buy any of the similar
    products ("random"), or a lesson of another kind ("other").
    """
    fidelity: float = 0.85
    """Probability that advice of kind "other" is followed; "right" and "random" always are."""
    offer: bool = False
    """True if the agent may ask; some agents do so."""
    turns: int = TURNS
    """Maximal turns of an episode."""

    def make(self, rng: random.Random, n: int) -> Iterator[Demonstration]:
        return (episode.segments for episode in self.episodes(rng, n))

    def episodes(self, rng: random.Random, n: int) -> Iterator[Episode]:
        games = [WebShopGame("compact", shop) for shop in demonstration_shops()]
        for _ in range(n):
            number = rng.randrange(SHOPS)
            yield self._episode(games[number], demonstration_shops()[number], rng)

    def _episode(self, game: WebShopGame, shop: Shop, rng: random.Random) -> Episode:
        task = demonstration_task(shop, rng)
        advice = self._draw_advice(shop, task, rng)
        hint = as_hit(lesson(*advice), task) if advice else None
        persona = weighted_choice(self.personas, rng)
        if advice and (advice[0] == "buy" or rng.random() < self.fidelity):
            persona = persona_for_lesson(*advice, persona)
        observation = game.reset(task)
        requirements = Requirements.read(task.goal, observation)
        *head, first = CONTEXT.opening(task, Observation(observation), [hint] if hint else [])
        segments = [*head, *([OFFER] if self.offer else []), first]
        if self.offer and rng.random() < (0.25 if advice else 0.6):
            reply, persona = question_reply(shop, task, persona, rng)
            segments += [
                Segment("assistant", COMPACT_CALL, "tool_call"),
                Segment("user", reply, "tool_result"),
            ]
        visit, action, success = None, f"search[{requirements.query}]", False
        for _ in range(self.turns):
            result = game.step(action)
            segments += [
                Segment("assistant", agent_spelling(action), "policy"),
                *CONTEXT.feedback(result),
            ]
            if result.done:
                success = result.success
                break
            if visit is None:
                visit = persona(requirements, result.text, rng)
                action = next(visit)
            else:
                action = visit.send(result.text)
        return Episode(task, hint, tuple(segments), success)

    def _draw_advice(self, shop: Shop, task: Task, rng: random.Random) -> tuple[str, str] | None:
        """Return kind and brand of the lesson at the start, or None."""
        advice = weighted_choice(self.advice, rng)
        if advice == "none":
            return None
        brands = similar_brands(shop, task)
        kind = rng.choice(OTHER_KINDS) if advice == "other" else "buy"
        return kind, brands[0] if advice == "right" else rng.choice(brands)


def question_reply(
    shop: Shop, task: Task, fallback: Persona, rng: random.Random
) -> tuple[str, Persona]:
    """Return the reply to a question and the persona that follows it.

    The reply is to buy the right product, to buy any similar product, another lesson, or nothing.
    """
    reply, brands = weighted_choice(REPLIES, rng), similar_brands(shop, task)
    if reply == "nothing":
        return COMPACT_NO_RESULT, fallback
    kind, name = (
        rng.choice(OTHER_KINDS) if reply == "other" else "buy",
        brands[0] if reply == "right" else rng.choice(brands),
    )
    return lesson(kind, name), persona_for_lesson(kind, name, fallback)


@cache
def demonstration_shops() -> tuple[Shop, ...]:
    return tuple(
        Shop(products(generate(seed)), "a generated catalogue", {}) for seed in range(1, SHOPS + 1)
    )


def demonstration_task(shop: Shop, rng: random.Random) -> Task:
    """Return a task in this shop."""
    lgen, core = rng.randrange(1 << 30), rng.randrange(1 << 30)
    need = shop.need(lgen)
    return Task(NAME, core, "unseen", need.text, {"lgen": lgen, "core": core, "place": need.text})


PERSONAS: tuple[tuple[Persona, float], ...] = (
    (buy_matching, 0.35),
    (buy_random, 0.30),
    (buy_incomplete, 0.15),
    (buy_first, 0.10),
    (browse, 0.10),
)
ACTOR_VISITS = ShopVisits(
    PERSONAS, advice=(("none", 0.38), ("right", 0.27), ("random", 0.13), ("other", 0.22))
)
CHOICE_VISITS = replace(
    ACTOR_VISITS, advice=(("none", 0.20), ("right", 0.40), ("random", 0.40)), turns=3
)
"""Visits of three turns, up to the first option.

Whole visits are long, and the actor must first learn to copy a lesson's word into an action.
"""
ASKING_VISITS = replace(
    ACTOR_VISITS,
    advice=(("none", 0.55), ("right", 0.20), ("random", 0.10), ("other", 0.15)),
    offer=True,
)
EXTRACTOR_VISITS = replace(
    ACTOR_VISITS, advice=(("none", 0.50), ("right", 0.15), ("random", 0.20), ("other", 0.15))
)

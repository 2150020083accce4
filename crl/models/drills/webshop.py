"""The shop's drills. The actor sees scripted visits, most of them under advice, in some of which it may ask; and it judges lessons. The
extractor sees what such visits come to, and answers with one lesson of a kind drawn at random, which is true of its episode where it
names a product. It also looks at lessons for agents that ask, and tidies up what is known of a need.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from crl.envs.webshop import NAME
from crl.envs.webshop.lessons import LESSONS, digest, lesson, read, right_brand, wrong_brands
from crl.envs.webshop.words import BRANDS
from crl.models.drills import drill
from crl.models.drills.drill import Drill, Episode, learnt, op, said
from crl.models.drills.webshop_visits import (
    ACTOR_VISITS,
    ASKING_VISITS,
    CHOICES,
    EXTRACTOR_VISITS,
    OTHER_KINDS,
    demonstration_shops,
    demonstration_task,
)
from crl.models.warm_start import Demonstration
from crl.types import Task

# ── the extractor ───────────────────────────────────────────────────────────────────────────────────────────────────


def lessons(rng: random.Random, n: int) -> Iterator[Demonstration]:
    """Answers to finished visits: one op, of a kind drawn uniformly."""
    return drill.lessons(
        digest,
        EXTRACTOR_VISITS.episodes(rng, n),
        lambda episode: answer(rng.choice(list(LESSONS)), episode),
    )


def answer(kind: str, episode: Episode) -> str:
    """The lesson of this kind that the episode teaches, as an op in its one spelling.

    What to buy is what the episode shows, and corrects a hint that said another; what not to buy is what it opened first of what is
    wrong. Where it shows none, nothing is learnt.
    """
    names = {
        "buy": [right] if (right := right_brand(episode.segments)) else [],
        "skip": wrong_brands(episode.segments),
    }.get(kind, [""])
    return learnt(lesson(kind, names[0]) if names else None, episode.hint, claims)


def refinements(rng: random.Random, n: int) -> Iterator[Demonstration]:
    """A lesson on a need says the same at every moment of a visit: nothing is to be fitted."""
    for episode in EXTRACTOR_VISITS.episodes(rng, n):
        segments = drill.until_asked(episode, rng, 3)
        yield [
            *drill.refine_prompt(digest, episode.task, segments, some_lesson(rng)),
            said(op("return")),
        ]


def merges(rng: random.Random, n: int) -> Iterator[Demonstration]:
    return drill.merges(rng, n, NAME, some_lesson, claims)


def some_lesson(rng: random.Random) -> str:
    """Most of what a bank holds of a need is what to buy."""
    return lesson("buy" if rng.random() < 0.65 else rng.choice(OTHER_KINDS), rng.choice(BRANDS))


def claims(text: str) -> bool:
    return read(text)[0] == "buy"


# ── the actor ───────────────────────────────────────────────────────────────────────────────────────────────────────


def verdicts(rng: random.Random, n: int) -> Iterator[Demonstration]:
    kinds = list(LESSONS)
    return drill.verdicts(
        rng, ((task, lesson(rng.choice(kinds), rng.choice(BRANDS))) for task in _tasks(rng, n))
    )


def _tasks(rng: random.Random, n: int) -> Sequence[Task]:
    return [demonstration_task(rng.choice(demonstration_shops()), rng) for _ in range(n)]


COPYING = (
    Drill("shop visits", 6_500, ACTOR_VISITS.make),
    Drill("shop choices", 9_000, CHOICES.make),
)
"""Where what is said is on the page, word for word."""
ACTOR_DRILLS = (
    *COPYING,
    Drill("shop visits with questions", 1_000, ASKING_VISITS.make),
    Drill("shop verdicts", 2_000, verdicts),
)
EXTRACTOR_DRILLS = (
    Drill("shop lessons", 12_000, lessons),
    Drill("shop refinements", 1_000, refinements),
    Drill("shop merges", 6_000, merges),
)

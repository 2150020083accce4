"""Drills of the shop.

The actor imitates scripted visits. Most of them are played under advice; in some the agent may
ask. The actor also judges lessons. The extractor answers digests of visits with one lesson of a
randomly drawn kind. A lesson that names a product is true of its episode. The extractor also
answers questions of agents and merges the lessons of a need.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from crl.envs.webshop import NAME
from crl.envs.webshop.lessons import LESSONS, digest, lesson, read, right_brand, wrong_brands
from crl.envs.webshop.words import BRANDS
from crl.modeling.demonstrations import Demonstration
from crl.tiny.drills import drill
from crl.tiny.drills.drill import Drill, Episode, demonstrated, lesson_answer, op_answer
from crl.tiny.drills.webshop_visits import (
    ACTOR_VISITS,
    ASKING_VISITS,
    CHOICE_VISITS,
    EXTRACTOR_VISITS,
    OTHER_KINDS,
    demonstration_shops,
    demonstration_task,
)
from crl.types import Task

# ── the extractor ─────────────────────────────────────────────────────────────────────────────────


def lessons(rng: random.Random, n: int) -> Iterator[Demonstration]:
    """Yield answers to finished visits: one op each, of a uniformly drawn kind."""
    return drill.lessons(
        digest,
        EXTRACTOR_VISITS.episodes(rng, n),
        lambda episode: answer(rng.choice(list(LESSONS)), episode),
    )


def answer(kind: str, episode: Episode) -> str:
    """Return the lesson of this kind that the episode teaches, as an op in its canonical spelling.

    "buy" names the right product that the episode shows, and corrects a hint with another product.
    "skip" names the first wrong product that was opened. If the episode shows no such product,
    nothing is learnt.
    """
    names = {
        "buy": [right] if (right := right_brand(episode.segments)) else [],
        "skip": wrong_brands(episode.segments),
    }.get(kind, [""])
    return lesson_answer(lesson(kind, names[0]) if names else None, episode.hint, makes_claim)


def refinements(rng: random.Random, n: int) -> Iterator[Demonstration]:
    """Yield answers to questions. No lesson is adapted: a lesson on a need holds in every turn."""
    for episode in EXTRACTOR_VISITS.episodes(rng, n):
        segments = drill.cut_at_question(episode, rng, 3)
        yield [
            *drill.refine_prompt(digest, episode.task, segments, random_lesson(rng)),
            demonstrated(op_answer("return")),
        ]


def merges(rng: random.Random, n: int) -> Iterator[Demonstration]:
    return drill.merges(rng, n, NAME, random_lesson, makes_claim)


def random_lesson(rng: random.Random) -> str:
    """Return a random lesson. Most lessons of a bank say which product to buy."""
    return lesson("buy" if rng.random() < 0.65 else rng.choice(OTHER_KINDS), rng.choice(BRANDS))


def makes_claim(text: str) -> bool:
    return read(text)[0] == "buy"


# ── the actor ─────────────────────────────────────────────────────────────────────────────────────


def verdicts(rng: random.Random, n: int) -> Iterator[Demonstration]:
    kinds = list(LESSONS)
    return drill.verdicts(
        rng,
        ((task, lesson(rng.choice(kinds), rng.choice(BRANDS))) for task in _random_tasks(rng, n)),
    )


def _random_tasks(rng: random.Random, n: int) -> Sequence[Task]:
    return [demonstration_task(rng.choice(demonstration_shops()), rng) for _ in range(n)]


COPY_DRILLS = (
    Drill("shop visits", 6_500, ACTOR_VISITS.make, NAME),
    Drill("shop choices", 9_000, CHOICE_VISITS.make, NAME),
)
"""Drills in which advice and page contain the same words."""
ACTOR_DRILLS = (
    *COPY_DRILLS,
    Drill("shop visits with questions", 1_000, ASKING_VISITS.make, NAME, "ask"),
    Drill("shop verdicts", 2_000, verdicts, NAME, "critic"),
)
EXTRACTOR_DRILLS = (
    Drill("shop lessons", 12_000, lessons, NAME),
    Drill("shop refinements", 1_000, refinements, NAME, "ask"),
    Drill("shop merges", 6_000, merges, NAME, "merge"),
)

"""Goals of the shop's customers, and the needs that group the variants of a goal."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

from crl.envs.webshop.catalogue import Product
from crl.seeds import generator

NO_LIMIT = 1_000_000.0
"""Value of `price_upper` in a goal without a price limit."""
_LIMITS = [10.0 * i for i in range(1, 100)]

TEST_GOALS = 500
"""Number of the original's test goals."""
TEST_SEED = 233
"""Seed with which the original shuffles its goals before it takes the test goals."""


class Goal(TypedDict):
    """Goal with the original's field names."""

    asin: str
    query: str
    name: str
    product_category: str
    instruction_text: str
    attributes: list[str]
    goal_options: dict[str, str] | list[str]
    """Name → value, or only the values if a person wrote the instruction."""
    price_upper: float
    """Price limit, in dollars."""


@dataclass(frozen=True)
class InstructionGoals:
    """Instruction and its goals.

    A generated instruction has one goal for every combination of the product's options.
    """

    text: str
    """Instruction without options and price."""
    goals: tuple[Goal, ...]
    weight: float
    """Sum of the weights of the goals."""


def needs(products: Sequence[Product]) -> list[InstructionGoals]:
    """Return all needs.

    The weight of a generated goal is the mean over its attributes of 1 / (number of goals with the
    attribute). A goal from a human instruction has weight 1 (WebShop).
    """
    synthetic = [
        (product, list(_combinations(product))) for product in products if _has_goal(product)
    ]
    counts = Counter(
        a
        for product, combinations in synthetic
        for a in product["instruction_attributes"] * len(combinations)
    )
    found = []
    for product, combinations in synthetic:
        text, attributes = product["instruction_text"] or "", product["instruction_attributes"]
        limit = _price_limit(product)
        goals = tuple(
            _goal(product, _instruction_text(text, options), attributes, options, limit)
            for options in combinations
        )
        found.append(
            InstructionGoals(
                text, goals, len(goals) * sum(1 / counts[a] for a in attributes) / len(attributes)
            )
        )
    return found + [need for product in products for need in _human_needs(product)]


def split_test_goals(
    needs: Sequence[InstructionGoals],
) -> tuple[list[InstructionGoals], list[InstructionGoals]]:
    """Return the original's test goals, each as a need of its own, and the needs without them.

    The test goals are the first `TEST_GOALS` generated goals after a shuffle with `TEST_SEED`, as
    in WebShop with human_goals = False. Both lists are empty if there are fewer than twice as many.
    """
    generated = [
        (need, goal)
        for need in needs
        for goal in need.goals
        if isinstance(goal["goal_options"], dict)
    ]
    if len(generated) < 2 * TEST_GOALS:
        return [], []
    random.Random(TEST_SEED).shuffle(generated)
    test = generated[:TEST_GOALS]
    tested = {id(goal) for _, goal in test}
    remaining = []
    for need in needs:
        if goals := tuple(goal for goal in need.goals if id(goal) not in tested):
            share = len(goals) / len(need.goals)
            remaining.append(InstructionGoals(need.text, goals, need.weight * share))
    return [InstructionGoals(need.text, (goal,), 1.0) for need, goal in test], remaining


def _has_goal(product: Product) -> bool:
    return bool(product["instruction_text"] and product["instruction_attributes"])


def _combinations(product: Product) -> Iterator[dict[str, str]]:
    names = sorted(product["options"])
    return (
        dict(zip(names, values, strict=True))
        for values in itertools.product(*(product["options"][name] for name in names))
    )


def _instruction_text(text: str, options: dict[str, str]) -> str:
    return (
        f"{text} with {', and '.join(f'{name}: {value}' for name, value in options.items())}"
        if options
        else text
    )


def _human_needs(product: Product) -> Iterator[InstructionGoals]:
    for number, entry in enumerate(product["instructions"]):
        if entry.instruction_attributes:
            text = entry.instruction.strip(".")
            goal = _goal(
                product,
                text,
                entry.instruction_attributes,
                entry.instruction_options,
                _price_limit(product, number),
            )
            yield InstructionGoals(text, (goal,), 1.0)


def _price_limit(product: Product, *key: int) -> float:
    """Return the larger of two draws from the next four multiples of 10 above the price.

    Return `NO_LIMIT` if fewer than two such multiples are below 1000.
    """
    limits = [limit for limit in _LIMITS if limit > product["price"]][:4]
    return (
        max(generator(0, "webshop/limit", product["asin"], *key).sample(limits, 2))
        if len(limits) >= 2
        else NO_LIMIT
    )


def _goal(
    product: Product,
    text: str,
    attributes: list[str],
    options: dict[str, str] | list[str],
    limit: float,
) -> Goal:
    return {
        "asin": product["asin"],
        "query": product["query"],
        "name": product["name"],
        "product_category": product["product_category"],
        "instruction_text": f"{text}, and price lower than {limit:.2f} dollars"
        if limit < NO_LIMIT
        else text,
        "attributes": attributes,
        "goal_options": options,
        "price_upper": limit,
    }

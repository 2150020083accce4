"""WebShop's reward, worked by hand.

R = r_type (n_att + n_opt + [price ≤ price_upper]) / (|attributes| + |options| + 1)
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest

from crl.envs.webshop.catalogue import Product
from crl.envs.webshop.goals import Goal
from crl.envs.webshop.reward import (
    COLORS,
    get_reward,
    matched_options,
    normalize_color,
    title_score,
    type_reward,
    words_without_stop_words,
)

TITLE = "Acme Jumpsuit Romper"


def product(**changed: Any) -> Product:
    found: dict[str, Any] = {
        "asin": "B000000001", "name": TITLE, "Title": TITLE, "query": "jumpsuits",
        "category": "fashion", "product_category": "Clothing › Women › Jumpsuits",
        "Description": "With deep pockets.", "BulletPoints": ["Elastic waist", "Made of cotton"],
        "Attributes": ["slim fit", "machine wash"],
        "Rating": "N.A.", "options": {}, "pricing": [30.0], "price": 30.0,
        "instruction_text": None, "instruction_attributes": [], "instructions": [],
    }  # fmt: skip
    return {**found, **changed}  # type: ignore[return-value]


def goal(**changed: Any) -> Goal:
    found: dict[str, Any] = {
        "asin": "B000000001", "name": TITLE, "query": "jumpsuits",
        "product_category": "Clothing › Women › Jumpsuits", "instruction_text": "",
        "attributes": ["slim fit", "machine wash"],
        "goal_options": {"color": "red", "size": "small"}, "price_upper": 40.0,
    }  # fmt: skip
    return {**found, **changed}  # type: ignore[return-value]


RIGHT = {"color": "red", "size": "small"}


# ── the total reward ──────────────────────────────────────────────────────────────────────────────


def test_a_perfect_purchase() -> None:
    assert get_reward(product(), goal(), 30.0, RIGHT) == (
        1.0,
        {"r_type": 1.0, "r_att": 1.0, "r_option": 1.0, "r_price": True},
    )


def test_each_part_has_an_equal_share() -> None:
    # 2 attributes, 2 options and the price count one fifth each.
    assert get_reward(product(), goal(), 40.0, RIGHT)[0] == 1.0, (
        "a price equal to the limit is allowed"
    )
    reward, info = get_reward(product(), goal(), 40.01, RIGHT)
    assert (reward, info["r_price"]) == (4 / 5, False)
    reward, info = get_reward(product(), goal(), 30.0, {"color": "red"})
    assert (reward, info["r_option"]) == (4 / 5, 1 / 2)
    reward, info = get_reward(product(Attributes=["slim fit"]), goal(), 30.0, RIGHT)
    assert (reward, info["r_att"]) == (4 / 5, 1 / 2)
    assert get_reward(product(Attributes=[]), goal(), 99.0, {})[0] == 0.0


def test_the_type_scales_the_other_parts() -> None:
    # The titles share 1 of 6 nouns: 1/6 is between 0.1 and 0.2. Neither the query nor the category
    # matches, so the type factor is 1/2. The reward is half of 4/5.
    other = product(name="Acme Kettle", query="kettles", product_category="Kitchen › Kettles")
    reward, info = get_reward(
        other, goal(name="Acme Jumpsuit Romper Overall Dungaree Catsuit"), 50.0, RIGHT
    )
    assert (reward, info["r_type"]) == (0.4, 0.5)


def test_a_goal_without_options_or_attributes() -> None:
    reward, info = get_reward(product(), goal(goal_options={}), 30.0, RIGHT)
    assert (reward, info["r_option"]) == (1.0, None)
    reward, info = get_reward(
        product(), goal(goal_options=[], attributes=["slim fit", "long sleeve"]), 30.0, {}
    )
    assert (reward, info["r_option"], info["r_att"]) == (2 / 3, None, 1 / 2)
    reward, info = get_reward(product(), goal(goal_options={}, attributes=[]), 30.0, {})
    assert (reward, info["r_att"]) == (1.0, None)


# ── type ──────────────────────────────────────────────────────────────────────────────────────────

TEN = "alpha bravo carol delta eagle fable giant hotel india joker"
"""Title of ten nouns."""


@pytest.mark.parametrize(
    ("name", "query", "category", "expected"),
    [
        ("alpha bravo carol", "other", "x › y", 1.0),  # 3/10 > 0.2
        ("alpha bravo", "other", "x › y", 0.5),  # 2/10 is not above 0.2
        ("alpha", "other", "x › y", 0.5),  # 1/10 is not below 0.1
        ("alpha", "jumpsuits", "x › y", 1.0),  # the same query
        ("alpha", "other", "x › Women › Clothing", 1.0),  # two common categories, in any order
        ("alpha", "other", "Women › x › Women", 0.5),  # a repeated category counts once
        # no noun is shared, but query and categories match
        (
            "zebra",
            "jumpsuits",
            "Clothing › Women › Jumpsuits",
            0.0,
        ),
    ],
)
def test_types(name: str, query: str, category: str, expected: float) -> None:
    assert (
        type_reward(product(name=name, query=query, product_category=category), goal(name=TEN))
        == expected
    )


def test_a_title_that_shares_less_than_a_tenth() -> None:
    eleven = TEN + " karma"
    assert type_reward(product(name="alpha"), goal(name=eleven)) == 0.1, (
        "1/11, although query and categories match"
    )


def test_a_goal_whose_title_has_no_nouns() -> None:
    assert title_score("alpha", "for the new") == 0.2
    assert (
        type_reward(product(query="other", product_category="x"), goal(name="for the new")) == 0.5
    )


def test_nouns_without_a_tagger() -> None:
    assert words_without_stop_words("Acme Women's Jumpsuit, 2 Pcs for the New Season") == (
        "acme",
        "women",
        "jumpsuit",
        "pcs",
        "season",
    )


@pytest.mark.skipif(
    importlib.util.find_spec("en_core_web_lg") is not None, reason="spaCy's tagger is installed"
)
def test_spacy_is_not_imported_without_its_model() -> None:
    code = (
        "import sys; from crl.envs.webshop.reward import title_nouns; "
        "print(title_nouns('red shoe'), 'spacy' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "('shoe',) False\n"
    )


# ── attributes ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("attribute", "met"),
    [
        ("slim fit", True),  # an attribute of the product
        ("fit slim", True),  # in any order
        ("machine washable", True),  # 12 letters in common, of 12 and 16: 24/28 = 86 of 100
        ("hand wash", False),
        ("romper", True),  # in the title
        ("made of cotton", True),  # in the second bullet point
        ("deep pockets", True),  # in the description
        ("waist made", True),  # bullet points are joined to one text
        ("long sleeve", False),
    ],
)
def test_attributes(attribute: str, met: bool) -> None:
    _, info = get_reward(product(), goal(attributes=[attribute]), 30.0, RIGHT)
    assert info["r_att"] == float(met)


# ── options ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("value", "normal"),
    [
        ("navy blue", "blue"),
        ("ivory-white", "ivory"),
        ("a03-Black", "black"),
        ("x-large", "x-large"),
        ("red", "red"),
        ("", ""),
    ],
)
def test_colours(value: str, normal: str) -> None:
    assert normalize_color(value) == normal


def test_about_a_hundred_colours_in_order() -> None:
    assert 90 <= len(COLORS) <= 110
    assert list(COLORS) == sorted(set(COLORS))


@pytest.mark.parametrize(
    ("wanted", "chosen", "matches"),
    [
        (["red", "small"], ["small", "red"], [True, True]),  # a goal of a person has only values
        (["navy blue"], ["sky blue"], [True]),  # both normalise to blue
        (["navy blue"], ["navy"], [False]),  # navy blue normalises to blue, not navy
        (["powder snow cool"], ["powder snow"], [True]),  # the goal contains every word
        (["grey"], ["gray"], [False]),
        ({"color": "red"}, ["red"], [True]),  # synthetic goal: "color red" contains "red"
        ({"color": "navy blue"}, ["royal blue"], [True]),
        ({"color": "bluestone"}, ["bluestone"], [True]),
        ({"size": "large"}, ["x-large"], [False]),  # 83 of 100
        ({"color": "red", "size": "small"}, ["small"], [False, True]),
        (["red", "red"], ["red", "red", "red"], [True, True]),  # each goal option counts once
        (["red"], [], [False]),
        ([], ["red"], []),
    ],
)
def test_options(wanted: Any, chosen: list[str], matches: list[bool]) -> None:
    assert matched_options(wanted, chosen) == matches


def test_additional_options_do_not_lower_the_reward() -> None:
    assert (
        get_reward(
            product(),
            goal(goal_options=["red"]),
            30.0,
            {"color": "red", "size": "small", "style": "red"},
        )[0]
        == 1.0
    )

"""Products of the shop: the original's files, and the difficulty of the generated catalogue."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from thefuzz import fuzz

from crl.envs.base import StreamSettings
from crl.envs.places import PROBE_LAYOUTS, TRAIN_LAYOUTS, UNSEEN_LAYOUTS
from crl.envs.webshop.catalogue import (
    HUMAN,
    INSTRUCTIONS,
    ITEMS,
    NO_PRICE,
    price_tag,
    products,
    read_files,
)
from crl.envs.webshop.generate import generate
from crl.envs.webshop.goals import NO_LIMIT, InstructionGoals, needs
from crl.envs.webshop.reward import get_reward, matched_options
from crl.envs.webshop.search import SearchEngine
from crl.envs.webshop.shop import GENERATED_SHARES, Shop, open_shop
from crl.envs.webshop.tasks import WebShopStream
from crl.envs.webshop.words import KINDS
from crl.errors import ConfigError
from support.paths import WEBSHOP_DATA

ORIGINAL = {product["asin"]: product for product in products(read_files(WEBSHOP_DATA))}
NEEDS = needs(list(ORIGINAL.values()))
SHOP = Shop(products(generate()), "the generated catalogue", GENERATED_SHARES)


def need_of(asin: str) -> InstructionGoals:
    return next(need for need in NEEDS if need.goals[0]["asin"] == asin)


# ── the original's files ──────────────────────────────────────────────────────────────────────────


def test_an_item_of_the_original() -> None:
    jumpsuit = ORIGINAL["B000000001"]
    assert jumpsuit["Title"] == jumpsuit["name"] == "Acme Women's Jumpsuit, Slim Fit Summer Romper"
    assert (jumpsuit["query"], jumpsuit["category"]) == ("women's jumpsuits", "fashion")
    assert jumpsuit["options"] == {
        "color": ["navy blue", "black | white"],
        "size": ["small", "x-large"],
    }
    assert jumpsuit["pricing"] == [25.0, 35.0]
    assert 25.0 <= jumpsuit["price"] <= 35.0
    assert price_tag(jumpsuit) == "$25.0 to $35.0"
    assert jumpsuit["Attributes"] == ["slim fit", "machine wash"]
    assert jumpsuit["BulletPoints"] == ["Machine wash cold", "Elastic waist", "Made of cotton"]


def test_optional_fields_of_an_item() -> None:
    assert ORIGINAL["B000000002"]["options"] == {"color": ["red"]}
    tea = ORIGINAL["B000000003"]
    assert (tea["BulletPoints"], tea["price"], tea["options"]) == (
        ["One long point, not a list"],
        NO_PRICE,
        {},
    )
    assert ORIGINAL["B000000004"]["Description"] == ""
    assert ORIGINAL["B000000004"]["price"] == 1035.5
    assert ORIGINAL["B000000007"]["instruction_text"] is None


def test_empty_option_values_are_dropped_and_truncated_escapes_replaced(tmp_path: Path) -> None:
    items = read_files(WEBSHOP_DATA)["items"]
    items[0]["customization_options"] = {
        "Color": [{"value": " "}, {"value": "Red \ud83d"}],
        "Size": [{"value": ""}],
        "Fit": [],
    }
    for name in (ITEMS, INSTRUCTIONS):
        shutil.copy(WEBSHOP_DATA / name, tmp_path)
    (tmp_path / ITEMS).write_text(json.dumps(items))
    assert products(read_files(tmp_path))[0]["options"] == {"color": ["red \ufffd"]}


def test_invalid_items_are_not_sold() -> None:
    assert list(ORIGINAL) == [f"B00000000{i}" for i in range(1, 8)], (
        "items with a repeated, missing or too long ASIN are dropped"
    )


def test_synthetic_goals_are_all_combinations_of_options() -> None:
    need = need_of("B000000001")
    assert need.text == "Find me slim fit, machine wash women's jumpsuits"
    assert [goal["goal_options"] for goal in need.goals] == [
        {"color": "navy blue", "size": "small"}, {"color": "navy blue", "size": "x-large"},
        {"color": "black | white", "size": "small"}, {"color": "black | white", "size": "x-large"},
    ]  # fmt: skip
    text, limit = need.goals[0]["instruction_text"], need.goals[0]["price_upper"]
    assert (
        text == f"{need.text} with color: navy blue, and size: small, "
        f"and price lower than {limit:.2f} dollars"
    )


def test_price_limits_are_among_the_next_multiples_of_ten() -> None:
    for need in NEEDS:
        goal = need.goals[0]
        price = ORIGINAL[goal["asin"]]["price"]
        first = 10 * math.floor(price / 10) + 10
        assert goal["price_upper"] == NO_LIMIT or goal["price_upper"] in [
            first + 10 * i for i in (1, 2, 3)
        ], "the larger of two draws"
    assert need_of("B000000004").goals[0]["price_upper"] == NO_LIMIT, "nothing above 990"
    assert "price" not in need_of("B000000004").goals[0]["instruction_text"]


def test_weights_of_goals_follow_the_rarity_of_their_attributes() -> None:
    # Four goals share two attributes that no other goal has. Each goal weighs (1/4 + 1/4) / 2.
    assert need_of("B000000001").weight == pytest.approx(4 * 1 / 4)
    # One goal has one attribute that no other goal has.
    assert need_of("B000000003").weight == 1.0
    everything = needs(SHOP.products)
    counts = Counter(a for need in everything for goal in need.goals for a in goal["attributes"])
    need = everything[5]
    assert need.weight == pytest.approx(
        len(need.goals) * sum(1 / counts[a] for a in need.goals[0]["attributes"]) / 2
    )


def test_human_goals_have_weight_one_and_need_attributes() -> None:
    (human,) = [need for need in NEEDS if isinstance(need.goals[0]["goal_options"], list)]
    (goal,) = human.goals
    assert (human.text, human.weight) == ("i want a machine washable slim jumpsuit in navy", 1.0)
    assert (goal["attributes"], goal["goal_options"]) == (["machine wash"], ["navy blue"])
    assert goal["instruction_text"].startswith(f"{human.text}, and price lower than ")


def test_the_human_instructions_may_be_missing(tmp_path: Path) -> None:
    for name in (ITEMS, INSTRUCTIONS):
        shutil.copy(WEBSHOP_DATA / name, tmp_path)
    assert len(needs(products(read_files(tmp_path)))) == len(NEEDS) - 1


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (ITEMS, None, "items_shuffle_1000.json cannot be read (No such file or directory)"),
        (INSTRUCTIONS, None, "items_ins_v2_1000.json cannot be read"),
        (ITEMS, "[{", "items_shuffle_1000.json is not JSON in UTF-8"),
        (ITEMS, "{}", "items_shuffle_1000.json must contain a list, not a dict"),
        (HUMAN, "[]", "items_human_ins.json must contain a dict, not a list"),
        (
            ITEMS,
            '[{"asin": "B1"}]',
            "item 0 of items_shuffle_1000.json does not have the original's format "
            "(name: Field required)",
        ),
        (
            ITEMS,
            "[3]",
            "item 0 of items_shuffle_1000.json does not have the original's format "
            "(Input should be a valid dictionary",
        ),
        (
            ITEMS,
            '[{"asin": 7}]',
            "item 0 of items_shuffle_1000.json does not have the original's format "
            "(asin: Input should be a valid string)",
        ),
        (
            INSTRUCTIONS,
            '{"B000000002": []}',
            "B000000002 of items_ins_v2_1000.json does not have the original's format "
            "(Input should be a valid",
        ),
        (
            HUMAN,
            '{"B000000002": {}}',
            "B000000002 of items_human_ins.json does not have the original's format "
            "(Input should be a valid list)",
        ),
        (ITEMS, "[]", "has 0 instructions in total, too few"),
    ],
)
def test_invalid_files_are_config_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str | None, reason: str
) -> None:
    for path in WEBSHOP_DATA.iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    monkeypatch.setenv("WEBSHOP_DATA", str(tmp_path))
    with pytest.raises(ConfigError) as error:
        open_shop()
    assert str(error.value).startswith(f"WEBSHOP_DATA = {str(tmp_path)!r}: {reason}")
    assert "github.com/princeton-nlp/WebShop" in str(error.value)


@pytest.mark.parametrize(
    ("name", "place", "value", "reason"),
    [
        (ITEMS, (0, "name"), 3, "name: Input should be a valid string"),
        (ITEMS, (0, "query"), None, "query: Input should be a valid string"),
        (ITEMS, (0, "category"), ["fashion"], "category: Input should be a valid string"),
        (ITEMS, (0, "full_description"), {}, "full_description: Input should be a valid string"),
        (
            ITEMS,
            (0, "small_description"),
            [1],
            "small_description.list[str].0: Input should be a valid string",
        ),
        (
            ITEMS,
            (0, "customization_options"),
            ["red"],
            "customization_options: Input should be a valid dictionary",
        ),
        (
            ITEMS,
            (0, "customization_options", "Color"),
            "red",
            "customization_options.Color: Input should be a valid list",
        ),
        (
            ITEMS,
            (0, "customization_options", "Color", 1, "value"),
            4,
            "customization_options.Color.1.value: Input should be a valid string",
        ),
        (ITEMS, (0, "pricing"), 25.0, "pricing: Value error, a price tag must be a string"),
        (
            ITEMS,
            (0, "pricing"),
            "$1.2.3",
            "pricing: Value error, could not convert string to float: '1.2.3'",
        ),
        (
            INSTRUCTIONS,
            ("B000000001", "attributes"),
            "slim fit",
            "attributes: Input should be a valid list",
        ),
        (
            INSTRUCTIONS,
            ("B000000001", "instruction"),
            5,
            "instruction: Input should be a valid string",
        ),
        (
            INSTRUCTIONS,
            ("B000000001", "instruction_attributes"),
            [["slim"]],
            "instruction_attributes.0: Input should be a valid string",
        ),
        (
            HUMAN,
            ("B000000001", 0, "instruction"),
            None,
            "0.instruction: Input should be a valid string",
        ),
        (
            HUMAN,
            ("B000000001", 1, "instruction_attributes"),
            "slim",
            "1.instruction_attributes: Input should be a valid list",
        ),
        (
            HUMAN,
            ("B000000001", 0, "instruction_options"),
            {"color": "navy"},
            "0.instruction_options: Input should be a valid list",
        ),
    ],
)
def test_a_field_of_another_type_is_named_in_the_error(
    name: str, place: tuple[str | int, ...], value: object, reason: str
) -> None:
    files = read_files(WEBSHOP_DATA)
    contents: dict[str, Any] = {
        ITEMS: files["items"],
        INSTRUCTIONS: files["instructions"],
        HUMAN: files["human"],
    }
    row = contents[name]
    for part in place[:-1]:
        row = row[part]
    row[place[-1]] = value
    with pytest.raises(ConfigError) as error:
        products(files, "FOLDER")
    entry = f"item 0 of {ITEMS}" if name == ITEMS else f"B000000001 of {name}"
    assert str(error.value).startswith(
        f"WEBSHOP_DATA = 'FOLDER': {entry} does not have the original's format ({reason}"
    )


def test_the_shop_uses_the_original_files_if_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBSHOP_DATA", str(WEBSHOP_DATA))
    shop = open_shop()
    assert shop is open_shop(), "the files are read once"
    assert [product["asin"] for product in shop.products] == list(ORIGINAL)
    trained = {
        task.goal for task in WebShopStream(0, StreamSettings(permanent=0, visits=1)).draw(200)
    }
    held_out = {shop.need(lgen).text for lgen in UNSEEN_LAYOUTS[:20]}
    assert not trained & held_out
    assert trained | held_out == {need.text for need in NEEDS}
    monkeypatch.delenv("WEBSHOP_DATA")
    assert open_shop() is not shop


# ── search ────────────────────────────────────────────────────────────────────────────────────────


def test_search_stems_ranks_and_drops_products_without_a_match() -> None:
    engine = SearchEngine(list(ORIGINAL.values()))

    def found(keywords: str) -> list[str]:
        return [product["asin"][-1] for product in engine.search(keywords)]

    assert found("jumpsuits") == found("JUMPSUIT") == ["2", "1"], "the shorter text first"
    assert found("slim fit jumpsuit") == ["1", "2"]
    assert found("lemon") == ["6"], "options are searched"
    assert found("oil") == ["6"], "and descriptions"
    assert found("elastic") == [], "but only the first bullet point"
    assert found("wash") == ["2", "1"]
    assert found("zebra") == found("the") == found("[]") == []
    assert len(SHOP.engine.search("everyday")) == 50


# ── the generated catalogue ───────────────────────────────────────────────────────────────────────


def test_the_size_of_the_generated_catalogue() -> None:
    assert len(SHOP.products) == 1000
    assert len({product["asin"] for product in SHOP.products}) == 1000
    assert len({product["query"] for product in SHOP.products}) == 50
    assert sum(len(need.goals) for need in needs(SHOP.products)) == 50 * 5 * 3 * 9


def test_the_generated_catalogue_is_the_same_in_every_process() -> None:
    code = (
        "import json; from crl.envs.webshop.generate import generate; print(json.dumps(generate()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == generate()
    assert generate(1) != generate()


def test_attributes_and_options_do_not_match_each_other() -> None:
    for kind in KINDS:
        for one, other in combinations((*kind.title_attributes, *kind.feature_attributes), 2):
            assert fuzz.token_set_ratio(one, other) <= 85, (one, other)
            assert one not in other, "an attribute also counts where it is part of a text"
            assert other not in one
        for name, values in kind.options.items():
            for value in values:
                assert [v for v in values if matched_options({name: value}, [v]) == [True]] == [
                    value
                ]


def test_only_the_wanted_product_and_its_twin_can_score_one() -> None:
    sold = {product["asin"]: product for product in SHOP.products}
    everything = needs(SHOP.products)
    assert len({need.text for need in everything}) == len(everything) == 750
    for need in everything[::10]:
        for goal in need.goals:
            options = goal["goal_options"]
            assert isinstance(options, dict)
            perfect = [
                p for p in SHOP.products if p["query"] == goal["query"] and _score(p, goal) == 1.0
            ]
            assert sold[goal["asin"]] in perfect
            assert len(perfect) <= 2, (
                "also the twin, if it has the wanted options and is not more expensive"
            )
            family = [
                p
                for p in SHOP.products
                if p["query"] == goal["query"] and goal["attributes"][0] in p["Attributes"]
            ]
            assert len(family) == 4
            assert sum(0.6 <= _score(p, goal) < 1 for p in family) >= 2


def _score(product, goal) -> float:
    offered = {
        name: value
        for name, value in goal["goal_options"].items()
        if value in product["options"][name]
    }
    return get_reward(product, goal, product["price"], offered)[0]


def test_a_search_does_not_distinguish_a_family() -> None:
    for need in needs(SHOP.products)[::25]:
        noun, title_attribute, feature_attribute = need.text.removeprefix("find me ").split(", ")
        family = [p["asin"] for p in SHOP.engine.search(f"{noun} {title_attribute}")[:4]]
        assert need.goals[0]["asin"] in family
        assert all(
            feature_attribute not in text.lower()
            for p in SHOP.products
            for text in (p["Title"], p["Description"], p["BulletPoints"][0])
        )


def test_needs_are_split_by_use() -> None:
    fixed = [
        {SHOP.need(lgen).text for lgen in layouts[:750]}
        for layouts in (UNSEEN_LAYOUTS, PROBE_LAYOUTS)
    ]
    trained = {SHOP.need(TRAIN_LAYOUTS[i * 7919]).text for i in range(4000)}
    assert [len(texts) for texts in (*fixed, trained)] == [150, 75, 525]
    assert len(set().union(*fixed, trained)) == 750
    assert len({SHOP.need(lgen).text for lgen in UNSEEN_LAYOUTS[:150]}) == 150, (
        "each occurs once before any is repeated"
    )


def test_train_streams_draw_by_weight() -> None:
    draws = Counter(SHOP.need(TRAIN_LAYOUTS[i * 104_729]).text for i in range(9000))
    weights = {need.text: need.weight for need in needs(SHOP.products) if need.text in draws}
    heavy = sorted(weights, key=lambda text: weights[text])[-100:]
    expected = sum(weights[text] for text in heavy) / sum(weights.values())
    assert sum(draws[text] for text in heavy) / 9000 == pytest.approx(expected, abs=0.02)

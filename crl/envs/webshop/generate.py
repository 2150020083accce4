"""Generator of a catalogue of 1,000 similar products, in the form of the original data files.

The products of a category come in families. The products of a family have the same options, and the
same title except for the brand and a closing phrase. Only one attribute, which the features name,
distinguishes them. The search does not index this attribute. Each family also has a twin of one of
its products. The twin is too expensive or has fewer options.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from crl.envs.webshop.catalogue import DataFiles
from crl.envs.webshop.words import BRANDS, DESCRIPTIONS, KINDS, PRAISE, TITLE_WORDS, Kind
from crl.seeds import generator

Item = dict[str, Any]

FAMILY_SIZE = 3
"""Number of products per family that goals ask for. The twin is an additional product."""

_CODE = "0123456789ABCDEFGHJKLMNPQRSTVWXYZ"


def generate(seed: int = 0) -> DataFiles:
    """Return the data files of a seed. The items are in shuffled order."""
    rng = generator(seed, "webshop/catalogue")
    items: list[Item] = []
    instructions: dict[str, Item] = {}
    for kind in KINDS:
        for noun in kind.nouns:
            brands = rng.sample(BRANDS, len(kind.title_attributes) * (FAMILY_SIZE + 1))
            for number, title_attribute in enumerate(kind.title_attributes):
                family_brands = brands[
                    number * (FAMILY_SIZE + 1) : (number + 1) * (FAMILY_SIZE + 1)
                ]
                for item, instruction in _family(kind, noun, title_attribute, family_brands, rng):
                    asin = _asin(len(items), rng)
                    items.append({"asin": asin, **item})
                    instructions[asin] = instruction
    rng.shuffle(items)
    return {"items": items, "instructions": instructions, "human": {}}


def _family(
    kind: Kind, noun: str, title_attribute: str, brands: Sequence[str], rng: random.Random
) -> Iterator[tuple[Item, Item]]:
    """Yield each item of a family with its entry of the instructions. The twin is the last item."""
    prices = [rng.randrange(8, 60) for _ in range(FAMILY_SIZE)]
    options = {name: rng.sample(values, 3) for name, values in kind.options.items()}
    feature_attributes = rng.sample(kind.feature_attributes, FAMILY_SIZE)
    twin = rng.randrange(FAMILY_SIZE)
    if rng.random() < 0.5:
        # above every price limit of a goal for the other product
        prices.append(prices[twin] + rng.randrange(50, 90))
        twin_options = options
    else:
        prices.append(prices[twin] - rng.randrange(1, 5))
        twin_options = {name: values[:2] for name, values in options.items()}
    feature_attributes.append(feature_attributes[twin])
    for i, brand in enumerate(brands):
        attributes, wanted = [title_attribute, feature_attributes[i]], i < FAMILY_SIZE
        item = _item(
            kind, noun, brand, attributes, prices[i], options if wanted else twin_options, rng
        )
        yield item, _instruction_entry(noun, attributes, wanted=wanted)


def _item(
    kind: Kind,
    noun: str,
    brand: str,
    attributes: Sequence[str],
    price: int,
    options: Mapping[str, Sequence[str]],
    rng: random.Random,
) -> Item:
    name = f"{brand.title()} {attributes[0].title()} {noun.title()}, {rng.choice(TITLE_WORDS)}"
    top = price + rng.randrange(2, 8)
    return {
        "name": name,
        "query": noun,
        "category": kind.department.lower(),
        "product_category": f"{kind.department} › {noun.title()}",
        "full_description": rng.choice(DESCRIPTIONS).format(noun=noun, brand=brand.title()),
        "small_description": [
            f"{point.capitalize()}: {rng.choice(PRAISE)}." for point in attributes
        ],
        "pricing": f"${price}.00 to ${top}.00" if rng.random() < 0.2 else f"${price}.00",
        "customization_options": {
            option: [{"value": value} for value in values] for option, values in options.items()
        },
    }


def _instruction_entry(noun: str, attributes: Sequence[str], *, wanted: bool) -> Item:
    if not wanted:
        return {"attributes": attributes, "instruction": None, "instruction_attributes": []}
    instruction = ", ".join([f"find me {noun}", *attributes])
    return {
        "attributes": attributes,
        "instruction": instruction,
        "instruction_attributes": attributes,
    }


def _asin(number: int, rng: random.Random) -> str:
    """Return ten characters that look like Amazon's. The last four make the ASIN unique."""
    return f"B0{''.join(rng.choice(_CODE) for _ in range(4))}{number:04d}"

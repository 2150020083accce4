"""The products of the shop: the original project's data files where there are any, else a generated catalogue in the same form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from crl.errors import ConfigError
from crl.seeds import generator

VARIABLE = "WEBSHOP_DATA"
"""The environment variable that names the folder of the original data files."""

ITEMS, INSTRUCTIONS, HUMAN = "items_shuffle_1000.json", "items_ins_v2_1000.json", "items_human_ins.json"
DOWNLOAD = "See the WebShop project (github.com/princeton-nlp/WebShop) for the files"

NO_PRICE = 100.0
"""What a product without a price tag costs, as in the original."""


class HumanInstruction(TypedDict):
    """What a person wrote of a product that they were to describe."""

    instruction: str
    instruction_attributes: list[str]
    instruction_options: list[str]


class Product(TypedDict):
    """A product as the shop keeps it, under the original's names.

    options: name → values, in lower case. pricing: one price, or the ends of a range; price: what it costs, drawn from that;
    instruction_text: None for a product that nobody is sent for.
    """

    asin: str
    name: str
    query: str
    category: str
    product_category: str
    Title: str
    Description: str
    BulletPoints: list[str]
    Rating: str
    Attributes: list[str]
    options: dict[str, list[str]]
    pricing: list[float]
    price: float
    instruction_text: str | None
    instruction_attributes: list[str]
    instructions: list[HumanInstruction]


class DataFiles(TypedDict):
    """The contents of the three files: a list of items, and instructions by ASIN."""

    items: list[dict[str, Any]]
    instructions: dict[str, dict[str, Any]]
    human: dict[str, list[dict[str, Any]]]


def read_files(folder: Path) -> DataFiles:
    """Raises `ConfigError` for a file that is missing, unreadable or of another form. The human instructions may be missing."""
    human = _read(folder / HUMAN, dict) if (folder / HUMAN).exists() else {}
    return {"items": _read(folder / ITEMS, list), "instructions": _read(folder / INSTRUCTIONS, dict), "human": human}


def _read(path: Path, form: type) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(VARIABLE, str(path.parent), f"{path.name} cannot be read ({error.strerror})", DOWNLOAD) from error
    except ValueError as error:
        raise ConfigError(VARIABLE, str(path.parent), f"{path.name} is not JSON in UTF-8 ({error})", DOWNLOAD) from error
    if not isinstance(content, form):
        reason = f"{path.name} should hold a {form.__name__}, not a {type(content).__name__}"
        raise ConfigError(VARIABLE, str(path.parent), reason, DOWNLOAD)
    return content


def products(files: DataFiles, source: str = "the generated catalogue") -> tuple[Product, ...]:
    """The items that can be sold: the first of every ASIN, which has at most ten characters.

    source: where the files are from, for messages. Raises `ConfigError` for an item that is not of the original's form.
    """
    sold: dict[str, Product] = {}
    for number, item in enumerate(files["items"]):
        try:
            asin = item["asin"]
            if asin != "nan" and len(asin) <= 10 and asin not in sold:
                sold[asin] = _product(item, files["instructions"].get(asin, {}), files["human"].get(asin, []))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"item {number} of {ITEMS} is not of the original's form ({type(error).__name__}: {error})"
            raise ConfigError(VARIABLE, source, reason, DOWNLOAD) from error
    return tuple(sold.values())


def _product(item: Mapping[str, Any], told: Mapping[str, Any], human: Sequence[Mapping[str, Any]]) -> Product:
    points = item["small_description"] or []
    pricing = _pricing(item.get("pricing"))
    return {
        "asin": item["asin"],
        "name": item["name"],
        "query": item["query"].lower().strip(),
        "category": item["category"],
        "product_category": item["product_category"],
        "Title": item["name"],
        "Description": item["full_description"] or "",
        "BulletPoints": points if isinstance(points, list) else [points],
        "Rating": "N.A.",  # the reviews are another file, which the small variant does without
        "Attributes": told.get("attributes") or [],
        "options": _options(item["customization_options"] or {}),
        "pricing": pricing,
        "price": generator(0, "webshop/price", item["asin"]).uniform(pricing[0], pricing[-1]),
        "instruction_text": told.get("instruction"),
        "instruction_attributes": told.get("instruction_attributes") or [],
        "instructions": [_human(instruction) for instruction in human],
    }


def _human(told: Mapping[str, Any]) -> HumanInstruction:
    return {
        "instruction": told["instruction"],
        "instruction_attributes": told["instruction_attributes"],
        "instruction_options": told["instruction_options"],
    }


def _pricing(tag: str | None) -> list[float]:
    """The one or two prices of a tag: "$25.00 to $1,035.00" → [25.0, 1035.0]."""
    return [float(re.sub(r"[^\d.]", "", price)) for price in (tag or "").split("$")[1:3]] or [NO_PRICE]


def _options(offered: Mapping[str, Sequence[Mapping[str, Any]] | None]) -> dict[str, list[str]]:
    return {
        name.lower(): [value["value"].strip().replace("/", " | ").lower() for value in values] for name, values in offered.items() if values
    }


def price_tag(product: Product) -> str:
    """As the pages show it: $25.0, or $25.0 to $35.0."""
    return " to ".join(f"${price}" for price in product["pricing"])

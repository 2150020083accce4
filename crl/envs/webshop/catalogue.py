"""Products of the shop.

They are read from the original project's data files if these exist, else from a generated catalogue
of the same form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from crl.envs.base import replace_surrogates
from crl.errors import ConfigError
from crl.seeds import generator

VARIABLE = "WEBSHOP_DATA"
"""Environment variable with the folder of the original data files."""

ITEMS, INSTRUCTIONS, HUMAN = (
    "items_shuffle_1000.json",
    "items_ins_v2_1000.json",
    "items_human_ins.json",
)
DOWNLOAD = "Get the files from the WebShop project (github.com/princeton-nlp/WebShop)"

T = TypeVar("T")

NO_PRICE = 100.0
"""Price of a product without a price tag, as in the original."""


class _Row(BaseModel):
    """Entry of a data file, or a part of one. Fields that are not declared are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)


class HumanInstruction(_Row):
    """Instruction for a product, written by a person."""

    instruction: str
    instruction_attributes: list[str]
    instruction_options: list[str]


class Product(TypedDict):
    """Product in the shop, with the original's field names."""

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
    """Name → values, in lower case."""
    pricing: list[float]
    """Price, or the two ends of a price range."""
    price: float
    """Price of a purchase, drawn from `pricing`."""
    instruction_text: str | None
    """Instruction to buy the product. None if no goal asks for the product."""
    instruction_attributes: list[str]
    instructions: list[HumanInstruction]


class DataFiles(TypedDict):
    """Contents of the three data files. The entries are not checked yet."""

    items: list[Any]
    """List of items."""
    instructions: dict[str, Any]
    """ASIN → generated instruction."""
    human: dict[str, Any]
    """ASIN → instructions written by people."""


_EmptyIsNone = BeforeValidator(lambda value: value or None)
"""Validator that treats an empty text, list or object like null, as the original does."""


def _prices(tag: object) -> list[float]:
    """Return the one or two prices of a tag: "$25.00 to $1,035.00" → [25.0, 1035.0].

    Return `NO_PRICE` for a missing tag. Raise `ValueError` if the tag is not a text.
    """
    if not isinstance(tag, str | None):
        raise ValueError("a price tag must be a string")
    return [float(re.sub(r"[^\d.]", "", price)) for price in (tag or "").split("$")[1:3]] or [
        NO_PRICE
    ]


class _OptionRow(_Row):
    value: str


class _AsinRow(_Row):
    asin: str


class _ItemRow(_AsinRow):
    """Entry of `ITEMS`."""

    name: str
    query: str
    category: str
    product_category: str
    full_description: str | None
    small_description: Annotated[list[str] | str | None, _EmptyIsNone]
    customization_options: Annotated[
        dict[str, Annotated[list[_OptionRow] | None, _EmptyIsNone]] | None, _EmptyIsNone
    ]
    pricing: Annotated[list[float], BeforeValidator(_prices)] = [NO_PRICE]


class _InstructionRow(_Row):
    """Entry of `INSTRUCTIONS`."""

    attributes: Annotated[list[str] | None, _EmptyIsNone] = None
    instruction: str | None = None
    instruction_attributes: Annotated[list[str] | None, _EmptyIsNone] = None


def read_files(folder: Path) -> DataFiles:
    """Read the data files in `folder`. The file of human instructions may be missing.

    Raise `ConfigError` for a file that is missing, unreadable or of another form.
    """
    human = _read(folder / HUMAN, dict) if (folder / HUMAN).exists() else {}
    return {
        "items": _read(folder / ITEMS, list),
        "instructions": _read(folder / INSTRUCTIONS, dict),
        "human": human,
    }


def _read(path: Path, expected: type) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content = json.loads(replace_surrogates(json.dumps(content, ensure_ascii=False)))
    except OSError as error:
        raise ConfigError(
            VARIABLE, str(path.parent), f"{path.name} cannot be read ({error.strerror})", DOWNLOAD
        ) from error
    except ValueError as error:
        raise ConfigError(
            VARIABLE, str(path.parent), f"{path.name} is not JSON in UTF-8 ({error})", DOWNLOAD
        ) from error
    if not isinstance(content, expected):
        reason = f"{path.name} must contain a {expected.__name__}, not a {type(content).__name__}"
        raise ConfigError(VARIABLE, str(path.parent), reason, DOWNLOAD)
    return content


def products(files: DataFiles, source: str = "the generated catalogue") -> tuple[Product, ...]:
    """Return the products that can be sold: the first item of every valid ASIN.

    A valid ASIN has at most ten characters. `source` is where the files are from, for messages.
    Raise `ConfigError` for an item that does not have the original's form.
    """
    sold: dict[str, Product] = {}
    for number, entry in enumerate(files["items"]):
        location = f"item {number} of {ITEMS}"
        asin = _validated(_AsinRow, entry, location, source).asin
        if asin != "nan" and len(asin) <= 10 and asin not in sold:
            generated = _validated(
                _InstructionRow,
                files["instructions"].get(asin, {}),
                f"{asin} of {INSTRUCTIONS}",
                source,
            )
            human = _validated(
                list[HumanInstruction], files["human"].get(asin, []), f"{asin} of {HUMAN}", source
            )
            sold[asin] = _product(_validated(_ItemRow, entry, location, source), generated, human)
    return tuple(sold.values())


def _validated(expected: type[T], entry: object, location: str, source: str) -> T:
    """Return the entry as an `expected`. Raise `ConfigError` with the name of an invalid field."""
    try:
        return TypeAdapter(expected).validate_python(entry)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        found = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
        reason = f"{location} does not have the original's format ({found})"
        raise ConfigError(VARIABLE, source, reason, DOWNLOAD) from error


def _product(item: _ItemRow, generated: _InstructionRow, human: list[HumanInstruction]) -> Product:
    points = item.small_description or []
    return {
        "asin": item.asin,
        "name": item.name,
        "query": item.query.lower().strip(),
        "category": item.category,
        "product_category": item.product_category,
        "Title": item.name,
        "Description": item.full_description or "",
        "BulletPoints": points if isinstance(points, list) else [points],
        "Rating": "N.A.",  # reviews are in a file that the small variant lacks
        "Attributes": generated.attributes or [],
        "options": _options(item.customization_options or {}),
        "pricing": item.pricing,
        "price": generator(0, "webshop/price", item.asin).uniform(
            item.pricing[0], item.pricing[-1]
        ),
        "instruction_text": generated.instruction,
        "instruction_attributes": generated.instruction_attributes or [],
        "instructions": human,
    }


def _options(raw_options: Mapping[str, Sequence[_OptionRow] | None]) -> dict[str, list[str]]:
    """Return option name → values, without empty values.

    An empty value cannot be clicked, although the original also has goals with empty values.
    """
    values = {
        name.lower(): [
            value
            for option in options or ()
            if (value := option.value.strip().replace("/", " | ").lower())
        ]
        for name, options in raw_options.items()
    }
    return {name: texts for name, texts in values.items() if texts}


def price_tag(product: Product) -> str:
    """Return the price as the pages show it: $25.0, or $25.0 to $35.0."""
    return " to ".join(f"${price}" for price in product["pricing"])

"""The products of the shop: the original project's data files where there are any, else a generated catalogue in the same form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from crl.envs.base import readable
from crl.errors import ConfigError
from crl.seeds import generator

VARIABLE = "WEBSHOP_DATA"
"""The environment variable that names the folder of the original data files."""

ITEMS, INSTRUCTIONS, HUMAN = (
    "items_shuffle_1000.json",
    "items_ins_v2_1000.json",
    "items_human_ins.json",
)
DOWNLOAD = "See the WebShop project (github.com/princeton-nlp/WebShop) for the files"

T = TypeVar("T")

NO_PRICE = 100.0
"""What a product without a price tag costs, as in the original."""


class _Row(BaseModel):
    """A part of a data file, whose other fields play no part here."""

    model_config = ConfigDict(strict=True, frozen=True)


class HumanInstruction(_Row):
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
    """The contents of the three files, whose entries are not checked yet: a list of items, and instructions by ASIN."""

    items: list[Any]
    instructions: dict[str, Any]
    human: dict[str, Any]


_EmptyIsNone = BeforeValidator(lambda value: value or None)
"""As to the original, an empty text, list or object says no more than null."""


def _prices(tag: object) -> list[float]:
    """The one or two prices of a tag: "$25.00 to $1,035.00" → [25.0, 1035.0]."""
    if not isinstance(tag, str | None):
        raise ValueError("a price tag is a text")
    return [float(re.sub(r"[^\d.]", "", price)) for price in (tag or "").split("$")[1:3]] or [
        NO_PRICE
    ]


class _Option(_Row):
    value: str


class _Asin(_Row):
    asin: str


class _Item(_Asin):
    """An entry of `ITEMS`."""

    name: str
    query: str
    category: str
    product_category: str
    full_description: str | None
    small_description: Annotated[list[str] | str | None, _EmptyIsNone]
    customization_options: Annotated[
        dict[str, Annotated[list[_Option] | None, _EmptyIsNone]] | None, _EmptyIsNone
    ]
    pricing: Annotated[list[float], BeforeValidator(_prices)] = [NO_PRICE]


class _Told(_Row):
    """An entry of `INSTRUCTIONS`."""

    attributes: Annotated[list[str] | None, _EmptyIsNone] = None
    instruction: str | None = None
    instruction_attributes: Annotated[list[str] | None, _EmptyIsNone] = None


def read_files(folder: Path) -> DataFiles:
    """Raises `ConfigError` for a file that is missing, unreadable or of another form. The human instructions may be missing."""
    human = _read(folder / HUMAN, dict) if (folder / HUMAN).exists() else {}
    return {
        "items": _read(folder / ITEMS, list),
        "instructions": _read(folder / INSTRUCTIONS, dict),
        "human": human,
    }


def _read(path: Path, form: type) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content = json.loads(readable(json.dumps(content, ensure_ascii=False)))
    except OSError as error:
        raise ConfigError(
            VARIABLE, str(path.parent), f"{path.name} cannot be read ({error.strerror})", DOWNLOAD
        ) from error
    except ValueError as error:
        raise ConfigError(
            VARIABLE, str(path.parent), f"{path.name} is not JSON in UTF-8 ({error})", DOWNLOAD
        ) from error
    if not isinstance(content, form):
        reason = f"{path.name} should hold a {form.__name__}, not a {type(content).__name__}"
        raise ConfigError(VARIABLE, str(path.parent), reason, DOWNLOAD)
    return content


def products(files: DataFiles, source: str = "the generated catalogue") -> tuple[Product, ...]:
    """The items that can be sold: the first of every ASIN, which has at most ten characters.

    source: where the files are from, for messages. Raises `ConfigError` for an item that is not of the original's form.
    """
    sold: dict[str, Product] = {}
    for number, entry in enumerate(files["items"]):
        where = f"item {number} of {ITEMS}"
        asin = _checked(_Asin, entry, where, source).asin
        if asin != "nan" and len(asin) <= 10 and asin not in sold:
            told = _checked(
                _Told, files["instructions"].get(asin, {}), f"{asin} of {INSTRUCTIONS}", source
            )
            human = _checked(
                list[HumanInstruction], files["human"].get(asin, []), f"{asin} of {HUMAN}", source
            )
            sold[asin] = _product(_checked(_Item, entry, where, source), told, human)
    return tuple(sold.values())


def _checked(form: type[T], entry: object, where: str, source: str) -> T:
    """The entry in its form; the `ConfigError` of another names the field."""
    try:
        return TypeAdapter(form).validate_python(entry)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        found = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
        reason = f"{where} is not of the original's form ({found})"
        raise ConfigError(VARIABLE, source, reason, DOWNLOAD) from error


def _product(item: _Item, told: _Told, human: list[HumanInstruction]) -> Product:
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
        "Rating": "N.A.",  # the reviews are another file, which the small variant does without
        "Attributes": told.attributes or [],
        "options": _options(item.customization_options or {}),
        "pricing": item.pricing,
        "price": generator(0, "webshop/price", item.asin).uniform(
            item.pricing[0], item.pricing[-1]
        ),
        "instruction_text": told.instruction,
        "instruction_attributes": told.instruction_attributes or [],
        "instructions": human,
    }


def _options(offered: Mapping[str, Sequence[_Option] | None]) -> dict[str, list[str]]:
    """An empty value is none: nobody can click on it, though the original sends for it too."""
    values = {
        name.lower(): [
            value
            for option in options or ()
            if (value := option.value.strip().replace("/", " | ").lower())
        ]
        for name, options in offered.items()
    }
    return {name: own for name, own in values.items() if own}


def price_tag(product: Product) -> str:
    """As the pages show it: $25.0, or $25.0 to $35.0."""
    return " to ".join(f"${price}" for price in product["pricing"])

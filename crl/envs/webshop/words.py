"""Words of the generated catalogue: kinds of products, attributes, options, and invented brands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_COLORS = ("black", "white", "red", "blue", "green", "pink", "yellow", "purple", "brown", "orange")


@dataclass(frozen=True)
class Kind:
    """Products that share attributes and options."""

    department: str
    nouns: tuple[str, ...]
    """Names of the categories."""
    title_attributes: tuple[str, ...]
    """Attributes that a title may name."""
    feature_attributes: tuple[str, ...]
    """Attributes that only the features name."""
    options: Mapping[str, tuple[str, ...]]
    """Name → values. A product offers some of the values."""


KINDS = (
    Kind(
        "Clothing",
        ("scarf", "jacket", "hoodie", "shirt", "pajamas"),
        ("slim fit", "hand knitted", "long sleeved", "water repellent", "oversized"),
        (
            "machine washable",
            "quick drying",
            "fleece lined",
            "wrinkle free",
            "odor resistant",
            "sun protective",
        ),
        {"color": _COLORS, "size": ("small", "medium", "large", "plus")},
    ),
    Kind(
        "Shoes",
        ("hiking boots", "sneakers", "sandals", "slippers", "rain boots"),
        ("lightweight", "memory foam", "high top", "open toe", "canvas"),
        (
            "arch supporting",
            "slip resistant",
            "vegan leather",
            "shock absorbing",
            "extra wide",
            "rubber soled",
        ),
        {"color": _COLORS, "size": ("6", "7", "8", "9", "10")},
    ),
    Kind(
        "Home Textiles",
        ("blanket", "curtains", "bed sheets", "pillow", "towel", "rug"),
        ("ultra soft", "hand woven", "velvet", "striped", "quilted"),
        (
            "machine washable",
            "hypoallergenic",
            "fade resistant",
            "thermal insulated",
            "lint free",
            "pet friendly",
        ),
        {"color": _COLORS, "size": ("small", "medium", "large", "king")},
    ),
    Kind(
        "Furniture",
        ("office chair", "bookshelf", "nightstand", "bar stool", "desk"),
        ("solid wood", "mid century", "folding", "space saving", "wall mounted"),
        (
            "easy to assemble",
            "height adjustable",
            "scratch proof",
            "fully padded",
            "hidden storage",
            "anti tip",
        ),
        {"color": _COLORS, "finish": ("matte", "glossy", "oiled", "raw")},
    ),
    Kind(
        "Kitchen",
        ("frying pan", "kettle", "knife set", "lunch box", "mixing bowl", "cutting board"),
        ("cast iron", "double walled", "bamboo", "stackable", "hammered"),
        (
            "dishwasher safe",
            "bpa free",
            "induction ready",
            "leak proof",
            "heat resistant",
            "easy to clean",
        ),
        {"color": _COLORS, "count": ("1", "2", "3", "6")},
    ),
    Kind(
        "Grocery",
        ("granola", "crackers", "green tea", "trail mix", "protein bar"),
        ("organic", "family sized", "crunchy", "fair trade", "stone ground"),
        ("gluten free", "sugar free", "nut free", "high in fiber", "non gmo", "low sodium"),
        {
            "flavor": ("honey", "vanilla", "ginger", "apple", "mango"),
            "count": ("1", "4", "8", "12"),
        },
    ),
    Kind(
        "Beauty",
        ("shampoo", "face cream", "body lotion", "lip balm", "hand soap", "hair oil"),
        ("travel sized", "foaming", "whipped", "overnight", "herbal"),
        (
            "cruelty free",
            "paraben free",
            "alcohol free",
            "clinically proven",
            "for sensitive skin",
            "oil controlling",
        ),
        {
            "scent": ("citrus", "jasmine", "cedar", "vanilla", "fig"),
            "volume": ("2oz", "4oz", "8oz", "16oz"),
        },
    ),
    Kind(
        "Electronics",
        ("headphones", "phone case", "power bank", "alarm clock", "keyboard", "webcam"),
        ("wireless", "foldable", "curved", "retro", "transparent"),
        (
            "fast charging",
            "noise cancelling",
            "water resistant",
            "plug and play",
            "voice controlled",
            "long battery life",
        ),
        {"color": _COLORS, "model": ("mini", "basic", "pro", "max")},
    ),
    Kind(
        "Outdoors",
        ("backpack", "tent", "water bottle", "camping lamp", "picnic basket", "garden hose"),
        ("heavy duty", "collapsible", "ultra thin", "military style", "kids sized"),
        (
            "tear resistant",
            "lifetime warranty",
            "rust proof",
            "easy to carry",
            "solar powered",
            "wind proof",
        ),
        {"color": _COLORS, "size": ("small", "medium", "large", "giant")},
    ),
)
"""Nine departments with fifty nouns in total."""

BRANDS = (
    "alvo", "bexa", "corvo", "darin", "elka", "fenno", "galdo", "hesk", "ivara", "jorva", "kymo",
    "lumi", "mirel", "norda", "oxley", "pello", "quilo", "rivo", "savo", "tarn", "ursa", "velto",
    "wend", "xero", "yarrow", "zenda",
)  # fmt: skip
"""Invented brands. All products of a category have different brands."""

TITLE_WORDS = (
    "Everyday Use",
    "Gift Idea",
    "New Season",
    "Home and Travel",
    "Modern Look",
    "Classic Design",
    "Premium Quality",
)

DESCRIPTIONS = (
    "A {noun} for every day by {brand}, made with care and checked by hand before it is shipped.",
    "{brand} has made the {noun} better year after year, "
    "and this is the one that customers ask for.",
    "With this {noun} {brand} keeps things simple. "
    "It arrives ready to use and looks good for years.",
)

PRAISE = (
    "tested for years of use",
    "what our customers like best",
    "a small thing that matters",
    "you will notice it at once",
)

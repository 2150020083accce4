"""How well a purchase meets a goal (WebShop §2.2 and its code): type, attributes, options and price."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import TypedDict

from thefuzz import fuzz

from crl.envs.webshop.catalogue import Product
from crl.envs.webshop.goals import Goal

logger = logging.getLogger(__name__)

_TAGGER = "en_core_web_lg"

ALIKE = 85
"""Texts match above this token set ratio, of 100."""

COLORS = tuple(sorted("""
    amber apricot aqua ash azure banana beige black blue blush bordeaux bronze brown burgundy camel camo caramel champagne charcoal
    cherry chestnut chocolate cinnamon cobalt coffee cognac copper coral cranberry cream crimson cyan denim ebony eggplant emerald
    espresso fuchsia gold grape graphite gray green grey hazel heather indigo ivory jade khaki lavender lemon leopard lilac lime
    magenta mahogany maroon mauve merlot midnight mint mocha mustard navy nude oatmeal olive onyx orange orchid peach pearl periwinkle
    pewter pink platinum plum purple rainbow raspberry red rose ruby rust salmon sand sapphire scarlet sienna silver slate tan tangerine
    taupe teal terracotta turquoise violet walnut wheat white wine yellow
""".split()))  # fmt: skip # noqa: SIM905

_NOT_NOUNS = frozenset("""
    a about above adjustable all an and any are as at be best big black blue brown by can casual classic comfortable comfy cool cute
    deluxe durable easy elegant everyday extra fashion fashionable fit for free fresh from gold gray great green grey heavy high in
    into is it its large light lightweight long loose low made mini modern natural new no non of off on one or orange organic original
    our out over perfect pink portable premium professional pure purple quick red regular short silver slim small soft solid super that
    the their this to two ultra up vintage warm wash waterproof white wide with without yellow you your
""".split())  # fmt: skip # noqa: SIM905
"""Words of titles that are no nouns."""


class RewardInfo(TypedDict):
    """The parts of a reward. r_att: share of the goal's attributes; r_option: share of its options; both None where it has none."""

    r_type: float
    r_att: float | None
    r_option: float | None
    r_price: bool


def get_reward(
    product: Product, goal: Goal, price: float, options: Mapping[str, str]
) -> tuple[float, RewardInfo]:
    """R = r_type · (n_att + n_opt + [price ≤ price_upper]) / (|attributes| + |options| + 1), in [0, 1], and its parts.

    price: of the purchase; options: name → value as chosen.
    """
    attributes, wanted = goal["attributes"], goal["goal_options"]
    met = [_has(product, attribute) for attribute in attributes]
    chosen = matched_options(wanted, list(options.values()))
    affordable = price <= goal["price_upper"]
    r_type = type_reward(product, goal)
    reward = r_type * (sum(met) + sum(chosen) + affordable) / (len(met) + len(chosen) + 1)
    return reward, {
        "r_type": r_type,
        "r_att": _share(met),
        "r_option": _share(chosen),
        "r_price": affordable,
    }


def type_reward(product: Product, goal: Goal) -> float:
    """1, or 0.5 for another kind of product; 0.1 or 0 where the titles share few nouns or none, whatever else matches."""
    score = title_score(product["name"], goal["name"])
    if score < 0.1:
        return 0.1 if score else 0.0
    same_query = product["query"] == goal["query"]
    same_category = len(_categories(product) & _categories(goal)) >= 2
    return 1.0 if same_query or same_category or score > 0.2 else 0.5


def title_score(title: str, wanted: str) -> float:
    """The share of the wanted title's nouns that the other has too; 0.2 when it has none."""
    nouns = title_nouns(wanted)
    return len(set(nouns) & set(title_nouns(title))) / len(nouns) if nouns else 0.2


def matched_options(wanted: Mapping[str, str] | Sequence[str], chosen: Sequence[str]) -> list[bool]:
    """For each wanted option whether a chosen value matches it. A named one matches by the words of both: "color red" is met by "red"."""
    if isinstance(wanted, Mapping):
        texts = [f"{name} {normalize_color(value)}" for name, value in wanted.items()]
    else:
        texts = [normalize_color(value) for value in wanted]
    values = [normalize_color(value) for value in chosen]
    return [any(fuzz.token_set_ratio(value, text) > ALIKE for value in values) for text in texts]


def normalize_color(value: str) -> str:
    """The alphabetically first colour name that is part of the value; the value itself where none is."""
    return next((color for color in COLORS if color in value.lower()), value)


def _has(product: Product, attribute: str) -> bool:
    if any(fuzz.token_set_ratio(own, attribute) > ALIKE for own in product["Attributes"]):
        return True
    texts = (product["Title"], " ".join(product["BulletPoints"]), product["Description"])
    return any(attribute in text.lower() for text in texts)


def _categories(of: Product | Goal) -> set[str]:
    return {category.strip() for category in of["product_category"].split("›")}


def _share(met: Sequence[bool]) -> float | None:
    return sum(met) / len(met) if met else None


# ── nouns ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=4096)
def title_nouns(title: str) -> tuple[str, ...]:
    """The nouns of a title, in lower case and in order."""
    return _noun_finder()(title)


@cache
def _noun_finder() -> Callable[[str], tuple[str, ...]]:
    """spaCy's tagger, which the original uses, where it and an English model are installed; else a list of words that are no nouns."""
    if (
        importlib.util.find_spec(_TAGGER) is None
    ):  # spaCy alone may be there (ALFWorld brings it) and is slow to import
        logger.info(
            "WebShop's title nouns are told by a list of words, because spaCy's %s is not installed",
            _TAGGER,
        )
        return words_but_stop_words
    import spacy  # type: ignore[import-not-found]

    tagger = spacy.load(_TAGGER, exclude=["parser", "ner", "lemmatizer"])
    logger.info("WebShop's title nouns are told by spaCy's %s", _TAGGER)
    return lambda title: tuple(
        token.text.lower() for token in tagger(title) if token.pos_ in ("NOUN", "PROPN")
    )


def words_but_stop_words(title: str) -> tuple[str, ...]:
    """The words of three letters or more that are not known to be of another kind."""
    return tuple(word for word in re.findall(r"[a-z]{3,}", title.lower()) if word not in _NOT_NOUNS)

"""Reward of a purchase for a goal: type, attributes, options and price.

Source: WebShop §2.2 and its code.
"""

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

MATCH_THRESHOLD = 85
"""Token set ratio, out of 100, above which two texts match."""

COLORS = tuple(sorted("""
    amber apricot aqua ash azure banana beige black blue blush bordeaux bronze brown burgundy
    camel camo caramel champagne charcoal cherry chestnut chocolate cinnamon cobalt coffee
    cognac copper coral cranberry cream crimson cyan denim ebony eggplant emerald espresso
    fuchsia gold grape graphite gray green grey hazel heather indigo ivory jade khaki lavender
    lemon leopard lilac lime magenta mahogany maroon mauve merlot midnight mint mocha mustard
    navy nude oatmeal olive onyx orange orchid peach pearl periwinkle pewter pink platinum plum
    purple rainbow raspberry red rose ruby rust salmon sand sapphire scarlet sienna silver slate
    tan tangerine taupe teal terracotta turquoise violet walnut wheat white wine yellow
""".split()))  # fmt: skip # noqa: SIM905

_STOP_WORDS = frozenset("""
    a about above adjustable all an and any are as at be best big black blue brown by can casual
    classic comfortable comfy cool cute deluxe durable easy elegant everyday extra fashion
    fashionable fit for free fresh from gold gray great green grey heavy high in into is it its
    large light lightweight long loose low made mini modern natural new no non of off on one or
    orange organic original our out over perfect pink portable premium professional pure purple
    quick red regular short silver slim small soft solid super that the their this to two ultra
    up vintage warm wash waterproof white wide with without yellow you your
""".split())  # fmt: skip # noqa: SIM905
"""Words of titles that are not nouns."""


class RewardInfo(TypedDict):
    """Parts of a reward."""

    r_type: float
    r_att: float | None
    """Share of the goal's attributes that the product has. None if the goal has none."""
    r_option: float | None
    """Share of the goal's options that were chosen. None if the goal has none."""
    r_price: bool
    """True if the price is within the goal's limit."""


def get_reward(
    product: Product, goal: Goal, price: float, options: Mapping[str, str]
) -> tuple[float, RewardInfo]:
    """Return the reward R and its parts.

        R = r_type · (n_att + n_opt + [price ≤ price_upper]) / (|attributes| + |options| + 1)

    R is in [0, 1]. `price` is the price of the purchase. `options` maps names to the chosen values.
    """
    attributes, wanted = goal["attributes"], goal["goal_options"]
    met = [_has_attribute(product, attribute) for attribute in attributes]
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
    """Return 1 for the same kind of product and 0.5 for another kind.

    Return 0.1 if the titles share few nouns and 0 if they share none, whatever else matches.
    """
    score = title_score(product["name"], goal["name"])
    if score < 0.1:
        return 0.1 if score else 0.0
    same_query = product["query"] == goal["query"]
    same_category = len(_categories(product) & _categories(goal)) >= 2
    return 1.0 if same_query or same_category or score > 0.2 else 0.5


def title_score(title: str, wanted: str) -> float:
    """Return the share of the wanted title's nouns that the other title also has.

    Return 0.2 if the wanted title has no nouns.
    """
    nouns = title_nouns(wanted)
    return len(set(nouns) & set(title_nouns(title))) / len(nouns) if nouns else 0.2


def matched_options(wanted: Mapping[str, str] | Sequence[str], chosen: Sequence[str]) -> list[bool]:
    """Return for each wanted option whether a chosen value matches it.

    An option with a name is matched by the words of its name and value: "red" matches "color red".
    """
    if isinstance(wanted, Mapping):
        texts = [f"{name} {normalize_color(value)}" for name, value in wanted.items()]
    else:
        texts = [normalize_color(value) for value in wanted]
    values = [normalize_color(value) for value in chosen]
    return [
        any(fuzz.token_set_ratio(value, text) > MATCH_THRESHOLD for value in values)
        for text in texts
    ]


def normalize_color(value: str) -> str:
    """Return the alphabetically first color name that the value contains.

    Return the value itself if it contains none.
    """
    return next((color for color in COLORS if color in value.lower()), value)


def _has_attribute(product: Product, attribute: str) -> bool:
    if any(fuzz.token_set_ratio(own, attribute) > MATCH_THRESHOLD for own in product["Attributes"]):
        return True
    texts = (product["Title"], " ".join(product["BulletPoints"]), product["Description"])
    return any(attribute in text.lower() for text in texts)


def _categories(entry: Product | Goal) -> set[str]:
    return {category.strip() for category in entry["product_category"].split("›")}


def _share(met: Sequence[bool]) -> float | None:
    return sum(met) / len(met) if met else None


# ── nouns ─────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=4096)
def title_nouns(title: str) -> tuple[str, ...]:
    """Return the nouns of a title, in lower case and in order."""
    return _noun_finder()(title)


@cache
def _noun_finder() -> Callable[[str], tuple[str, ...]]:
    """Return spaCy's tagger, as in the original, if it and an English model are installed.

    Otherwise return a function that drops a list of words that are not nouns.
    """
    # ALFWorld installs spaCy without the model, and spaCy is slow to import
    if importlib.util.find_spec(_TAGGER) is None:
        logger.info(
            "WebShop finds the nouns of titles with a word list, "
            "because spaCy's %s is not installed",
            _TAGGER,
        )
        return words_without_stop_words
    import spacy  # type: ignore[import-not-found]

    tagger = spacy.load(_TAGGER, exclude=["parser", "ner", "lemmatizer"])
    logger.info("WebShop finds the nouns of titles with spaCy's %s", _TAGGER)
    return lambda title: tuple(
        token.text.lower() for token in tagger(title) if token.pos_ in ("NOUN", "PROPN")
    )


def words_without_stop_words(title: str) -> tuple[str, ...]:
    """Return the words of three letters or more that are not in `_STOP_WORDS`."""
    return tuple(
        word for word in re.findall(r"[a-z]{3,}", title.lower()) if word not in _STOP_WORDS
    )

"""Fictional names: words of two syllables that are in no dictionary.

The first syllable ends with v, x or z, and the second one begins with another consonant. Few real
words have this form. No stemmer removes the last letter, so two names never have the same stem.
"""

from __future__ import annotations

import random
from itertools import product

REAL_WORDS = frozenset(
    """
    gizmo juxta kovno lavra laxmi lazlo livno mazda mixta nexta pavlo pizda rizla rovno sevda sexta
    sexti sexto tuzla
    """.split()  # noqa: SIM905
)
"""Real words and names of the form of a fictional name. They are left out."""

NAMES = tuple(
    name
    for letters in product("bdfghjklmnprstvz", "aeiou", "vxz", "dgklmnrt", "aiou")
    if (name := "".join(letters)) not in REAL_WORDS
)
"""All names, in lower case."""


def draw_names(n: int, rng: random.Random) -> list[str]:
    """Return n different names in random order.

    Raise `ValueError` if there are fewer than n names.
    """
    return rng.sample(NAMES, n)

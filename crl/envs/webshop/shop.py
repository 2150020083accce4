"""Shop that all games of a process share: products, search engine and goals.

A task's `lgen` and `core`, drawn by `crl.envs.places`, determine the goal of an episode: `lgen`
fixes the need, and `core` fixes the variant. Needs are divided by use before anything is drawn.
Train streams draw their needs by weight.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path

from crl.envs.places import PROBE_LAYOUTS, UNSEEN_LAYOUTS
from crl.envs.webshop.catalogue import DOWNLOAD, VARIABLE, Product, products, read_files
from crl.envs.webshop.generate import generate
from crl.envs.webshop.goals import Goal, InstructionGoals, needs, split_test_goals
from crl.envs.webshop.search import SearchEngine
from crl.errors import ConfigError
from crl.seeds import derive_seed, generator

logger = logging.getLogger(__name__)

SHARES = {UNSEEN_LAYOUTS: 0.2}
GENERATED_SHARES = {**SHARES, PROBE_LAYOUTS: 0.1}
"""Shares of all needs that are reserved for these uses. Train streams use the other needs.

Demonstrations need no share, because they are played in separate shops.
"""


class Shop:
    """Products of a shop with their needs. Immutable.

    `shares` maps layouts to the share of the needs that is reserved for them. `source` is where the
    products are from, for messages. With `official`, the unseen split is the original's test goals
    instead of a share, if the products have enough goals. Raise `ConfigError` if there are too few
    needs to divide.
    """

    def __init__(
        self, products: Sequence[Product], source: str, shares: Mapping[range, float],
        *, official: bool = False,
    ) -> None:  # fmt: skip
        self.products = tuple(products)
        test, remaining = split_test_goals(needs(self.products)) if official else ([], [])
        self.test_goals = len(test)
        """Number of the original's test goals; 0 if the unseen split is a share of the needs."""
        if test:
            self._reserved, self._train = {UNSEEN_LAYOUTS: test}, remaining
        else:
            self._reserved, self._train = _split(needs(self.products), source, shares)
        self._cumulative = list(itertools.accumulate(need.weight for need in self._train))

    @cached_property
    def engine(self) -> SearchEngine:
        return SearchEngine(self.products)

    def need(self, lgen: int) -> InstructionGoals:
        """Return the need of a layout.

        In a range of reserved layouts, every need occurs once before any need occurs again. Other
        layouts draw a need by weight.
        """
        for layouts, reserved in self._reserved.items():
            if lgen in layouts:
                return reserved[(lgen - layouts.start) % len(reserved)]
        draw = derive_seed(0, "webshop/need", lgen) / 2**63 * self._cumulative[-1]
        return self._train[bisect(self._cumulative, draw, hi=len(self._train) - 1)]

    def goal(self, lgen: int, core: int) -> Goal:
        """Return the goal of a layout and its dynamics."""
        goals = self.need(lgen).goals
        return goals[core % len(goals)]


def _split(
    needs: Sequence[InstructionGoals], source: str, shares: Mapping[range, float]
) -> tuple[dict[range, list[InstructionGoals]], list[InstructionGoals]]:
    """Return the needs of every reserved use, and those of train streams.

    The order of reserved needs is a random draw by weight.
    """
    rng, remaining = generator(0, "webshop/split"), list(needs)
    rng.shuffle(remaining)
    reserved_needs: dict[range, list[InstructionGoals]] = {}
    for layouts, share in shares.items():
        count = round(share * len(needs))
        reserved, remaining = remaining[:count], remaining[count:]
        reserved_needs[layouts] = sorted(reserved, key=lambda need: rng.expovariate(need.weight))
    if not remaining or not all(reserved_needs.values()):
        reason = (
            f"has {len(needs)} instructions in total, "
            "too few to use some for evaluation and others for training"
        )
        raise ConfigError(VARIABLE, source, reason, DOWNLOAD)
    return reserved_needs, remaining


_open_lock = threading.Lock()


def open_shop() -> Shop:
    """Return the shop of the data files in $WEBSHOP_DATA, else of the generated catalogue.

    Raise `ConfigError` for invalid files.
    """
    with _open_lock:
        return _open(os.environ.get(VARIABLE, ""))


@cache
def _open(folder: str) -> Shop:
    if not folder:
        logger.info(
            "WebShop uses a generated catalogue, because %s is not set. "
            "Metrics are not comparable with published results",
            VARIABLE,
        )
        return Shop(products(generate()), "the generated catalogue", GENERATED_SHARES)
    return Shop(products(read_files(Path(folder)), folder), folder, SHARES, official=True)

"""Tasks of WebShop: needs of the shop's layouts, and the data that the shop is made of.

The shop loads its products when the first task is drawn.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from crl.envs.base import Data, EnvTasks, StreamSettings
from crl.envs.places import (
    PROBE_LAYOUTS,
    UNSEEN_LAYOUTS,
    PlaceStream,
    fixed_tasks,
    revisited,
    seen_tasks,
)
from crl.envs.webshop.catalogue import DOWNLOAD, INSTRUCTIONS, ITEMS, VARIABLE
from crl.errors import ConfigError
from crl.types import Split, Task

NAME = "webshop"


class WebShopStream(PlaceStream):
    """Train stream of a run with `seed`.

    The goal of a task is the need's text, which names neither options nor price.
    """

    def __init__(self, seed: int, settings: StreamSettings) -> None:
        super().__init__(NAME, "{place}", seed, settings)

    def task_at(self, k: int) -> Task:
        return _with_need(super().task_at(k))


def eval_tasks(split: Split, n: int, seed: int, settings: StreamSettings) -> tuple[Task, ...]:
    """Return the first n tasks of a split.

    The seen split depends on the run's seed and settings. The unseen split is the same in every
    run. Raise `ValueError` for any other split.
    """
    if split == "seen":
        return tuple(map(_with_need, seen_tasks(NAME, "{place}", n, seed, settings)))
    if split == "unseen":
        return _fixed(UNSEEN_LAYOUTS, n)
    raise ValueError(f"an eval split must be seen or unseen, not {split!r}")


def split_sizes() -> dict[Split, int]:
    """Return the number of the original's test goals; empty without the original's data."""
    from crl.envs.webshop.shop import open_shop

    number = open_shop().test_goals
    return {"unseen": number} if number else {}


def probe_tasks(n: int) -> tuple[Task, ...]:
    """Return n tasks for the advice probe. They have no other use."""
    return _fixed(PROBE_LAYOUTS, n)


def _fixed(layouts: range, n: int) -> tuple[Task, ...]:
    return tuple(map(_with_need, fixed_tasks(NAME, "{place}", layouts, n)))


def _with_need(task: Task) -> Task:
    """Return the task with the need of its layout.

    The text of the need becomes the task's goal and the name of its place.
    """
    from crl.envs.webshop.shop import open_shop

    need = open_shop().need(int(task.params["lgen"]))
    return replace(task, goal=need.text, params={**task.params, "place": need.text})


def data() -> Data:
    """Return the description of the data in use.

    Raise `ConfigError` if $WEBSHOP_DATA names a folder without the data files.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        description = "a generated catalogue of 1,000 products"
        return Data(
            description,
            official=False,
            hint=f"the official data is used when {VARIABLE} names its folder",
        )
    for name in (ITEMS, INSTRUCTIONS):
        if not (Path(folder) / name).is_file():
            raise ConfigError(VARIABLE, folder, f"contains no {name}", DOWNLOAD)
    return Data(f"the official data in {folder}", official=True)


TASKS = EnvTasks(
    WebShopStream, eval_tasks, partial(revisited, NAME), data=data, split_sizes=split_sizes
)

"""Tasks of question answering: topics of a library, and the data that the library is made of."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from crl.envs.search_qa.data import LAYOUT, VARIABLE, check_folder
from crl.envs.search_qa.library import Libraries
from crl.errors import ConfigError
from crl.types import Split, Task

NAME = "search_qa"
SMALL = "search_qa_small"


class SearchStream(PlaceStream):
    """Train stream of a run with `seed`. The goal of a task is the goal of its topic."""

    def __init__(self, topics: TopicTasks, seed: int, settings: StreamSettings) -> None:
        super().__init__(topics.env, "{place}", seed, settings)
        self._topics = topics

    def task_at(self, k: int) -> Task:
        return self._topics.named(super().task_at(k))


@dataclass(frozen=True)
class TopicTasks:
    """Tasks of an environment whose places are the topics of a library."""

    env: str
    """Name of the environment."""
    libraries: Libraries

    def env_tasks(self, *, official: bool) -> EnvTasks:
        """Return the value for an `EnvSpec`.

        `official`: the official data is in use if the user has it.
        """
        return EnvTasks(
            partial(SearchStream, self),
            self.eval_tasks,
            partial(revisited, self.env),
            data=data if official else generated,
            split_sizes=self.split_sizes if official else None,
        )

    def eval_tasks(
        self, split: Split, n: int, seed: int, settings: StreamSettings
    ) -> tuple[Task, ...]:
        """Return the first n tasks of a split.

        The seen split depends on the run's seed and settings. The unseen split is the same in every
        run. Raise `ValueError` for any other split, and for more tasks than official questions.
        """
        if split == "seen":
            return tuple(map(self.named, seen_tasks(self.env, "{place}", n, seed, settings)))
        if split == "unseen":
            available = self.split_sizes().get("unseen", n)
            if n > available:
                raise ValueError(
                    f"{n} questions were requested, but the official data has only {available}"
                )
            return self.fixed(UNSEEN_LAYOUTS, n)
        raise ValueError(f"an eval split must be seen or unseen, not {split!r}")

    def split_sizes(self) -> dict[Split, int]:
        """Return the number of official test questions; empty without the official data."""
        number = self.libraries.open().topics.official_tests
        return {"unseen": number} if number else {}

    def probe_tasks(self, n: int) -> tuple[Task, ...]:
        """Return n tasks for the advice probe. They have no other use."""
        return self.fixed(PROBE_LAYOUTS, n)

    def fixed(self, layouts: range, n: int) -> tuple[Task, ...]:
        return tuple(map(self.named, fixed_tasks(self.env, "{place}", layouts, n)))

    def named(self, task: Task) -> Task:
        """Return the task with the topic of its layout, which is its goal and its place's name."""
        goal = self.libraries.open().topics.topic(int(task.params["lgen"])).goal
        params: Mapping[str, str | int | float] = {**task.params, "place": goal}
        return replace(task, goal=goal, params=params)


def generated() -> Data:
    """Return the description of the generated world."""
    return Data("a generated world of 5,000 documents", official=False)


def data() -> Data:
    """Return the description of the data in use.

    Raise `ConfigError` if $SEARCH_QA_DATA names a folder without sets of questions.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        hint = f"the official data is used when {VARIABLE} names its folder"
        return replace(generated(), hint=hint)
    if not Path(folder).is_dir():
        raise ConfigError(VARIABLE, folder, "is not a folder", LAYOUT)
    check_folder(Path(folder))
    return Data(f"the official data in {folder}", official=True)

"""Selection of drills for a run, and the numbers of their demonstrations."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from crl.config.load import load
from crl.modeling.demonstrations import Demonstration
from crl.tiny.drills import ACTOR_DRILLS, EXTRACTOR_DRILLS, demonstrations, drills_of, scaled
from crl.tiny.drills.drill import Drill, demonstrated
from crl.types import Segment

ENVS = (
    "room", "maze_small", "keyroom", "river_small", "sokoban", "webshop", "alfworld_small",
    "search_qa_small", "scienceworld_small",
)  # fmt: skip
"""Environments of the bundled tasks in the compact profile."""


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("role", ["actor", "extractor"])
def test_every_bundled_task_has_drills(role, env: str) -> None:
    assert drills_of(role, [env], ["episode"])


def test_all_drills_are_selected_by_all_tasks_and_parts() -> None:
    parts = ("episode", "ask", "critic", "merge")
    assert drills_of("actor", ENVS, parts) == [*ACTOR_DRILLS]
    assert drills_of("extractor", ENVS, parts) == [*EXTRACTOR_DRILLS]


def test_drills_of_other_parts_and_tasks_are_left_out() -> None:
    def names(role, *parts) -> list[str]:
        return [drill.name for drill in drills_of(role, ["room"], parts)]

    assert names("actor", "episode") == ["room walks"]
    assert names("actor", "ask", "critic") == ["room walks with questions", "verdicts"]
    assert names("extractor", "episode", "merge") == ["room lessons", "merges"]
    assert names("extractor", "ask") == ["refinements"]


def test_drills_have_the_shares_of_the_recipes() -> None:
    def drill(name: str, count: int) -> Drill:
        def make(rng: random.Random, n: int) -> Iterator[Demonstration]:
            goal = Segment("user", f"{name}\nstate", "task")
            return ([goal, demonstrated(str(rng.random()))] for _ in range(n))

        return Drill(name, count, make, "room")

    drills = [drill("a", 3000), drill("b", 1000), drill("c", 1)]
    made = list(demonstrations(scaled(drills, 40), seed=3))
    assert Counter(place for place, _ in made) == {"a": 30, "b": 10, "c": 1}
    assert made == list(demonstrations(scaled(drills, 40), seed=3))
    assert made != list(demonstrations(scaled(drills, 40), seed=4))


def test_the_places_of_an_extractor_are_those_of_its_episodes() -> None:
    drills = drills_of("extractor", ["room"], ["episode", "ask"])
    made = list(demonstrations(scaled(drills, 200), 0))
    places = {place for place, _ in made}
    assert all(
        re.fullmatch(r"Room: the \w+ \w+\. Reach the stairs down \(>\)\.", p) for p in places
    )
    assert len(places) < len(made)
    merges = list(demonstrations(scaled(drills_of("extractor", ["room"], ["merge"]), 20), 0))
    assert len({place for place, _ in merges}) > 10


def test_the_environments_are_those_of_the_bundled_tasks() -> None:
    config = load([env.removesuffix("_small") for env in ENVS])
    assert {task.env for task in config.tasks.values()} == {*ENVS}

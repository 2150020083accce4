"""Selection of drills for a run, and the numbers of their demonstrations."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from crl.modeling.demonstrations import Demonstration
from crl.tiny.drills import ACTOR_DRILLS, EXTRACTOR_DRILLS, demonstrations, drills_of
from crl.tiny.drills.drill import Drill, demonstrated

ENVS = ("room", "maze", "keyroom", "river", "sokoban", "webshop", "alfworld")


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
            return ([demonstrated(f"{name} {rng.random()}")] for _ in range(n))

        return Drill(name, count, make, "room")

    drills = [drill("a", 3000), drill("b", 1000), drill("c", 1)]
    made = [segment.text for (segment,) in demonstrations(drills, 40, seed=3)]
    assert Counter(text.split()[0] for text in made) == {"a": 30, "b": 10, "c": 1}
    assert made == [segment.text for (segment,) in demonstrations(drills, 40, seed=3)]
    assert made != [segment.text for (segment,) in demonstrations(drills, 40, seed=4)]

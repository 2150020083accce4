"""The original's test goals: 500 goals, each in one task, and none of them in training."""

from __future__ import annotations

from pathlib import Path

import pytest

from crl.envs.base import StreamSettings
from crl.envs.places import UNSEEN_LAYOUTS
from crl.envs.webshop import shop as shops
from crl.envs.webshop import tasks
from crl.envs.webshop.catalogue import products
from crl.envs.webshop.generate import generate
from crl.envs.webshop.goals import TEST_GOALS, needs, split_test_goals
from crl.envs.webshop.shop import SHARES, Shop
from support.paths import WEBSHOP_DATA


@pytest.fixture
def official(monkeypatch: pytest.MonkeyPatch) -> Shop:
    """Return a shop with as many goals as the original's, as if its data were official."""
    shop = Shop(products(generate()), "here", SHARES, official=True)
    monkeypatch.setattr(shops, "open_shop", lambda: shop)
    return shop


def test_every_test_goal_is_one_task(official: Shop) -> None:
    assert tasks.split_sizes() == {"unseen": TEST_GOALS}
    drawn = tasks.eval_tasks("unseen", TEST_GOALS, 0, StreamSettings())
    played = [official.goal(int(t.params["lgen"]), int(t.params["core"])) for t in drawn]
    assert len({(goal["asin"], str(goal["goal_options"])) for goal in played}) == TEST_GOALS
    other_seed = tasks.eval_tasks("unseen", TEST_GOALS, 7, StreamSettings())
    assert drawn == other_seed, "the split is the same in every run"


def test_test_goals_are_never_trained_on(official: Shop) -> None:
    tested = {id(official.need(lgen).goals[0]) for lgen in UNSEEN_LAYOUTS[:TEST_GOALS]}
    trained = [goal for need in official._train for goal in need.goals]
    assert not tested & set(map(id, trained))
    everything = sum(len(need.goals) for need in needs(official.products))
    assert len(tested) + len(trained) == everything
    weight = sum(need.weight for need in official._train)
    assert weight < sum(need.weight for need in needs(official.products))


def test_the_first_goals_of_the_original_shuffle() -> None:
    import random

    everything = needs(products(generate()))
    goals = [goal for need in everything for goal in need.goals]
    random.Random(233).shuffle(goals)
    test, _ = split_test_goals(everything)
    assert [need.goals[0]["instruction_text"] for need in test] == [
        goal["instruction_text"] for goal in goals[:500]
    ]


def test_small_data_has_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBSHOP_DATA", str(WEBSHOP_DATA))
    assert tasks.split_sizes() == {}
    monkeypatch.delenv("WEBSHOP_DATA")
    assert tasks.split_sizes() == {}, "the generated catalogue has no official split"
    assert Path(WEBSHOP_DATA).is_dir()

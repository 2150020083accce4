"""Lessons about the shop: the digest follows from a visit's texts, and right advice helps."""

from __future__ import annotations

import random

import pytest

from crl.envs.webshop import SPEC
from crl.envs.webshop.game import WebShopGame
from crl.envs.webshop.lessons import (
    LESSONS,
    WebShopAdvisor,
    digest,
    lesson,
    read,
    right_brand,
    wrong_brands,
)
from crl.envs.webshop.player import Requirements
from crl.envs.webshop.shop import open_shop
from crl.envs.webshop.tasks import probe_tasks
from crl.envs.webshop.text import brand
from crl.types import Segment, Task

TASKS = probe_tasks(40)
ADVISOR = WebShopAdvisor()


def visit(task: Task, *actions: str) -> list[Segment]:
    """Return the conversation of an episode with the given actions, as the tiny actor sees it."""
    game = WebShopGame("compact")
    segments = [Segment("user", task.goal, "task"), Segment("user", game.reset(task), "env")]
    for action in actions:
        segments += [
            Segment("assistant", action, "policy"),
            Segment("user", game.step(action).text, "env"),
        ]
    return segments


def following(task: Task, advice: str) -> list[str]:
    """Return the actions of an agent that buys the advised product."""
    _, brand = read(advice)
    requirements = Requirements.read(task.goal, WebShopGame("compact").reset(task))
    return [
        f"search[{requirements.query}]",
        f"click[{brand}]",
        *(f"click[{value}]" for value in requirements.values),
        "click[buy now]",
    ]


def test_read_reverses_lesson() -> None:
    for kind in LESSONS:
        text = lesson(kind, "norda")
        assert read(text) == (kind, "norda" if "norda" in text else None)
        assert len(text.split()) <= 5
    assert read("buy") == read("buy norda. and velto.") == read("") == ("other", None)


def test_right_advice_wins_and_wrong_advice_loses() -> None:
    for task in TASKS:
        assert visit(task, *following(task, ADVISOR.right(task)))[-1].text == "bought. score 100"
    lost = [
        visit(task, *following(task, ADVISOR.wrong(task, random.Random(i))))[-1].text
        for i, task in enumerate(TASKS)
    ]
    assert sum(text != "bought. score 100" for text in lost) >= 36, "some twins also score 100"


def test_advice_holds_for_every_visit_of_a_need() -> None:
    assert SPEC.tasks.revisit is not None
    for task in TASKS[:10]:
        for number in range(5):
            again = SPEC.tasks.revisit(task, number)
            assert ADVISOR.right(again) == ADVISOR.right(task)
            assert (
                visit(again, *following(again, ADVISOR.right(task)))[-1].text == "bought. score 100"
            )


def test_verdicts() -> None:
    task = TASKS[0]
    right, wrong = ADVISOR.right(task), ADVISOR.wrong(task, random.Random(0))
    assert right != wrong
    found = [
        ADVISOR.judge(task, text)
        for text in (right, wrong, right.replace("buy", "do not buy"), "be careful.", "hm")
    ]
    assert [(verdict.kind, verdict.correct) for verdict in found] == [
        ("buy", True), ("wrong buy", False), ("skip", False), ("careful", False), ("other", False),
    ]  # fmt: skip


def test_the_digest_of_a_purchase() -> None:
    task = TASKS[0]
    _, brand = read(ADVISOR.right(task))
    search, click, *_ = following(task, ADVISOR.right(task))
    won = visit(task, *following(task, ADVISOR.right(task)))
    assert digest(won) == f"wrong none\nright {brand}\nbought {brand}, score 100"
    bare = visit(task, search, click, "buy it!", "click[buy now]")
    assert digest(bare) == f"wrong none\nright {brand}\nbought {brand}, score 60"
    assert right_brand(won) == right_brand(bare) == brand


def test_the_digest_of_opened_products() -> None:
    task = TASKS[0]
    search, *_ = following(task, ADVISOR.right(task))
    _, brand = read(ADVISOR.right(task))
    _, other = read(ADVISOR.wrong(task, random.Random(3)))
    around = visit(
        task, search, f"click[{other}]", "click[< prev]", f"CLICK[ {brand} ]", "click[features]"
    )
    assert digest(around) == f"wrong {other}\nright {brand}\nbought nothing"
    assert (right_brand(around), wrong_brands(around)) == (brand, [other])
    assert (right_brand(around[:6]), wrong_brands(around[:6])) == (None, [other])
    assert (
        digest(visit(task))
        == digest(visit(task, "click[features]", "what?"))
        == "wrong none\nright unknown\nbought nothing"
    )


def test_a_twin_is_wrong_unless_it_scores_100() -> None:
    """Check twins. They have the right features, but cost too much or have fewer options."""
    scores = []
    for task in probe_tasks(75):
        goal = open_shop().goal(int(task.params["lgen"]), int(task.params["core"]))
        for product in open_shop().products:
            if (
                product["query"] == goal["query"]
                and product["Attributes"] == goal["attributes"]
                and product["asin"] != goal["asin"]
            ):
                bought = visit(task, *following(task, lesson("buy", brand(product))))
                scores.append(bought[-1].text == "bought. score 100")
                assert right_brand(bought) == (brand(product) if scores[-1] else None)
                assert wrong_brands(bought) == ([] if scores[-1] else [brand(product)])
    assert 0 < sum(scores) < len(scores)


@pytest.mark.parametrize("complete", [True, False])
def test_informative(complete: bool) -> None:
    task = TASKS[1]
    assert (
        ADVISOR.informative(
            visit(task, *following(task, ADVISOR.right(task))[: None if complete else 1])
        )
        == complete
    )


def test_without_a_similar_product_wrong_advice_names_a_brand_that_does_not_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("crl.envs.webshop.lessons._brands", lambda task: ["norda"])
    (task,) = probe_tasks(1)
    wrong = ADVISOR.wrong(task, random.Random(0))
    assert ADVISOR.judge(task, wrong).kind == "wrong buy"
    assert ADVISOR.judge(task, ADVISOR.right(task)).correct

"""What is said of a visit to the shop is what its texts tell, and right advice is what helps there."""

from __future__ import annotations

import random

import pytest

from crl.envs.webshop import SPEC, probe_tasks
from crl.envs.webshop.game import WebShopGame
from crl.envs.webshop.lessons import LESSONS, WebShopAdvisor, digest, lesson, read, right_brand
from crl.envs.webshop.player import Errand
from crl.types import Segment, Task

TASKS = probe_tasks(40)
ADVISOR = WebShopAdvisor()


def visit(task: Task, *actions: str) -> list[Segment]:
    """The conversation of an episode, as the tiny actor has it."""
    game = WebShopGame("compact")
    segments = [Segment("user", task.goal, "task"), Segment("user", game.reset(task), "env")]
    for action in actions:
        segments += [Segment("assistant", action, "policy"), Segment("user", game.step(action).text, "env")]
    return segments


def following(task: Task, advice: str) -> list[str]:
    """What an agent does that buys what it was told to."""
    _, brand = read(advice)
    errand = Errand.read(task.goal, WebShopGame("compact").reset(task))
    return [f"search[{errand.query}]", f"click[{brand}]", *(f"click[{value}]" for value in errand.values), "click[buy now]"]


def test_lessons_are_read_as_they_are_written() -> None:
    for kind in LESSONS:
        text = lesson(kind, "norda")
        assert read(text) == (kind, "norda" if "norda" in text else None)
        assert len(text.split()) <= 5
    assert read("buy") == read("buy norda. and velto.") == read("") == ("other", None)


def test_right_advice_wins_and_wrong_advice_loses() -> None:
    for task in TASKS:
        assert visit(task, *following(task, ADVISOR.right(task)))[-1].text == "bought. score 100"
    lost = [visit(task, *following(task, ADVISOR.wrong(task, random.Random(i))))[-1].text for i, task in enumerate(TASKS)]
    assert sum(text != "bought. score 100" for text in lost) >= 36, "the twin may do as well"


def test_advice_holds_for_every_visit_of_a_need() -> None:
    assert SPEC.revisit is not None
    for task in TASKS[:10]:
        for number in range(5):
            again = SPEC.revisit(task, number)
            assert ADVISOR.right(again) == ADVISOR.right(task)
            assert visit(again, *following(again, ADVISOR.right(task)))[-1].text == "bought. score 100"


def test_verdicts() -> None:
    task = TASKS[0]
    right, wrong = ADVISOR.right(task), ADVISOR.wrong(task, random.Random(0))
    assert right != wrong
    found = [ADVISOR.judge(task, text) for text in (right, wrong, right.replace("buy", "do not buy"), "be careful.", "hm")]
    assert [(verdict.kind, verdict.correct) for verdict in found] == [
        ("buy", True), ("wrong buy", False), ("skip", False), ("careful", False), ("other", False),
    ]  # fmt: skip


def test_a_purchase_in_few_words() -> None:
    task = TASKS[0]
    _, brand = read(ADVISOR.right(task))
    won = visit(task, *following(task, ADVISOR.right(task)))
    assert digest(won) == f"bought {brand}, score 100"
    assert right_brand(won) == brand
    (search, click, *_) = following(task, ADVISOR.right(task))
    bare = visit(task, search, click, "buy it!", "click[buy now]")
    assert digest(bare) == f"bought {brand}, score 60"
    assert right_brand(bare) is None, "it may be another's fault"


def test_features_that_were_read_tell_too() -> None:
    task = TASKS[0]
    search, click, *_ = following(task, ADVISOR.right(task))
    _, brand = read(ADVISOR.right(task))
    _, first, second = task.goal.split(", ")
    seen = visit(task, search, click, "CLICK[ Features ]", "click[< prev]")
    assert digest(seen) == f"{brand}: {first}, {second}\nbought nothing"
    assert right_brand(seen) == brand
    _, other, *_ = following(task, ADVISOR.wrong(task, random.Random(3)))
    assert right_brand(visit(task, f"search[{task.goal.split()[2]}]", other, "click[features]")) is None
    assert digest(visit(task)) == digest(visit(task, "click[features]", "what?")) == "bought nothing"


@pytest.mark.parametrize("told", [True, False])
def test_informative(told: bool) -> None:
    task = TASKS[1]
    assert ADVISOR.informative(visit(task, *following(task, ADVISOR.right(task))[: None if told else 3])) == told

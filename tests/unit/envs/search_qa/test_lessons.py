"""Lessons about topics, digests of episodes, and the advisor."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from crl.envs.search_qa import SMALL_SPEC
from crl.envs.search_qa.lessons import LESSONS, digest, key_name, lesson, read, wrong_names
from crl.types import Segment

ADVISOR = SMALL_SPEC.curriculum.advisor


def segments(goal: str, *texts: str) -> Sequence[Segment]:
    """Return an episode with the given texts of environment and agent in turn."""
    turns = (
        Segment("assistant", text, "policy") if number % 2 else Segment("user", text, "env")
        for number, text in enumerate(texts)
    )
    return [Segment("user", goal, "task"), *turns]


GOAL = "about the author of velka"
SOLVED = segments(
    GOAL, "want workplace", "search[ velka]", "velka: author norda, publisher tizlo",
    "search[ norda]", "norda: birthplace rizlu, workplace savgo, spouse zixna",
    "answer[ savgo]", "right.",
)  # fmt: skip
MISLED = segments(
    GOAL, "want workplace", "search[ tizlo]", "tizlo: director bavda, founder zixna, town rizlu",
    "hello", "unknown action.", "answer[ rizlu]", "wrong.",
)  # fmt: skip
GUIDED = segments(
    GOAL, "want workplace", "search[ norda]", "norda: birthplace rizlu, workplace savgo",
    "answer[ savgo]", "right.",
)  # fmt: skip


@pytest.mark.parametrize(
    ("episode", "expected", "key", "wrong"),
    [
        (SOLVED, "wrong none\nkey norda\nanswer savgo, right", "norda", []),
        (MISLED, "wrong tizlo\nkey unknown\nanswer rizlu, wrong", None, ["tizlo"]),
        (GUIDED, "wrong none\nkey norda\nanswer savgo, right", "norda", []),
        (
            segments(GOAL, "want name", "answer[ norda]", "right."),
            "wrong none\nkey norda\nanswer norda, right", "norda", [],
        ),
        (
            segments(GOAL, "want name", "answer[ tizlo]", "wrong."),
            "wrong none\nkey unknown\nanswer tizlo, wrong", None, [],
        ),
        (
            segments(GOAL, "want name", "search[ zz top]", "nothing"),
            "wrong none\nkey unknown\nanswer nothing", None, [],
        ),
    ],
)  # fmt: skip
def test_digests(episode, expected: str, key: str | None, wrong: list[str]) -> None:
    assert digest(episode) == expected
    assert key_name(episode) == key
    assert wrong_names(episode) == wrong
    assert ADVISOR
    assert ADVISOR.informative(episode) == (key is not None)


def test_an_episode_without_a_turn_has_a_digest() -> None:
    assert digest(segments(GOAL, "want name")) == "wrong none\nkey unknown\nanswer nothing"


@pytest.mark.parametrize("kind", LESSONS)
def test_lessons_are_read_as_they_are_written(kind: str) -> None:
    named = kind in ("search", "skip")
    assert read(lesson(kind, "velka")) == (kind, "velka" if named else None)
    assert read("search velka") == ("other", None)


def test_the_advisor_knows_the_key() -> None:
    assert ADVISOR
    for task in SMALL_SPEC.curriculum.probe_tasks(50):
        right, wrong = ADVISOR.right(task), ADVISOR.wrong(task, random.Random(1))
        assert (ADVISOR.judge(task, right).kind, ADVISOR.judge(task, right).correct) == (
            "search",
            True,
        )
        assert (ADVISOR.judge(task, wrong).kind, ADVISOR.judge(task, wrong).correct) == (
            "wrong search",
            False,
        )
        assert not ADVISOR.judge(task, "be careful.").correct


def test_right_advice_saves_a_search() -> None:
    """Check that the advised name answers all questions of its topic, with one search at most."""
    assert ADVISOR
    game = SMALL_SPEC.make_game("compact")
    assert SMALL_SPEC.tasks.revisit
    for place in SMALL_SPEC.curriculum.probe_tasks(20):
        for visit in range(4):
            task = SMALL_SPEC.tasks.revisit(place, visit)
            _, key = read(ADVISOR.right(task))
            wanted = game.reset(task).removeprefix("want ")
            if wanted == "name":
                assert game.step(f"answer[{key}]").success
                continue
            first, *_ = game.step(f"search[{key}]").text.splitlines()
            facts = dict(fact.split() for fact in first.partition(": ")[2].split(", "))
            assert game.step(f"answer[{facts[wanted]}]").success

"""Pairs of goals and lessons: wordings, and the metrics of retrieval by hand."""

from __future__ import annotations

import re
from itertools import chain

import numpy as np
import pytest
import Stemmer

from crl.envs.alfworld.small import HOLDS
from crl.envs.places import FIXED_NAMES, PLACE_NAMES
from crl.envs.webshop.words import KINDS
from support.paths import benchmark

STOP_WORDS = {"a", "and", "at", "for", "in", "of", "on", "the", "to", "with"}


@pytest.fixture(scope="module")
def lesson_pairs():
    pytest.importorskip("alfworld")
    return benchmark("lesson_pairs")


@pytest.fixture(scope="module")
def embedders(lesson_pairs):
    return benchmark("embedders")


def stems(text: str) -> set[str]:
    words = set(re.findall("[a-z]+", text.lower())) - STOP_WORDS
    return set(Stemmer.Stemmer("english").stemWords(sorted(words)))


def test_there_are_500_pairs_whose_paraphrases_share_no_word_with_the_goal(lesson_pairs):
    pairs = lesson_pairs.lesson_pairs(lesson_pairs.PLACES)
    assert sum(len(of_task.goals) for of_task in pairs.values()) == 500
    for of_task in pairs.values():
        assert len(set(of_task.goals)) == len(of_task.goals)
        assert of_task.right.diagonal().all()
        for wording in lesson_pairs.WORDINGS[1:]:
            assert len(set(of_task.lessons[wording])) == len(of_task.goals)
        for goal, lesson in zip(of_task.goals, of_task.lessons["other words"], strict=True):
            assert not stems(goal) & stems(lesson), (goal, lesson)
        for goal, lesson in zip(of_task.goals, of_task.lessons["same words"], strict=True):
            assert len(stems(goal) & stems(lesson)) >= 2, (goal, lesson)


def test_pairs_are_the_same_in_every_call(lesson_pairs):
    sizes = dict.fromkeys(lesson_pairs.PLACES, 4)
    pairs, again = (lesson_pairs.lesson_pairs(sizes) for _ in range(2))
    for task, of_task in pairs.items():
        assert (of_task.goals, of_task.lessons) == (again[task].goals, again[task].lessons)
    assert {task: of_task.lessons["other words"][0] for task, of_task in pairs.items()} == {
        "room": "In the honey-yellow curved doorway, the exit lies to the northeast.",
        "maze": (
            "The passage out of the honey-yellow curved doorway runs west, southwest, "
            "southwest, southwest, southeast."
        ),
        "keyroom": (
            "In the honey-yellow curved doorway, pick up the opener at row 3, column 6, "
            "then go to row 2, column 4."
        ),
        "webshop": (
            "Requests about summer strap shoes, moulds to the foot and grips the floor, "
            "end well with savo."
        ),
        "alfworld": (
            "In the honey-yellow curved doorway, when asked for a washed omelette "
            "ingredient on the washbowl, go to microwave 1 at the beginning."
        ),
    }


def test_every_word_of_the_tasks_has_other_words(lesson_pairs):
    phrases = lesson_pairs.PHRASES
    assert set(phrases["places"]) == set(
        chain.from_iterable(name.split() for name in (*PLACE_NAMES, *FIXED_NAMES))
    )
    assert set(phrases["products"]) == set(chain.from_iterable(kind.nouns for kind in KINDS))
    assert set(phrases["attributes"]) == set(
        chain.from_iterable((*kind.title_attributes, *kind.feature_attributes) for kind in KINDS)
    )
    things = set(" ".join(HOLDS.values()).lower().split()) | {name.lower() for name in HOLDS}
    assert set(phrases["things"]) == things | {"desklamp"}
    for table in ("places", "products", "attributes", "things"):
        assert len(set(phrases[table].values())) == len(phrases[table]), "no two are the same"
        for words, other in phrases[table].items():
            assert not stems(words) & stems(other), (words, other)


def test_metrics_by_hand(embedders):
    cosines = np.array(
        [
            [0.9, 0.2, 0.1],  # the own lesson is the most similar one
            [0.5, 0.3, 0.1],  # another lesson is more similar, and right
            [0.0, 0.05, 0.05],  # another lesson is equally similar, and wrong
        ],
        np.float32,
    )
    right = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1]], bool)
    metrics = embedders.place_metrics(cosines, right)
    assert metrics["recall@1"].tolist() == [1, 0, 0]
    assert metrics["recall@5"].tolist() == [1, 1, 1]
    assert metrics["right"].tolist() == [1, 1, 0]
    assert metrics["kept"].tolist() == [1, 1, 0]
    row = embedders.row(metrics)
    assert (row["places"], row["right"]) == (3, pytest.approx(2 / 3))
    assert row["right_interval"] == pytest.approx((0.2077, 0.9385), abs=1e-4)

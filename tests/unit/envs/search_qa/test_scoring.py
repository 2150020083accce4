"""Exact match after normalisation."""

from __future__ import annotations

import pytest

from crl.envs.search_qa.scoring import exact_match, normalised


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Seine", "seine"),
        ("  an  apple a day ", "apple day"),
        ("U.S.A.", "usa"),
        ("it's", "its"),
        ("Theatre", "theatre"),
        ("the", "the"),
        ("The  The.", "the the"),
        ("A", "a"),
        ("!!!", "!!!"),
        (" ", ""),
        ("Ångström", "ångström"),
        ("one\ttwo\nthree", "one two three"),
    ],
)
def test_normalisation(text: str, expected: str) -> None:
    assert normalised(text) == expected


def test_any_gold_answer_is_right() -> None:
    assert exact_match("the seine!", ["Paris", "Seine"])
    assert not exact_match("Seine river", ["Seine"])
    assert not exact_match("sein", ["Seine"])
    assert not exact_match("", ["Seine"])


def test_answers_of_articles_or_punctuation_alone() -> None:
    """The answer "the" would otherwise be right whenever a gold answer is an article."""
    gold = ["The The", "A", "x"]
    assert [exact_match(answer, gold) for answer in ("The The", "a", "A.", "x")] == [True] * 4
    assert not any(exact_match(answer, gold) for answer in ("the", "an", "", "!"))
    assert exact_match("!!!", ["!!!"])
    assert not exact_match("", ["", " "])

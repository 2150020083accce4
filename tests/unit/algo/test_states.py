"""Equal states of step advantages."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crl.algo.states import similar_states, similarity


def test_similarity_by_hand():
    # the longest common subsequence of "abcd" and "bcde" is "bcd": 2 · 3 / 8
    assert similarity("abcd", "bcde") == 0.75
    assert similarity("abc", "abc") == similarity("", "") == 1
    assert similarity("abc", "xyz") == 0
    # 2 · 17 / 50, which 1 − 16 / 50 is below in floating point
    assert similarity("a" * 17 + "b" * 8, "a" * 17 + "c" * 8) >= 0.68


@given(st.text("ab ", max_size=12), st.text("ab ", max_size=12), st.sampled_from([0.5, 0.68, 0.9]))
def test_only_values_below_the_bound_may_be_0(first: str, second: str, bound: float):
    value = similarity(first, second)
    assert similarity(first, second, bound) in ((value,) if value >= bound else (value, 0))


def test_long_texts_are_compared_in_full():
    """difflib ignores frequent characters from 200 characters on; the ratio then depends on the
    order of the texts.
    """
    first, second = "a b " * 60 + "left", "a b " * 60 + "right"
    assert similarity(first, second) == similarity(second, first) > 0.97


def test_only_equal_texts_are_equal_states_at_threshold_one():
    assert similar_states(["a", "a ", "a"], [0, 0, 0], 1.0) == ["a", "a ", "a"]


def test_states_join_the_first_similar_representative_of_their_group():
    states = ["abcdefghij", "abcdefghix", "abcdefghxy", "abcdefghix"]
    # neighbours share 9 of 10 characters, the ends 8: the chain does not join them
    assert similar_states(states, [0, 0, 0, 0], 0.9) == [
        "abcdefghij", "abcdefghij", "abcdefghxy", "abcdefghij",
    ]  # fmt: skip
    assert similar_states(states, [0, 1, 1, 2], 0.9) == [
        "abcdefghij", "abcdefghix", "abcdefghix", "abcdefghix",
    ], "groups never share a representative"  # fmt: skip


@given(
    st.lists(st.tuples(st.text("ab ", max_size=6), st.integers(0, 2)), max_size=12),
    st.sampled_from([0.5, 0.8, 1.0]),
    st.randoms(use_true_random=False),
)
def test_the_result_does_not_depend_on_the_order(
    pairs: list[tuple[str, int]], threshold: float, rng: random.Random
):
    def representatives(pairs: list[tuple[str, int]]) -> dict[tuple[str, int], str]:
        states, groups = [text for text, _ in pairs], [group for _, group in pairs]
        return dict(zip(pairs, similar_states(states, groups, threshold), strict=True))

    expected = representatives(pairs)
    rng.shuffle(shuffled := list(pairs))
    assert representatives(shuffled) == expected
    for (state, group), representative in expected.items():
        assert (representative, group) in expected
        assert similarity(state, representative) >= threshold


def test_faults_are_refused():
    with pytest.raises(ValueError, match="2 states, but 1 groups"):
        similar_states(["a", "b"], [0], 0.9)
    with pytest.raises(ValueError, match=r"in \(0, 1\], not 0"):
        similar_states(["a"], [0], 0)

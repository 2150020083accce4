"""Sums of advantage terms, with values worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from crl.algo import sum_terms
from crl.protocols import PerToken, PerTurn
from crl.types import Segment, Task, TokenTrace, Trajectory
from support.trajectories import build_trajectory


def segment(origin, text: str = "x") -> Segment:
    return Segment("assistant" if origin in ("policy", "tool_call") else "user", text, origin)


def episode() -> Trajectory:
    """Return an episode of two turns.

    The agent asks one question before its first action. The question has 2 tokens, the actions have
    1 and 3. An action in overtime is not trained.
    """
    origins = (
        "task",
        "env",
        "tool_call",
        "tool_result",
        "policy",
        "env",
        "policy",
        "env",
        "policy",
    )
    mask = (0, 1, 1, 0, 1, 0, 0, 1, 1, 1)
    n = len(mask)
    return build_trajectory(
        Task("room", 0, "train", "find the stairs"),
        step=0,
        group=0,
        member=0,
        condition="guided",
        segments=tuple(segment(origin, f"{i}") for i, origin in enumerate(origins)),
        traces=(TokenTrace(tuple(range(n)), mask, (0.0,) * n, tuple(m - 1 for m in mask)),),
        turn_rewards=(0.0, 1.0),
    )


def test_terms_with_one_value_per_trajectory_stay_numbers():
    terms = [torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.25])]
    assert sum_terms(terms, [episode(), episode()]) == [1.5, -0.75]


def test_a_turns_advantage_applies_to_its_question_too():
    term = PerTurn([(1.0, -2.0)])
    assert sum_terms([term], [episode()]) == [(1.0, 1.0, 1.0, -2.0, -2.0, -2.0)]


def test_terms_of_different_units_are_summed_per_token():
    terms = [
        torch.tensor([10.0]),
        PerTurn([(1.0, -2.0)]),
        PerToken([(0.0, 0.1, 0.2, 0.3, 0.4, 0.5)]),
    ]
    assert sum_terms(terms, [episode()]) == [pytest.approx((11.0, 11.1, 11.2, 8.3, 8.4, 8.5))]


@pytest.mark.parametrize(
    ("term", "text"),
    [
        (torch.tensor([1.0, 2.0]), "advantages of all 1 trajectories, not of 2"),
        ([1.0], "a tensor, PerTurn or PerToken, not a list"),
        (PerTurn([(1.0,)]), r"one advantage per turn \(2\), not 1"),
        (PerToken([(1.0,)]), r"one advantage per sampled token \(6\), not 1"),
        (PerTurn([]), "of all 1 trajectories, not of 0"),
        (PerTurn([(1.0, 2.0)] * 2), "of all 1 trajectories, not of 2"),
    ],
)
def test_terms_of_another_form_are_refused(term, text: str):
    with pytest.raises(ValueError, match=text):
        sum_terms([term], [episode()])


def test_an_episode_that_ends_after_a_question_has_tokens_but_no_turn():
    whole = episode()
    asked = replace(
        whole,
        segments=whole.segments[:3],
        traces=(TokenTrace((0, 1, 2), (0, 1, 1), (0.0,) * 3, (-1, 0, 0)),),
        activity=replace(whole.activity, turn_rewards=()),
    )
    assert sum_terms([PerTurn([()])], [asked]) == [(0.0, 0.0)]


def test_states_before_the_turns():
    assert episode().turn_states == ("1", "5")

"""GiGPO: step advantages with values worked out by hand, and a run."""

from __future__ import annotations

import pytest

from crl.config import load
from crl.methods.parts.training import GroupAdvantage, StepAdvantage
from crl.planning import tasks
from crl.planning.methods import build_method
from crl.types import Segment, Trajectory
from support.doors import TASK
from support.trajectories import build_trajectory


def episode(group: int, member: int, *turns: tuple[str, float]) -> Trajectory:
    """Return an episode of turns: the observation before each, and its reward."""
    segments = tuple(
        segment
        for observation, _ in turns
        for segment in (Segment("user", observation, "env"), Segment("assistant", "go", "policy"))
    )
    rewards = tuple(reward for _, reward in turns)
    return build_trajectory(
        TASK, 0, group, member, segments=segments, turn_rewards=rewards, reward=sum(rewards)
    )


BATCH = [
    episode(0, 0, ("a", 0.0), ("b", 0.0), ("a", 1.0)),
    episode(0, 1, ("a", 0.0), ("c", 0.0)),
    episode(1, 0, ("a", 1.0)),
]


def test_step_advantages_by_hand():
    # returns with γ = 1/2: 1/4, 1/2, 1 | 0, 0 | 1. State a of group 0 has 1/4, 1 and 0, mean 5/12.
    # b, c, and a in group 1 occur once.
    by_hand = [[-1 / 6, 0, 7 / 12], [-5 / 12, 0], [0]]
    values = StepAdvantage(1.0, 0.5, 1.0, "none")(BATCH).values
    assert [pytest.approx(row) for row in by_hand] == values
    # The sample variance is ((1/6)² + (7/12)² + (5/12)²) / 2 = 13/48, and w = 2.
    std = (13 / 48) ** 0.5
    values = StepAdvantage(2.0, 0.5, 1.0, "std")(BATCH).values
    assert [pytest.approx([2 * v / std for v in row], abs=1e-4) for row in by_hand] == values


def test_similar_observations_can_be_one_state():
    batch = [episode(0, 0, ("you see a cup 1", 1.0)), episode(0, 1, ("you see a cup 2", 0.0))]
    assert StepAdvantage(1.0, 0.9, 1.0, "none")(batch).values == [[0], [0]]
    # 14 of 15 characters agree: 2 · 14 / 30 = 0.933
    assert StepAdvantage(1.0, 0.9, 0.93, "none")(batch).values == [[0.5], [-0.5]]
    assert StepAdvantage(1.0, 0.9, 0.94, "none")(batch).values == [[0], [0]]


def test_an_episode_without_turns_has_no_step_advantage():
    empty = build_trajectory(TASK, 0, 0, 2)
    assert StepAdvantage(1.0, 0.5, 1.0, "none")([*BATCH[:2], empty]).values[2] == []


def test_the_method_sums_both_advantages():
    config = load(["room"], options={"method": "gigpo"}, sets=["gigpo.step_weight=0.5"])
    method = build_method(config, tasks.specs(config))
    assert method.actor.terms == (GroupAdvantage("std"), StepAdvantage(0.5, 0.95, 1.0, "std"))
    sets = ["gigpo.gamma=0.5", "gigpo.similarity=0.75"]
    other = load(["room"], options={"method": "gigpo"}, sets=sets)
    _, step = build_method(other, tasks.specs(other)).actor.terms
    assert step == StepAdvantage(1.0, 0.5, 0.75, "std")
    assert method.distiller is None
    assert method.extractor is None

"""Staleness gate under random schedules with empty, failed and slow groups."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crl.rollout.gate import StalenessGate


def test_synchronous_gate_by_hand() -> None:
    gate = StalenessGate(groups_per_step=2, max_staleness=0)
    assert [gate.may_start(i) for i in range(4)] == [True, True, False, False]
    gate.start(0)
    gate.start(1)
    assert not gate.ready(0)
    gate.finish(1)
    gate.finish(0)
    assert gate.ready(0)
    assert not gate.may_start(2)
    gate.complete(0)
    assert gate.may_start(2)
    assert gate.may_start(3)
    assert not gate.may_start(4)


def test_one_step_ahead_by_hand() -> None:
    gate = StalenessGate(groups_per_step=2, max_staleness=1)
    assert [gate.may_start(i) for i in range(5)] == [True, True, True, True, False]


def test_a_resumed_gate_continues_at_its_step() -> None:
    gate = StalenessGate(groups_per_step=3, max_staleness=0, completed_steps=5)
    assert gate.may_start(15)
    assert not gate.may_start(18)
    gate.start(15)


def test_details_name_the_groups_that_may_start() -> None:
    gate = StalenessGate(4, 1, completed_steps=2)
    gate.start(8)
    assert gate.details() == (
        "the next group is 9; groups up to 15 may start (2 steps completed, max_staleness 1)"
    )
    assert gate.may_start(15)
    assert not gate.may_start(16)


def test_invalid_calls_raise_errors() -> None:
    gate = StalenessGate(groups_per_step=2, max_staleness=0)
    with pytest.raises(ValueError, match="group 1 may not start"):
        gate.start(1)
    gate.start(0)
    with pytest.raises(ValueError, match="group 0 may not start"):
        gate.start(0)
    gate.start(1)
    with pytest.raises(ValueError, match="group 2 may not start"):
        gate.start(2)
    with pytest.raises(ValueError, match="step 0 cannot complete"):
        gate.complete(0)
    gate.finish(0)
    gate.finish(1)
    with pytest.raises(ValueError, match="step 1 cannot complete"):
        gate.complete(1)


@given(
    groups=st.integers(1, 5),
    staleness=st.integers(0, 3),
    steps=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
def test_every_schedule_ends_within_the_staleness_bound(
    groups: int, staleness: int, steps: int, seed: int
) -> None:
    """Check that all groups run and that the bound holds at every start.

    Groups finish in any order, slow ones last. Some of them train nothing.
    """
    rng = random.Random(seed)
    gate = StalenessGate(groups, staleness)
    running: list[int] = []
    started = 0
    while gate.completed_steps < steps:
        choices = []
        if started < steps * groups and gate.may_start(started):
            choices.append("start")
        if running:
            choices.append("finish")
        if gate.ready(gate.completed_steps):
            choices.append("complete")
        assert choices, "deadlock: no group can start, finish or complete"
        match rng.choice(choices):
            case "start":
                gate.start(started)
                assert started // groups - gate.completed_steps <= staleness
                running.append(started)
                started += 1
            case "finish":
                gate.finish(running.pop(rng.randrange(len(running))))
            case "complete":
                gate.complete(gate.completed_steps)
    assert started >= steps * groups

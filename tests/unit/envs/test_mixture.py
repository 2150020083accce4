"""Mixture of task streams: shares, names, and restoring its state."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crl.envs.base import StreamSettings
from crl.envs.mixture import Mixture
from crl.envs.places import PlaceStream
from crl.types import Task, Trajectory
from support.trajectories import build_trajectory


def stream(seed: int = 0) -> PlaceStream:
    return PlaceStream("game", "{place}", seed, StreamSettings(places=4, permanent=1))


def mixture(names: Sequence[str] = "abc") -> Mixture:
    return Mixture({name: stream(seed) for seed, name in enumerate(names)})


def names(tasks: Sequence[Task]) -> str:
    return "".join(task.name for task in tasks)


def test_sources_are_drawn_in_turn() -> None:
    assert names(mixture().draw(6)) == "abcabc"


def test_the_next_batch_continues_with_the_next_source() -> None:
    source = mixture()
    assert [names(source.draw(4)) for _ in range(3)] == ["abca", "bcab", "cabc"]


def test_a_skipped_turn_advances_no_stream() -> None:
    source, whole = mixture("ab"), mixture("ab")
    assert source.next_name() == "a"
    source.skip()
    assert source.next_name() == "b"
    first_a, first_b, _, second_b = whole.draw(4)
    assert source.draw(3) == [first_b, first_a, second_b]


def test_streams_are_independent_and_their_tasks_are_renamed() -> None:
    drawn = mixture("ab").draw(8)
    for seed, name in enumerate("ab"):
        own = [task for task in drawn if task.name == name]
        expected = stream(seed).draw(4)
        assert [(t.seed, t.goal, t.params, t.split) for t in own] == [
            (t.seed, t.goal, t.params, t.split) for t in expected
        ]


def test_a_mixture_of_one_stream() -> None:
    assert names(mixture("a").draw(3)) == "aaa"


@given(batches=st.lists(st.integers(0, 7), max_size=8), kinds=st.integers(1, 4))
def test_shares_never_differ_by_more_than_one(batches: list[int], kinds: int) -> None:
    source, counts = mixture("abcd"[:kinds]), Counter(dict.fromkeys("abcd"[:kinds], 0))
    for n in batches:
        drawn = source.draw(n)
        assert len(drawn) == n
        counts.update(task.name for task in drawn)
        assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("before", [0, 1, 4, 5])
def test_the_state_can_be_restored_from_json(before: int) -> None:
    source, other = mixture(), mixture()
    source.draw(before)
    state = json.loads(json.dumps(source.state()))
    expected = source.draw(7)
    other.draw(2)
    other.load_state(state)
    assert other.draw(7) == expected
    assert state == json.loads(json.dumps(state)), "later draws do not change a saved state"
    other.load_state(state)
    assert other.state() == state


def test_each_stream_observes_its_own_trajectories() -> None:
    class Observing(PlaceStream):
        def __init__(self) -> None:
            super().__init__("game", "{place}", 0, StreamSettings())
            self.seen: list[Trajectory] = []

        def observe(self, trajectories: Sequence[Trajectory]) -> None:
            self.seen += trajectories

    parts = {"a": Observing(), "b": Observing()}
    source = Mixture(parts)
    batch = [
        build_trajectory(task, 0, group, 0, "free") for group, task in enumerate(source.draw(3))
    ]
    source.observe(batch)
    assert parts["a"].seen == [batch[0], batch[2]]
    assert parts["b"].seen == [batch[1]]


def test_a_lone_surrogate_in_a_goal_is_replaced() -> None:
    broken = PlaceStream("game", "room \ud83d {place}", 0, StreamSettings(places=4, permanent=1))
    (task,) = Mixture({"a": broken}).draw(1)
    assert task.goal.startswith("room \ufffd ")
    task.goal.encode()

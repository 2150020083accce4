"""Cost of a run's training episodes, counted by hand."""

from __future__ import annotations

from crl.run.totals import Totals
from crl.types import Minibatch, Task, TokenTrace, TrainSample, Trajectory
from support.trajectories import build_trajectory

TASK = Task("room", 0, "train", "goal")


def played(turns: int, overtime: int, tokens: int, error: str | None = None) -> Trajectory:
    return build_trajectory(
        TASK,
        0,
        0,
        0,
        "free",
        turns=turns,
        overtime_turns=overtime,
        sampled_tokens=tokens,
        error=error,
    )


def test_overtime_failed_episodes_and_trained_sequences_count():
    totals = Totals()
    totals.add([played(4, 4, 20), played(2, 0, 7)])
    totals.add([played(3, 1, 9, error="env: it died")])
    trace = TokenTrace((1, 2, 3), (0, 1, 1), (0.0, -1.0, -1.0), (-1, 7, 7))
    sample = TrainSample(trace, 0.5, 0.5)
    totals.add_training([Minibatch((sample, sample), 9, (trace,)), Minibatch((sample,), 2)])
    assert totals.metrics() == {
        "total/env_turns": 14,
        "total/env_turns/overtime": 5,
        "total/sampled_tokens/actor": 36,
        "total/trained_tokens/actor": 9,
    }
    assert totals.errors == 1


def test_seconds_of_the_steps_are_added() -> None:
    totals = Totals()
    totals.add_step(6.0, 0.5)
    totals.add_step(4.0, 0.25)
    assert totals.step_seconds == [10.0, 0.75]

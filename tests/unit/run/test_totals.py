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


def test_the_summary_line():
    assert Totals(1_234_567, 5, 36).line(9_000) == (
        "environment turns: 1,234,567 (5 in overtime); sampled tokens: actor 36, extractor 9,000"
    )


def test_the_time_of_the_steps() -> None:
    totals = Totals()
    assert totals.time_line() == ""
    totals.add_step(6.0, 0.5)
    totals.add_step(4.0, 0.25)
    assert totals.time_line() == (
        "time of the steps: 10 s; calls of the model that writes the bank were in progress in "
        "7.5% of it"
    )

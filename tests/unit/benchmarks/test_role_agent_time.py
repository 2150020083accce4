"""Time of the parts of Role-Agent: demonstrations and table, on episodes and numbers by hand."""

from __future__ import annotations

from typing import Any

import pytest

from crl.methods.parts.predicting import predictions
from crl.types import Segment
from support.paths import benchmark

role_agent_time = benchmark("role_agent_time")

SEGMENTS = [
    Segment("user", "Leave.", "task"), Segment("user", "A room.", "env"),
    Segment("assistant", "west", "policy"), Segment("user", "A hall.", "env"),
    Segment("assistant", "east", "policy"), Segment("user", "Outside.", "env"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("horizon", "predicted"), [(0, [[], []]), (1, [["A hall."], ["Outside."]]),
                               (2, [["A hall.", "Outside."], ["Outside."]])],
)  # fmt: skip
def test_replies_of_demonstrations_predict_what_follows(
    horizon: int, predicted: list[list[str]]
) -> None:
    played = role_agent_time.with_predictions(SEGMENTS, horizon)
    first, hall, last = played
    assert hall == SEGMENTS[3]
    assert [predictions(first.text), predictions(last.text)] == predicted
    assert first.text.endswith("<answer>west</answer>")
    assert last.text.endswith("<answer>east</answer>")


def line(step: int, time: float, **values: float) -> dict[str, Any]:
    return {"kind": "train", "step": step, "time": time, **values}


def test_the_first_two_steps_do_not_count() -> None:
    metrics = [
        {"kind": "eval", "time": 1.0},
        line(1, 40.0, **{"time/wait": 39.0}),
        line(2, 50.0, **{"time/wait": 10.0}),
        line(3, 60.0, **{"time/wait": 6.0, "perf/distil_share": 0.5, "time/predictions": 2.0}),
        line(4, 80.0, **{"time/wait": 8.0, "perf/distil_share": 0.1, "time/predictions": 4.0}),
    ]
    found = role_agent_time.parts(metrics)
    assert found["step"] == 15.0
    assert found["waiting for episodes"] == 7.0
    assert found["predictions"] == 3.0
    assert found["analysis and retrieval"] == (0.5 * 10 + 0.1 * 20) / 2
    assert found["training"] == 0.0
    table = role_agent_time.table(
        [
            {"method": "role_agent", "parts": found},
            {"method": "gigpo", "parts": {**found, "step": 10.0}},
        ]
    )
    assert "|  | role_agent | gigpo |" in table
    assert "| step | 15.000 (1.500×) | 10.000 (1.000×) |" in table
    assert "| success | 0.000 | 0.000 |" in table

"""Search for a collapse by benchmarks/collapse.py: numbers worked by hand, and the stored runs."""

from __future__ import annotations

from typing import Any

import pytest

from support.paths import ROOT, benchmark

collapse = benchmark("collapse")


def run(free: list[float]) -> list[dict[str, Any]]:
    """Return the metrics of a run with a success of free members in each step."""
    steps = [
        {
            "kind": "train", "rollout/success/free": value, "rollout/success/guided": 1 - value,
            "actor/entropy": 0.5, "rollout/turns": 3.0, "rollout/sampled_tokens": 8,
            "rollout/env_turns": 4,
        }
        for value in free
    ]  # fmt: skip
    return [{"kind": "eval"}, *steps]


def test_parts_and_fall_by_hand():
    values = collapse.parts(run([0.0, 0.2, 0.4, 0.6, 0.8]), lambda s: s["rollout/success/free"])
    assert values == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])
    steps = run([0.1, 0.3, 0.4, 0.4, 0.9, 0.7, 0.6, 0.4, 0.2, 0.0])
    values = collapse.parts(steps, lambda step: step["rollout/success/free"])
    assert values == pytest.approx([0.2, 0.4, 0.8, 0.5, 0.1])
    assert collapse.fall(values) == pytest.approx(0.7)
    with pytest.raises(ValueError, match="4 steps, fewer than 5"):
        collapse.parts(run([0.0] * 4), lambda step: step["rollout/success/free"])


def test_a_collapse_is_visible_in_the_tables():
    rising, falling = run([0.1, 0.3, 0.5, 0.7, 0.9]), run([0.1, 0.9, 0.5, 0.3, 0.2])
    text = collapse.tables({"self-distillation": [rising, falling], "co-evolved": [rising] * 2})
    assert "| success, free | self-distillation | 0.000, 0.700 |" in text
    assert "| success, free | co-evolved | 0.000, 0.000 |" in text
    assert "| tokens per turn | co-evolved | 2.000 ± 0.000 |" in text


@pytest.mark.parametrize(("figure", "setting"), [("9b", "room"), ("methods", "search_qa")])
def test_the_documented_tables_are_those_of_the_stored_runs(figure: str, setting: str):
    documented = (ROOT / "docs" / "results" / "tiny-models.md").read_text("utf-8").splitlines()
    for line in filter(None, collapse.stored_tables(figure, setting).splitlines()):
        assert line in documented


def test_steps_without_an_update_have_no_entropy():
    lines = run([0.1, 0.3, 0.5, 0.7, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9])
    del lines[1]["actor/entropy"]
    assert collapse.parts(lines, collapse.METRICS["entropy (nats)"]) == [0.5] * 5

"""Columns of the SmolLM2 benchmark, on numbers worked by hand."""

from __future__ import annotations

from support.paths import benchmark

smollm2 = benchmark("smollm2")


def test_means_of_the_first_and_the_last_steps_are_weighted_by_a_count() -> None:
    steps = [{"kind": "bank", "right": right, "answers": 2} for right in (0.0, 0.0, 0.1, 0.2, 0.2)]
    steps += [{"kind": "train"}, {"kind": "bank", "right": None, "answers": 0}]
    steps += [{"kind": "bank", "right": 0.9, "answers": 64}] * 4
    steps += [{"kind": "bank", "right": 0.0, "answers": 8}]
    assert smollm2.ends(steps, "right") == "0.100 → 0.720"
    assert smollm2.ends(steps, "right", "answers") == "0.100 → 0.873"  # 0.9 · 256 / 264
    assert smollm2.ends(steps, "left") == "–"

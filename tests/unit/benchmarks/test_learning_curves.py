"""Picture of benchmarks/learning_curves.py: numbers worked by hand, and the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.paths import benchmark

learning_curves = benchmark("learning_curves")


def stored_runs() -> list[dict]:
    return json.loads(learning_curves.RESULTS.read_text("utf-8"))["runs"]


def test_a_window_has_the_last_ten_known_values():
    smoothed = learning_curves.moving_mean([0.0, 1.0, None, *[0.5] * 8, 1.0])
    assert smoothed[:3] == [0.0, 0.5, 0.5]
    assert smoothed[10] == pytest.approx((1.0 + 8 * 0.5) / 9)
    assert smoothed[11] == pytest.approx((8 * 0.5 + 1.0) / 9)
    with pytest.raises(ValueError, match="before step 1"):
        learning_curves.moving_mean([None, 1.0])


def test_the_interval_is_over_seeds():
    runs = [{"curves": {"success/free": [value]}} for value in (1.0, 2.0, 3.0)]
    (mean,) = learning_curves.means_over_seeds(runs, "success/free")
    assert mean.value == 2.0
    assert mean.half_width == pytest.approx(4.302653 * (1 / 3) ** 0.5)


def test_every_line_has_five_stored_runs_of_every_setting():
    for setting in learning_curves.PANELS:
        for line in learning_curves.LINES:
            runs = [r for r in stored_runs() if (r["setting"], r["arm"]) == (setting, line.arm)]
            assert len(runs) == 5
            assert len(learning_curves.means_over_seeds(runs, line.curve)) == 100


def test_the_picture_of_the_stored_runs_is_small_and_always_the_same(tmp_path: Path):
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in pictures:
        learning_curves.draw(stored_runs(), path)
    one, two = (path.read_text("utf-8") for path in pictures)
    assert one == two
    assert len(one) < 150_000
    for title in learning_curves.PANELS.values():
        assert f"<!-- {title} -->" in one

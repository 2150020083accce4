"""Charts as data, and their geometry. Numbers are worked by hand."""

from __future__ import annotations

import math

import pytest

from crl.report.charts import BarChart, Line, LineChart, Point, averaged, over_seeds, thinned
from crl.report.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    LineGeometry,
    bars,
    described,
    sparkline,
    ticks,
)


def points(*values: float) -> list[Point]:
    return [Point(x, y) for x, y in enumerate(values)]


def test_averages_over_the_last_values():
    assert [p.y for p in averaged(points(0, 1, 2, 6), 2)] == [0, 0.5, 1.5, 4]
    assert [p.x for p in averaged(points(0, 1, 2, 6), 2)] == [0, 1, 2, 3]


def test_thinned_points_are_means_of_equal_groups():
    assert [(p.x, p.y) for p in thinned(points(1, 3, 5, 7, 9), 2)] == [(2, 3), (4, 8)]
    assert thinned(points(1, 3), 2) == points(1, 3)


def test_mean_over_the_seeds_that_have_a_step():
    """Student's interval of 0.2 and 0.6: 0.4 ± 12.706 · 0.2. That of one or equal values: none."""
    runs = [
        [Point(0, 1), Point(5, 0.2), Point(7, 0.5)],
        [Point(5, 0.6), Point(6, 1), Point(7, 0.5)],
    ]
    points = over_seeds(runs)
    assert [(p.x, p.y) for p in points] == [(0, 1), (5, pytest.approx(0.4)), (6, 1), (7, 0.5)]
    assert [math.isfinite(p.low) for p in points] == [False, True, False, False]
    assert points[1].high - points[1].y == pytest.approx(12.706 * 0.2, rel=1e-3)
    assert points[1].y - points[1].low == pytest.approx(points[1].high - points[1].y)
    cut = over_seeds(runs, 0.0, 1.0)[1]
    assert (cut.low, cut.high) == (0.0, 1.0)


def test_one_run_keeps_its_intervals():
    run = [Point(5, 0.2, 0.1, 0.3)]
    assert over_seeds([run]) == run


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0, 1, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (-0.15, 0.04, ["-0.15", "-0.10", "-0.05", "0.00"]),
        (0, 2452, ["0", "500", "1,000", "1,500", "2,000"]),
        (0, 7e-13, ["0", "2e-13", "4e-13", "6e-13"]),
        (
            5.28e-13,
            5.29e-13,
            ["5.280e-13", "5.282e-13", "5.284e-13", "5.286e-13", "5.288e-13", "5.290e-13"],
        ),
        (1.5e9, 3.5e9, ["1.5e+09", "2.0e+09", "2.5e+09", "3.0e+09", "3.5e+09"]),
    ],
)
def test_ticks_are_round(low: float, high: float, texts: list[str]):
    assert [text for _, text in ticks(low, high)] == texts


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (1, 3, ["1", "2", "3"]),
        (0, 1, ["0", "1"]),
        (0, 12, ["0", "5", "10"]),
        (0, 2452, ["0", "500", "1,000", "1,500", "2,000"]),
    ],
)
def test_ticks_of_steps_are_whole(low: float, high: float, texts: list[str]):
    assert [text for _, text in ticks(low, high, whole=True)] == texts


@pytest.mark.parametrize(("step", "texts"), [(0, ["0", "1"]), (3, ["2", "3", "4"])])
def test_axis_of_a_single_step(step: int, texts: list[str]):
    geometry = LineGeometry(LineChart("t", "", [Line("a", [Point(step, 0.5)])]))
    assert [tick.text for tick in geometry.x_ticks] == texts


def test_long_labels_fit_beside_the_axis():
    short = LineGeometry(LineChart("t", "", [Line("a", points(0, 1))]))
    long = LineGeometry(LineChart("t", "", [Line("a", points(5.28e-13, 5.29e-13))]))
    assert short.left == LEFT < long.left
    assert long.x(0) == long.left


def test_positions_fill_the_plot():
    line = Line("a", [Point(0, 0.0), Point(10, 1.0)])
    geometry = LineGeometry(LineChart("t", "", [line]))
    assert geometry.path(line) == f"{LEFT}.0,{HEIGHT - BOTTOM}.0 {WIDTH - RIGHT}.0,{TOP}.0"


def test_fixed_ends_of_the_axis_cut_intervals():
    line = Line("a", [Point(0, 0.5, -0.4, 1.4)])
    chart = LineChart("t", "", [line], 0.0, 1.0)
    assert chart.bounds == (0.0, 1.0)
    ((_, low, high),) = LineGeometry(chart).intervals(line)
    assert (low, high) == (HEIGHT - BOTTOM, TOP)


def test_equal_values_have_an_axis():
    assert LineChart("t", "", [Line("a", points(2, 2))]).bounds == (1.5, 2.5)


@pytest.mark.parametrize(
    ("values", "possible", "bounds"),
    [
        ((0, 0), (0, 1), (0, 0.5)),
        ((1, 1), (0, 1), (0.5, 1)),
        ((0, 0), (0, math.inf), (0, 0.5)),
        ((0.01, 0.02), (0, 1), (0.01, 0.02)),
    ],
)
def test_an_axis_has_possible_values_only(
    values: tuple[float, ...], possible: tuple[float, float], bounds: tuple[float, float]
):
    chart = LineChart("t", "", [Line("a", points(*values))], possible=possible)
    assert chart.bounds == bounds


def test_few_intervals_are_bars_and_many_a_band():
    few = Line("a", [Point(x, 0.5, 0.4, 0.6) for x in range(3)])
    many = Line("a", [Point(x, 0.5, 0.4, 0.6) for x in range(30)])
    geometry = LineGeometry(LineChart("t", "", [few, many]))
    assert len(geometry.intervals(few)) == 3
    assert not geometry.band(few)
    assert not geometry.intervals(many)
    assert len(geometry.band(many).split()) == 60
    assert not geometry.band(Line("a", points(*range(30)))), "without intervals"


def test_bars_relative_to_the_longest():
    shown = bars(BarChart("t", "s", {"a": 4.0, "b": 1.0, "c": 0.0}))
    assert [(bar.name, bar.value, bar.share) for bar in shown] == [
        ("a", "4", 100), ("b", "1", 25), ("c", "0", 0),
    ]  # fmt: skip
    assert bars(BarChart("t", "", {})) == []


def test_description_for_readers_who_do_not_see_the_chart():
    line = Line("free", [Point(0, 0.25), Point(100, 0.5, 0.4, 0.6)])
    assert described(LineChart("room", "", [line])) == (
        "room. free: from 0.25 to step 100: 0.5 [0.4, 0.6]."
    )


def test_a_single_line_needs_no_name():
    chart = LineChart("Loss", "", [Line("", points(0.5, 0.25))])
    assert described(chart) == "Loss. From 0.5 to step 1: 0.25."
    assert [text for _, _, text in LineGeometry(chart).marks(chart.lines[0])] == [
        "step 0: 0.5", "step 1: 0.25",
    ]  # fmt: skip


def test_sparkline_needs_two_values():
    assert sparkline([0.5]) == ""
    assert sparkline([0.0, 1.0]) == "0.0,22.0 120.0,2.0"


def test_sparkline_of_values_at_steps():
    points = sparkline([-1.0, 0.0, 1.0], low=-1, xs=[10, 20, 50])
    assert points == "0.0,22.0 30.0,12.0 120.0,2.0"


def test_unknown_intervals_are_not_drawn():
    line = Line("a", [Point(0, 0.5, math.nan, math.nan)])
    assert LineGeometry(LineChart("t", "", [line])).intervals(line) == []

"""Tests of the elements of drawings: numbers, sparklines, bars and sections."""

from __future__ import annotations

from rich.text import Text

from crl.cli.draw import (
    LineGroup,
    allocate_lines,
    bar,
    format_number,
    one_line,
    printable,
    sparkline,
)
from crl.monitor.snapshot import Series
from crl.wording import duration


def test_numbers():
    assert [format_number(v, "+.4f") for v in (None, 0.5, -1e30)] == ["–", "+0.5000", "-1.0e+30"]
    assert [duration(v) for v in (None, 0, 59.9, 61, 3723)] == [
        "–",
        "0:00",
        "0:59",
        "1:01",
        "1:02:03",
    ]
    assert printable("a\x1b\x00\u202e\ud800é") == r"a\x1b\x00\u202e\ud800é"
    assert one_line(" a\n\t b\x85c ", 100) == "a b c"


def test_sparklines():
    assert sparkline(Series((0.0, None, 0.5, 1.0)), 10, 0, 1) == "▁ ▅█"
    assert sparkline(Series((0.0, None, 0.5, 1.0)), 2, 0, 1) == "▅█"
    assert sparkline(Series((5.0, 5.0)), 10) == "▅▅", "a constant is in the middle"
    assert sparkline(Series((-1e308, 1e308)), 10) == "▁█"
    assert sparkline(Series((2.0, -1.0)), 10, 0, 1) == "█▁"
    assert [
        sparkline(Series(values), width) for values, width in (((), 5), ((None,), 5), ((1.0,), 0))
    ] == ["", "", ""]


def test_bars():
    assert bar([(1.0, "a", ""), (2.0, "b", ""), (1.0, "c", "")], 8).plain == "aabbbbcc"
    assert bar([(1.0, "a", ""), (0.0, "b", "")], 5).plain == "aaaaa"
    assert bar([(0.0, "a", "")], 5).plain == ""


def test_lines_are_allocated_by_priority():
    lines = [Text(str(n)) for n in range(9)]
    sections = {
        "a": LineGroup(lines, min_lines=2, title="A"),
        "b": LineGroup(lines, min_lines=1),
        "c": LineGroup(()),
    }
    share = {
        height: allocate_lines(sections, height, priority="abc", growth="bac")
        for height in (2, 3, 4, 13, 30)
    }
    assert [(s["a"], s["b"]) for s in share.values()] == [(0, 2), (2, 0), (2, 1), (3, 9), (9, 9)]
    assert [t.plain for t in LineGroup(lines, tail=True).draw(2, 10)] == ["7", "8"]
    assert [t.plain for t in LineGroup(lines, title="A").draw(1, 10)] == ["── A ─────", "0"]

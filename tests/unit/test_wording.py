"""Wording that several parts of the output share."""

from __future__ import annotations

from crl.types import Lift
from crl.wording import lift_text, listed, percent, times


def test_a_lift_has_its_interval_within_the_possible_lifts():
    lift = Lift(1, -1.0)
    assert (lift.low, lift.high) == (-1, 1)
    assert lift_text(lift) == "-1.00 [-1.00, +1.00]"
    assert lift_text(Lift(4, 0.25, 0.0)) == "+0.25 [-0.44, +0.94]"
    assert lift_text(Lift(3, 0.5, 0.0)) == "+0.50 [-0.56, +1.00]"
    assert lift_text(None) == "–"


def test_numbers_in_words():
    assert [times(n) for n in (1, 2, 3, 1200)] == ["once", "twice", "3 times", "1,200 times"]
    assert [listed(items) for items in ([0], [0, 2], [0, 2, 5])] == ["0", "0 and 2", "0, 2 and 5"]
    assert (percent(0.725, 1), percent(0.5)) == ("72.5 %", "50 %")

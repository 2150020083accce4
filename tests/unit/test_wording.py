"""Wording that several parts of the output share."""

from __future__ import annotations

from crl.types import Lift
from crl.wording import lift_text


def test_a_lift_has_its_interval_within_the_possible_lifts():
    lift = Lift(1, -1.0)
    assert (lift.low, lift.high) == (-1, 1)
    assert lift_text(lift) == "-1.00 [-1.00, +1.00]"
    assert lift_text(Lift(4, 0.25, 0.0)) == "+0.25 [-0.44, +0.94]"
    assert lift_text(Lift(3, 0.5, 0.0)) == "+0.50 [-0.56, +1.00]"
    assert lift_text(None) == "–"

"""Wording that several parts of the output share."""

from __future__ import annotations

from crl.types import Lift
from crl.wording import lift_text


def test_a_lift_has_half_its_interval_also_beyond_the_lowest_lift():
    lift = Lift(1, -1.0)
    assert lift.low == -1
    assert lift_text(lift) == f"-1.00 ± {lift.half_width:.2f}" == "-1.00 ± 12.71"
    assert lift_text(Lift(4, 0.25, 0.0)) == "+0.25 ± 0.69"
    assert lift_text(None) == "–"
